"""How split attention is launched: tokens cut into ranges so that every multiprocessor has work, programs tuned."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import triton

from karhunen.kernels import triton_launch
from karhunen.kernels.entry_quads import EntryQuads
from karhunen.kernels.softmax import Partial
from karhunen.kernels.split_attention.arguments import (
    Extent,
    Found,
    Queries,
    Seen,
    Shape,
    Side,
    SideKind,
    Terms,
)
from karhunen.kernels.split_attention.merging import merge
from karhunen.kernels.split_attention.program import attend
from karhunen.kernels.triton_launch import Call

MOST_SPLITS = 256
LEAST_SPLIT_TOKENS = 256
PROGRAMS_PER_MULTIPROCESSOR = 8
MERGED_COEFFICIENTS = 32


@final
@dataclass(frozen=True)
class Launch:
    """How `attend` is cut and compiled: tokens per tile (a power of two from 16), warps, tiles asked for ahead."""

    tile: int
    n_warps: int
    n_ahead: int = 1
    n_registers: int | None = None

    def config(self) -> triton.Config:
        """As Triton takes it. Triton's own pipelining would stage look-ups in shared memory, which is cache here."""
        ahead = self.n_ahead if PREFETCHES else 0
        keywords = {"TILE": self.tile, "AHEAD": ahead}
        return triton.Config(keywords, num_warps=self.n_warps, num_stages=1, maxnreg=self.n_registers)


PREFETCHES = not triton_launch.INTERPRETED and torch.version.hip is None
LAUNCHES = (
    Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(64, 8, n_registers=128), Launch(32, 4, n_ahead=2),
    Launch(64, 4, n_ahead=0),
)  # fmt: skip


class Problem(NamedTuple):
    """One call of `attend`, but for how tokens are split."""

    queries: Queries
    keys: Side
    values: Side
    seen: Seen
    extent: Extent
    key_kind: SideKind
    value_kind: SideKind
    shape: Shape
    terms: Terms


def split_attention(
    problem: Problem, quads: EntryQuads, n_coefficients: int, n_splits: int | None = None, launch: Launch | None = None
) -> Partial:
    """In value coefficients. `n_splits`: see `token_splits`; `launch`: timed over LAUNCHES if None."""
    found, calls = plan(problem, quads, n_coefficients, n_splits, launch)
    for call in calls:
        call.launch()
    return found


def plan(
    problem: Problem, quads: EntryQuads, n_coefficients: int, n_splits: int | None = None, launch: Launch | None = None
) -> tuple[Partial, tuple[Call, Call]]:
    """Where the result will be, and the launches that make it."""
    extent, shape, device = problem.extent, problem.shape, problem.queries.columns.device
    h, q, b = extent.heads, extent.rows, problem.queries.columns.shape[0]
    n_rows, n_programs = b * h * q, b * h * -(-q // shape.rows)
    if n_splits is None:
        n_splits = token_splits(n_programs, extent.tokens, triton_launch.n_multiprocessors(device))
    n_columns = problem.value_kind.n_columns
    ranges = Found(
        torch.empty(n_splits, n_rows, n_columns, device=device), torch.empty(n_splits, n_rows, device=device)
    )
    constants = {
        "KEYS": problem.key_kind, "VALUES": problem.value_kind, "SHAPE": shape, "TERMS": problem.terms,
        "enable_fp_fusion": True,
    }  # fmt: skip
    kernel = _attend_tuned if launch is None else attend
    first = Call(
        kernel,
        (n_splits, b, n_programs // b),
        (*problem[:4], ranges, extent._replace(splits=n_splits)),
        constants | ({} if launch is None else launch.config().all_kwargs()),
    )
    found = Partial(torch.empty(b, h, q, n_coefficients, device=device), torch.empty(b, h, q, device=device))
    terms = quads.term_column
    second = Call(
        merge,
        (n_rows, -(-n_coefficients // MERGED_COEFFICIENTS)),
        (ranges, terms, found.mean, found.log_sum, h, q, n_coefficients, n_rows, n_splits, n_columns),
        {
            "N_TERMS": terms.shape[1], "SPLITS": triton.next_power_of_2(n_splits), "COLUMNS": MERGED_COEFFICIENTS,
            "enable_fp_fusion": True,
        },
    )  # fmt: skip
    return found, (first, second)


def nothing(b: int, h: int, q: int, c: int, device: torch.device) -> Partial:
    """Of no tokens."""
    return Partial(torch.zeros(b, h, q, c, device=device), torch.full((b, h, q), -torch.inf, device=device))


def tuned_config() -> triton.Config | None:
    """What the last tuned call was launched with; None before one."""
    return getattr(_attend_tuned, "best_config", None)


def token_splits(n_programs: int, t: int, n_multiprocessors: int) -> int:
    """Token ranges for each of `n_programs` row groups: enough for all multiprocessors, none much too short."""
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * n_multiprocessors // n_programs)
    return max(1, min(wanted, t // LEAST_SPLIT_TOKENS, MOST_SPLITS))


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
    """Configurations whose tile is not longer than a block, which would stay partly empty."""
    longest = max(16, triton.next_power_of_2(arguments["SHAPE"].block))
    return [config for config in configs if config.kwargs["TILE"] <= longest] or [Launch(longest, 4).config()]


_attend_tuned = triton_launch.tuned(
    attend, [launch.config() for launch in LAUNCHES], ["KEYS", "VALUES", "SHAPE"], _fitting
)
