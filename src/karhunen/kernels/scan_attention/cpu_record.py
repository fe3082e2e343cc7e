"""What a call of the CPU scan is told, and where a worker keeps what it makes: records of numbers and addresses.

Compiled code is handed two addresses in place of fifty arrays, which would take longer to unpack than a short context
takes to read.
"""

import numpy as np

from karhunen.kernels.scan.tokens import GROUP_ENTRY

SPAN = 512
"""Tokens of one softmax step: their weights are relative to the largest among them."""

MOST_ROWS = 4
"""Query rows that are read together: their accumulators fill the registers."""

OF_CALL = (
    "batch", "heads", "rows", "row_chunks", "splits", "tokens", "joined", "first_position",
    "query", "query_batch", "query_head", "query_row", "angles", "angles_row",
    "key_codes", "key_batch", "key_plane", "key_gain", "key_gain_batch", "key_gain_head",
    "value_codes", "value_batch", "value_plane", "value_gain", "value_gain_batch", "value_gain_head",
    "mask", "mask_batch", "hidden_rows", "hidden_tokens", "n_hidden", "hidden_sorted", "mean", "log_sum",
    "n_layers", "heat", "heat_batch", "heat_first", "layers", "held", "layer_memory",
)  # fmt: skip
OF_CODEC = (
    "block", "has_mean", "has_common", "n_order", "n_pairs", "matrix_width", "basis_width", "basis_tokens", "key_width",
    "value_width", "n_coefficients", "order", "matrix", "matrix_head", "turned_mean", "basis",
    "key_plane_start", "key_columns", "key_columns_head", "key_first_column", "key_bytes", "key_least",
    "key_least_head", "value_plane_start", "value_columns", "value_columns_head", "value_first_column", "value_bytes",
    "value_scale", "value_offset", "value_coefficient",
)  # fmt: skip
PROBLEM = np.dtype(
    [("scale", np.float64), ("softcap", np.float64), *((name, np.int64) for name in (*OF_CALL, *OF_CODEC))]
)
"""What a call is told. Addresses, where 0 is a term that is not there; strides in bytes; counts."""

PLACES = (
    "query", "turned", "frames", "by_mean", "even", "odd", "bias", "shifted", "whole", "steps", "bases",
    "commons", "scale", "softcap", "scores", "gained", "weights", "groups", "spans", "key_codes", "value_codes",
    "sums", "top", "summed", "unit", "shrink", "reference", "total", "mass",
)  # fmt: skip
SCRATCH = np.dtype([(name, np.int64) for name in PLACES])


def scratch_bytes(n_rows: int, width: int, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of each place, for `n_rows` rows side by side and groups of `width` tokens."""
    pitch, n_groups = 4 * (SPAN + width), SPAN // width + 1
    row = 4 * n_rows
    return {
        "query": row * sizes["n_order"],
        "turned": row * sizes["n_order"],
        "frames": row * sizes["matrix_width"],
        "by_mean": row * sizes["n_order"],
        "even": row * sizes["basis_width"],
        "odd": row * sizes["basis_width"],
        "bias": row * max(sizes["basis_tokens"], width),
        "shifted": row * width,
        "whole": row * sizes["key_width"],
        **dict.fromkeys(("steps", "bases", "commons", "top", "unit", "shrink", "reference"), 64),
        **dict.fromkeys(("scale", "softcap", "summed"), 64),
        "total": 64,
        "mass": 64,
        "scores": n_rows * pitch,
        "gained": pitch,
        "weights": n_rows * pitch // 2,
        "groups": n_groups * GROUP_ENTRY,
        "spans": n_groups * 16,
        "key_codes": width * sizes["key_planes"],
        "value_codes": 2 * width * sizes["value_planes"],
        "sums": row * sizes["value_width"],
    }
