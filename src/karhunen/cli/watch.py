"""`karhunen watch`: the dashboard of any process that exports karhunen's series."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.live import Live

from karhunen.cli.dashboard import as_document, line_of, picture
from karhunen.cli.screen import Screen

if TYPE_CHECKING:
    from karhunen.monitoring.seen import Seen

TIMEOUT_SECONDS = 10.0


def run(address: str, every: float, count: int | None, as_json: bool) -> None:
    """Look until `count` is reached, or Ctrl-C. As JSON: the last look, by default the first."""
    with Screen(as_json).open() as screen:
        seen = look(address)  # what can be refused is refused before anything is drawn
        redraws = screen.out.is_terminal and not screen.out.is_dumb_terminal and not as_json
        live = Live(console=screen.out, auto_refresh=False) if redraws else None
        n = 1
        with live or nullcontext():
            while True:
                if live is not None:
                    live.update(picture(seen, screen.out.width), refresh=True)
                elif not as_json:
                    screen.say(line_of(seen))
                if n == (1 if as_json and count is None else count):
                    break
                time.sleep(every)
                seen, n = look(address), n + 1
        screen.document(as_document(seen))


def look(address: str) -> "Seen":
    """One scrape. ValueError if the address is none, or something else answers there."""
    from urllib.error import URLError
    from urllib.parse import urlsplit
    from urllib.request import urlopen

    from karhunen.monitoring.seen import seen_from

    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{address!r} is no address; give one such as http://127.0.0.1:9400/metrics")
    try:
        with urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            text = answer.read().decode("utf-8", errors="replace")
    except (URLError, OSError) as error:
        raise ValueError(
            f"{address} does not answer: {getattr(error, 'reason', error)}; is its process running?"
        ) from error
    return seen_from(text)
