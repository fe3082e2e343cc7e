"""What the scheduler's half asks of the worker's half, step by step: plain values that are sent between processes.

Block ids are those of the engine, by KV cache group; a group's first id is the block of the text's first token.
"""

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class Load:
    """Pages `first_page` … of a request, into its blocks from token `start` on (those before are there already)."""

    request: str
    keys: tuple[str, ...]
    first_page: int
    start: int
    stop: int
    blocks: tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True)
class Save:
    """Pages of a request that this step completes; `blocks` are those of the pages' tokens in each group that keeps
    all tokens, nothing for the others."""

    keys: tuple[str, ...]
    first_page: int
    blocks: tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True)
class SaveWindow:
    """The last tokens of sliding layers at the end of the page of `key`, after `n_tokens`; `blocks` are the request's
    own, whole tables."""

    key: str
    n_tokens: int
    blocks: tuple[tuple[int, ...], ...]


@final
@dataclass
class Orders:
    """Of one step. `weights` is the fingerprint of the model, which the scheduler's half makes once for all ranks;
    `computes` says whether the step has tokens to compute, or only asks how loads are doing."""

    weights: str = ""
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[Save] = field(default_factory=list[Save])
    windows: list[SaveWindow] = field(default_factory=list[SaveWindow])
    computes: bool = True
