"""What the CPU scan is told of a codec's layers of refinement, and where a worker keeps what it makes of them.

Keys are read token by token, eight columns at once, since a block has few tokens of a layer: their rows of entries lie
side by side, a plane beginning at a multiple of eight (an octet). Values are read as the base's are, 64 tokens at once.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.scan.tokens import GROUP_ENTRY
from karhunen.kernels.scan_attention.cpu_record import SPAN
from karhunen.kernels.scan_attention.cpu_tables import COLUMNS, ScanTables, padded, query_order
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.scan_attention.layers import Layers

OCTET = 8

LAYER = np.dtype([(name, np.int64) for name in (
    "key_planes", "octet_start", "octet_plane", "key_rows", "key_rows_group", "key_width", "source", "factor", "matrix",
    "matrix_head", "coefficients",
    "value_plane_start", "value_columns", "value_columns_head", "value_first_column", "value_bytes", "value_scale",
    "value_offset", "value_coefficient", "value_width", "sums_at",
)])  # fmt: skip
"""Of one layer, all calls: addresses, strides in bytes, counts; where its part of a worker's memory begins."""

HELD = np.dtype([(name, np.int64) for name in ("codes", "plane", "n", "least")])
"""Of one layer and row, one call: address of its planes, their stride, tokens that have it, the least heat of these."""

PLACES = (
    "coefficients", "slots", "query", "places", "counts", "columns", "weights", "groups", "codes", "sums", "mass",
)  # fmt: skip
LAYER_SCRATCH = np.dtype([(name, np.int64) for name in PLACES])


@final
@dataclass(frozen=True)
class BoundLayers:
    """Layers bound to a frame, and what their addresses point to."""

    records: np.ndarray
    address: int
    sizes: dict[str, int]
    kept: tuple[Any, ...]
    calls: threading.local

    @classmethod
    def of(cls, layers: Layers, frames: Frames, kind: tuple[int, int]) -> "BoundLayers":
        """Made at first use for these frames and tables. ValueError unless tables are of the base's `kind`."""
        found: tuple[BoundLayers, Any] | None = frames.prepared.get("layers")
        if found is None or len(found[1]) < layers.n or any(
            mine is not bound for one, other in zip(layers.tables, found[1], strict=False)
            for mine, bound in zip(one, other, strict=True)
        ):  # fmt: skip
            kinds = {tables.lookups and tables.lookups.index_bits for pair in layers.tables for tables in pair}
            if kinds != {kind}:
                raise ValueError(f"layers have tables of kinds {kinds}; {kind}, that of their base, is scanned")
            found = frames.prepared["layers"] = (cls._made(layers.tables, frames), layers.tables)
        return found[0]

    @classmethod
    def _made(cls, tables: Sequence[tuple[ByteTables, ByteTables]], frames: Frames) -> "BoundLayers":
        records = np.zeros(len(tables), LAYER)
        kept: list[np.ndarray] = []
        sums_at = planes = key_width = 0
        matrix = _matrix(frames)
        kept.append(matrix)
        for record, (key, value) in zip(records, tables, strict=True):
            arrays = _keys(key) | _values(value)
            for name, array in arrays.items():
                record[name] = array.ctypes.data
            kept += arrays.values()
            scan = ScanTables.of(value)
            record["key_planes"] = key.n_planes
            record["key_rows_group"], record["key_width"] = arrays["key_rows"].strides[0], arrays["key_rows"].shape[2]
            record["matrix"], record["matrix_head"] = matrix.ctypes.data, matrix.strides[0]
            record["coefficients"] = matrix.shape[2]
            record["value_columns_head"], record["value_width"] = scan.column_start.strides[0], scan.width
            record["sums_at"] = sums_at
            key_width = max(key_width, int(record["key_width"]))
            sums_at += int(record["value_width"])
            planes = max(planes, scan.most_planes)
        sizes = {"layers": len(tables), "query": key_width, "sums": sums_at, "planes": planes, "all": matrix.shape[2]}
        return cls(records, records.ctypes.data, sizes, tuple(kept), threading.local())

    def memory(self, n_rows: int, width: int, n_workers: int) -> int:
        """Address of the workers' records, kept by the calling thread for layers of one size."""
        calls: dict[tuple[int, int, int], int] = self.calls.__dict__.setdefault("held", {})
        call = (n_rows, width, n_workers)
        if call not in calls:
            calls[call] = self._memory(n_rows, width, n_workers)
        return calls[call]

    def _memory(self, n_rows: int, width: int, n_workers: int) -> int:
        held: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, int]] = _kept.__dict__.setdefault("held", {})
        wanted = [padded(n, 64) for n in self._bytes(n_rows, width).values()]
        key = (n_workers, *wanted)
        if key not in held:
            memory = np.zeros(n_workers * sum(wanted) + 64, np.uint8)
            made = np.zeros(n_workers, LAYER_SCRATCH)
            at = padded(memory.ctypes.data, 64)
            for worker in range(n_workers):
                for name, n in zip(PLACES, wanted, strict=True):
                    made[worker][name] = at
                    at += n
            held[key] = (made, memory, made.ctypes.data)
        return held[key][2]

    def _bytes(self, n_rows: int, width: int) -> dict[str, int]:
        n, row = self.sizes["layers"], 4 * n_rows
        made = {
            "coefficients": row * self.sizes["all"] * (SPAN // width + 1),
            "slots": 8 * (SPAN // width + 1),
            "query": row * self.sizes["query"],
            "places": n * SPAN * 8,
            "counts": n * 8,
            "columns": n * 8,
            "weights": n_rows * 2 * (SPAN + width),
            "groups": (SPAN // width + 1) * GROUP_ENTRY,
            "codes": width * self.sizes["planes"],
            "sums": row * self.sizes["sums"],
            "mass": row * n,
        }
        assert tuple(made) == PLACES, "every place has a size"
        return made


_kept = threading.local()


def held_address(layers: Layers) -> int:
    """Where [row, layer] `HELD` of these layers lie; their addresses are those of the tensors in `layers`."""
    if "cpu" not in layers.prepared:
        made = np.zeros((len(layers.heat), layers.n), HELD)
        for layer, (least, rows) in enumerate(zip(layers.least, layers.codes, strict=True)):
            for row, planes in enumerate(rows):
                if planes.shape[1] > 1 and planes.stride(1) != 1:
                    raise ValueError(f"a layer's codes have stride {planes.stride(1)} along tokens; 1 is wanted")
                made[row, layer] = planes.data_ptr(), planes.stride(0), planes.shape[1], least
        layers.prepared["cpu"] = made, made.ctypes.data
    return layers.prepared["cpu"][1]


def _keys(tables: ByteTables) -> dict[str, np.ndarray]:
    """Octets of each group of planes, the rows of entries that they are parts of; of each column the coefficient and
    what the query is multiplied with there."""
    lookups = tables.lookups
    assert lookups is not None, "only tables of look-ups are scanned"
    octet_start, octet_plane, columns = [0], list[int](), list[list[int]]()
    for first, last in pairwise(tables.plane_start):
        mine: list[int] = []
        for plane in range(first, last):
            here = list(range(tables.column_start[plane], tables.column_start[plane + 1]))
            mine += here + [-1] * (-len(here) % OCTET)
            octet_plane += [plane] * (-(-len(here) // OCTET))
        octet_start.append(len(octet_plane))
        columns.append(mine)
    width = padded(max(map(len, columns)), COLUMNS)
    index = np.array([mine + [-1] * (width - len(mine)) for mine in columns], np.int64).reshape(-1, width)
    there = index >= 0
    parts = [part.cpu().numpy()[:, index] * there for part in (lookups.low, lookups.high) if len(part)]
    rows = np.ascontiguousarray(np.concatenate(parts).transpose(1, 0, 2), np.int8)  # [group][entry][column]
    return {
        "octet_start": np.array(octet_start, np.int64),
        "octet_plane": np.array(octet_plane, np.int64),
        "key_rows": rows,
        "source": np.ascontiguousarray(tables.coefficient.long().cpu().numpy()[np.maximum(index, 0)]),
        "factor": np.ascontiguousarray(lookups.scale.float().cpu().numpy()[index] * there),
    }


def _matrix(frames: Frames) -> np.ndarray:
    """[head][place of a laid-out query][coefficient, padded]: the query's map."""
    order, maps = query_order(frames)[0], frames.matrix.float().cpu().numpy()
    made = np.zeros((len(maps), len(order), padded(maps.shape[2], COLUMNS)), np.float32)
    made[:, order >= 0, : maps.shape[2]] = maps[:, order[order >= 0]]
    return made


def _values(tables: ByteTables) -> dict[str, np.ndarray]:
    scan = ScanTables.of(tables)
    there = np.maximum(scan.source, 0)
    return {
        "value_plane_start": scan.plane_start,
        "value_columns": scan.column_start,
        "value_first_column": scan.first_column,
        "value_bytes": scan.bytes,
        "value_scale": scan.scale,
        "value_offset": scan.least,
        "value_coefficient": tables.coefficient.long().cpu().numpy()[there] if len(there) else there,
    }
