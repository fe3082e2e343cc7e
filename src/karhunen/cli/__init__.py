"""`karhunen`: verbs of the flow, each a thin reader of arguments over one public function.

A result goes to stdout, progress and logs to stderr. What a user can cause is one line on stderr and exit code 2.
"""

import atexit
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper

from karhunen.monitoring.allocator import keep_freed_memory


def main() -> None:
    """The command `karhunen`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode gets question marks, not a traceback
    keep_freed_memory()
    code = run(sys.argv[1:])
    if (colorama := sys.modules.get("colorama.initialise")) is not None:  # numba's
        atexit.unregister(colorama.reset_all)  # it would end with an escape code, on terminals that know none too
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line: 0, 2 for what the user can mend, 1 for a fault of ours, 130 for Ctrl-C."""
    debug = "--debug" in arguments
    try:
        from karhunen.cli.app import parse  # inside: Ctrl-C may come at once

        code = parse([*(["--debug"] if debug else []), *(word for word in arguments if word != "--debug")])
        sys.stdout.flush()
    except KeyboardInterrupt:
        start = "\n" if sys.stderr.isatty() else ""  # a terminal shows ^C behind whatever stood there
        sys.stderr.write(f"{start}karhunen: interrupted\n")
        return 130
    except BrokenPipeError:
        sys.stdout = None  # the reader of our output has left; what is still buffered has nowhere to go
        return 0
    except Exception as error:  # noqa: BLE001  # the last catch of the program
        if debug:
            traceback.print_exc()
        code, message = verdict(error)
        sys.stderr.write(f"karhunen: {message}\n")
    return code


def verdict(error: Exception) -> tuple[int, str]:
    """Exit code and the one line that says what went wrong."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] != "karhunen":
        return 2, f"{error.name} is not installed; `pip install 'karhunen[hf,cpu]'` brings what this verb needs"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return 2, f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, OSError)) or type(error).__name__ == "ModelUnavailable":
        return 2, text
    return 1, f"unexpected {type(error).__name__}: {text}; run again with --debug for the traceback"
