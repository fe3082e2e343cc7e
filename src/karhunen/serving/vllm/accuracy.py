"""One page in so many that were coded, decoded again and compared with the vectors it was coded from.

page coded ─▶ every n-th: its bytes, its exact vectors ─▶ decode ─▶ attention_accuracy_delta of each coded layer ─▶ rms

The connector sees no queries, so keys stand in for them. It runs in the saver's thread, after the page is stored.
"""

import logging
import time
from collections.abc import Mapping
from typing import final

from karhunen.monitoring.attention_accuracy import attention_accuracy_delta, standing_in
from karhunen.pages import PageCodec
from karhunen.pages.plan import KeysValues
from karhunen.serving.vllm.stats import Recorder

_LOG = logging.getLogger(__name__)


@final
class AccuracySampler:
    """Of the pages of one saver; `every` 0 looks at none, and costs nothing."""

    def __init__(self, pages: PageCodec, recorder: Recorder, every: int) -> None:
        self.pages, self.recorder, self.every = pages, recorder, every
        self._n_coded = 0
        self._waiting: list[tuple[bytes, dict[int, KeysValues]]] = []

    def coded(self, page: bytes, vectors: Mapping[int, KeysValues], first: int) -> None:
        """A page of the tokens of `vectors` from the `first` on; it is kept for `compare` if its turn has come."""
        self._n_coded += 1
        if not self.every or self._n_coded % self.every:
            return
        n_tokens = self.pages.open(page).n_tokens
        run = slice(first, first + n_tokens)
        self._waiting.append(
            (page, {layer: (k[:, run].clone(), v[:, run].clone()) for layer, (k, v) in vectors.items()})
        )

    def compare(self) -> None:
        """Those that wait. What goes wrong is logged: it is about a page that is stored already."""
        waiting, self._waiting = self._waiting, []
        for page, exact in waiting:
            start = time.perf_counter()
            try:
                self.recorder.ratio("attention_accuracy_delta", page_delta(self.pages, page, exact))
            except Exception as error:  # noqa: BLE001  # must not end the saver's thread
                _LOG.warning("a page was not compared: %s: %s", type(error).__name__, error)
            self.recorder.time("accuracy_seconds", time.perf_counter() - start)


def page_delta(pages: PageCodec, page: bytes, exact: Mapping[int, KeysValues]) -> float:
    """The root mean square of the layers' deltas; layers that pages hold as they are do not count.

    ValueError for a page that is refused, or of which no layer is coded.
    """
    coded = [layer for layer in exact if layer in pages.codec.layers]
    if not coded:
        raise ValueError("no layer of this page is coded, so there is nothing to compare")
    squares = 0.0
    for layer, decoded in pages.decode_layers([page], coded):
        queries, n_seen = standing_in(exact[layer][0])
        squares += attention_accuracy_delta(queries, n_seen, exact[layer], decoded) ** 2
    return (squares / len(coded)) ** 0.5
