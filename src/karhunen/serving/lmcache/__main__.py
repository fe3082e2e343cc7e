"""`python -m karhunen.serving.lmcache …`: LMCache's own server, with the serde registered before it builds its storage.

All arguments are LMCache's (`python -m lmcache.v1.multiprocess.http_server --help`).
"""

import runpy
import sys

from karhunen.serving.lmcache.serde import register

SERVER = "lmcache.v1.multiprocess.http_server"


def main() -> None:
    """Register, then run the server as if it had been called itself."""
    register()
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
