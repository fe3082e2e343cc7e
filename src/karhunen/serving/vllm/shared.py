"""What saving and loading on one rank have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from karhunen.pages import PageCodec
from karhunen.serving.vllm.layout import EngineLayout
from karhunen.serving.vllm.paged import PagedLayer
from karhunen.serving.vllm.stats import Recorder
from karhunen.serving.vllm.window import WindowPages
from karhunen.stores import Counted


@final
@dataclass(frozen=True)
class Shared:
    """`suffix` is that of this rank's keys."""

    pages: PageCodec
    windows: WindowPages
    layers: Mapping[int, PagedLayer]
    layout: EngineLayout
    store: Counted
    suffix: str
    recorder: Recorder
