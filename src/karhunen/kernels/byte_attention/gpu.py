"""Attention from bytes on a GPU: flash decoding, split over tokens so that every multiprocessor has work.

Launches the two programs of split_kernel.py. Measured speed: none yet; the programs are held against `naive.py` under
Triton's interpreter. Frames are read as given: with blocks of 64 tokens, float16 frames are a quarter of the traffic
of keys of 32 bytes and values of 32, and float32 frames half.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels import triton_launch
from karhunen.kernels.byte_attention.inputs import CodedTokens, Partial, require_agreement
from karhunen.kernels.byte_attention.naive import additive
from karhunen.kernels.byte_attention.split_kernel import attend, merge
from karhunen.kernels.entry_quads import entry_quads, pieces

available = triton_launch.available

TOLERANCE = 4e-3
"""Of the largest mean or log-sum, against naive in float64: queries and weights are rounded to float16 (2^-11 of each),
sums are float32; a score of order 5 is then off by about 1e-3, and a weight by as much of itself."""

MOST_ROWS = 64
MOST_SPLITS = 256
LEAST_SPLIT_TOKENS = 256
PROGRAMS_PER_MULTIPROCESSOR = 8
MERGED_COEFFICIENTS = 32
ONE_BLOCK = 1 << 30
"""Tokens of a block that holds any cache: one number, so that its programs are tuned once."""


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


PREFETCHES = not triton_launch.INTERPRETED and torch.version.cuda is not None
LAUNCHES = (
    Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(64, 8, n_registers=128), Launch(32, 4, n_ahead=2),
    Launch(64, 4, n_ahead=0),
)  # fmt: skip


def byte_attention(
    q_frames: Float[Tensor, "b h q n c"],
    keys: CodedTokens,
    values: CodedTokens,
    *,
    key_bias: Float[Tensor, "b h q n"] | None = None,
    offset_bias: Float[Tensor, "b h q n k"] | None = None,
    block_tokens: int | None = None,
    first_offset: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    first_visible: Int[Tensor, "b q"] | None = None,
    n_splits: int | None = None,
    launch: Launch | None = None,
) -> Partial:
    """As `naive.byte_attention`, in float32 from float16 operands; ValueError unless all tensors lie on one GPU.

    `n_splits`: token ranges per row (see `token_splits`); `launch`: timed over LAUNCHES if None.
    """
    require_agreement(q_frames, keys, values, key_bias, offset_bias, block_tokens, first_offset, mask, first_visible)
    triton_launch.require_gpu(
        q_frames, keys.codes, keys.gain, values.codes, values.gain, key_bias, offset_bias, mask, first_visible
    )  # fmt: skip
    b, h, q, n, c_value = *q_frames.shape[:4], values.tables.n_coefficients
    t, device = keys.n_tokens, q_frames.device
    if not b * h * q * t:
        nothing = torch.full((b, h, q), -torch.inf, device=device)
        return Partial(mean=torch.zeros(b, h, q, c_value, device=device), log_sum=nothing)
    if q_frames.dtype == torch.float64 or q_frames.stride(-1) != 1:
        q_frames = q_frames.float().contiguous()
    if block_tokens is None:
        block_tokens, first_offset = ONE_BLOCK, 0

    k_quads, v_quads = entry_quads(keys.tables, device), entry_quads(values.tables, device)
    n_columns = 4 * v_quads.plane.shape[1]
    n_rows, rows = b * h * q, min(MOST_ROWS, max(16, triton.next_power_of_2(q)))
    n_programs = b * h * -(-q // rows)
    if n_splits is None:
        n_splits = token_splits(n_programs, t, triton_launch.n_multiprocessors(device))
    means = torch.empty(n_splits, n_rows, n_columns, device=device)
    log_sums = torch.empty(n_splits, n_rows, device=device)
    arguments = (
        q_frames, *q_frames.stride()[:-1],
        log_sums if key_bias is None else key_bias.float().contiguous(),
        log_sums if offset_bias is None else offset_bias.float().contiguous(),
        log_sums if mask is None else additive(mask, torch.float32).contiguous(),
        log_sums if first_visible is None else first_visible.int().contiguous(),
        means, log_sums,
        *_side(keys), k_quads.bits, k_quads.plane, k_quads.coefficient, k_quads.scale,
        *_side(values), v_quads.bits, v_quads.plane, v_quads.scale,
        h, q, t, n, n_splits, block_tokens, first_offset, scale, softcap or 1.0,
    )  # fmt: skip
    (k_a, k_b), (v_a, v_b) = pieces(k_quads.plane.shape[1]), pieces(v_quads.plane.shape[1])
    shapes: dict[str, Any] = {
        "K_GAIN": _gain_kind(keys), "V_GAIN": _gain_kind(values), "BIASED": key_bias is not None,
        "OFFSET_BIASED": offset_bias is not None,
        "MASKED": mask is not None, "FIRST": first_visible is not None, "CAPPED": softcap is not None,
        "K_A": k_a, "K_B": k_b, "V_A": v_a, "V_B": v_b, "ROWS": rows,
        "enable_fp_fusion": True,
    }  # fmt: skip
    grid = (n_splits, b, n_programs // b)
    if launch is None:
        _attend_tuned[grid](*arguments, **shapes)
    else:
        attend[grid](*arguments, **shapes, **launch.config().all_kwargs())

    mean, log_sum = torch.empty(b, h, q, c_value, device=device), torch.empty(b, h, q, device=device)
    terms = v_quads.term_column
    merge[n_rows, -(-c_value // MERGED_COEFFICIENTS)](
        means, log_sums, terms, mean, log_sum, h, q, c_value, n_rows, n_splits, n_columns,
        N_TERMS=terms.shape[1], SPLITS=triton.next_power_of_2(n_splits), COLUMNS=MERGED_COEFFICIENTS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return Partial(mean=mean, log_sum=log_sum)


def tuned_config() -> triton.Config | None:
    """What the last tuned call was launched with; None before one."""
    return getattr(_attend_tuned, "best_config", None)


def token_splits(n_programs: int, t: int, n_multiprocessors: int) -> int:
    """Token ranges for each of `n_programs` row groups: enough for all multiprocessors, none much too short."""
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * n_multiprocessors // n_programs)
    return max(1, min(wanted, t // LEAST_SPLIT_TOKENS, MOST_SPLITS))


def _side(side: CodedTokens) -> tuple[Any, ...]:
    """Codes, gains and their strides, neighbouring tokens side by side."""
    codes = side.codes if side.codes.stride(-1) == 1 else side.codes.contiguous()
    if not codes.shape[1]:  # no planes: the padding reads some byte
        codes = codes.new_zeros(codes.shape[0], 1, codes.shape[2])
    if side.gain is None:
        return codes, *codes.stride()[:2], codes, 0, 0, codes
    gain = side.gain if side.gain.stride(-1) == 1 else side.gain.contiguous()
    levels = gain if side.gain_levels is None else side.gain_levels.to(gain.device, torch.float32).contiguous()
    return codes, *codes.stride()[:2], gain, *gain.stride()[:2], levels


def _gain_kind(side: CodedTokens) -> int:
    return 0 if side.gain is None else 1 if side.gain_levels is None else 2


def _fitting(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
    """Configurations whose tile is not longer than a block, which would stay partly empty."""
    longest = max(16, triton.next_power_of_2(arguments["block_tokens"]))
    return [config for config in configs if config.kwargs["TILE"] <= longest] or [Launch(longest, 4).config()]


_attend_tuned = triton_launch.tuned(
    attend,
    [launch.config() for launch in LAUNCHES],
    ["K_GAIN", "V_GAIN", "K_A", "K_B", "V_A", "V_B", "ROWS", "block_tokens"],
    _fitting,
)
