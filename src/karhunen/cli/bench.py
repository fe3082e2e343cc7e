"""`karhunen bench`: attention read from bytes against the fastest dense attention, one layer or a whole model."""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast, final

from karhunen.cli.loading import load_model, placed
from karhunen.cli.options import DEFAULT_DEVICE
from karhunen.cli.screen import Screen, grid, rounded

KERNEL_TOKENS = (1024, 4096, 16384)
MODEL_TOKENS = (1024, 4096)
SHAPES = ("3x3x64", "8x4x128", "8x1x128")  # SmolLM2's and Llama 3's grouped queries, and as many keys as queries


@final
@dataclass(frozen=True)
class Wanted:
    """The arguments as given; every shape is timed at every length, batch, rate and number of threads."""

    codec: Path | None
    model: str
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    bits: tuple[float, ...]
    tables: tuple[str, ...]
    threads: tuple[int, ...]
    device: str
    rounds: int


def run(wanted: Wanted, output: Path | None, as_json: bool) -> None:
    """With a codec: decode steps of its model. Without: one layer of each shape, made up."""
    from karhunen.quantizers.byte_vq import INDEX_BITS
    from karhunen.values import refuse_unless_one_of

    if wanted.codec is not None and (wanted.shapes or wanted.batches or wanted.bits or wanted.tables):
        raise ValueError(
            "--codec times its own model at batch 1; leave --shape, --batch, --bits and --tables out, or --codec"
        )
    if wrong := [bits for bits in wanted.bits if not 0 < bits < float("inf")]:
        raise ValueError(f"--bits {wrong[0]:g} is not a number of bits per element; give one above 0")
    for tables in wanted.tables:
        refuse_unless_one_of("--tables", tables, tuple(INDEX_BITS))
    import torch

    from karhunen.device import HOST, named
    from karhunen.evaluation.results.provenance import provenance
    from karhunen.evaluation.speed.measured import copy_bandwidth
    from karhunen.kernels.paths import fastest

    device = torch.device(_one_device(wanted))
    if output is not None:
        _check_target(output)
    with Screen(as_json).open() as screen:
        mode = "one layer's decode step" if wanted.codec is None else "a model's decode step"
        rows: list[dict[str, Any]] = []
        copies: dict[str, float] = {}
        before = torch.get_num_threads()
        for threads in (wanted.threads or (1,)) if device == HOST else (before,):
            torch.set_num_threads(threads)
            copies[str(threads) if device == HOST else str(device)] = copy_bandwidth(device=device)
            made = _layers(screen, wanted, device) if wanted.codec is None else _steps(screen, wanted, wanted.codec)
            rows += [{"threads": threads, "device": str(device), **row} for row in made]
        torch.set_num_threads(before)
        document: dict[str, Any] = {
            "mode": mode,
            "rounds": wanted.rounds,
            "device": named(device),
            "copy_gb_per_second": copies,
            "kernels": ": ".join(fastest("scan_attention", device.type)),
            "provenance": asdict(provenance()),
            "rows": rows,
        }
        _show(screen, document)
        if output is not None:
            _write(document, output)
            screen.say(f"written to {output}/speed.json and {output}/speed.png")
        screen.document(rounded(document))


def _one_device(wanted: Wanted) -> str:
    """The device to time; ValueError where it is none, or not one."""
    from karhunen.calibration.placement import chosen
    from karhunen.device import HOST

    device, *others = chosen(wanted.device)
    if others:
        raise ValueError(f"--device {wanted.device} are {1 + len(others)} devices; one is timed, such as {device}")
    if wanted.threads and device != HOST.type:
        raise ValueError(f"--threads are of the CPU; leave them out with --device {wanted.device}")
    return device


def _layers(screen: Screen, wanted: Wanted, device: Any) -> list[dict[str, Any]]:
    from karhunen.evaluation.speed.kernel_speed import Shape, measure
    from karhunen.quantizers.byte_vq import TableKind

    shapes = [Shape.parse(text) for text in wanted.shapes or SHAPES]
    rows: list[dict[str, Any]] = []
    for shape, batch, bits, tables, n in product(
        shapes, wanted.batches or (1,), wanted.bits or (2.0,), wanted.tables or ("free",),
        wanted.tokens or KERNEL_TOKENS,
    ):  # fmt: skip
        screen.log(f"{shape}, batch {batch}, {bits:g} bits, {tables} tables, {n:,} tokens")
        rows.append(measure(shape, n, batch, bits, wanted.rounds, cast("TableKind", tables), device))
    return rows


def _steps(screen: Screen, wanted: Wanted, codec_folder: Path) -> list[dict[str, Any]]:
    from karhunen.calibration.texts import evaluation_text
    from karhunen.codec import Codec
    from karhunen.evaluation.speed.step_speed import measure

    codec = Codec.from_pretrained(codec_folder)
    where = placed(screen, wanted.model, "float32", (_one_device(wanted),))
    model, tokenizer = load_model(screen, wanted.model, "float32", where)
    text = tokenizer(evaluation_text(), return_tensors="pt", truncation=False, verbose=False)["input_ids"][0]
    rows: list[dict[str, Any]] = []
    for n in wanted.tokens or MODEL_TOKENS:
        if n > len(text):
            raise ValueError(f"the evaluation text has {len(text):,} tokens; ask for at most so many, not {n:,}")
        screen.log(f"{wanted.model}, {n:,} tokens")
        made = measure(model, codec, text[:n], wanted.rounds)
        rows.append({"model": wanted.model, "recipe": codec.origin.recipe, **made})
    return rows


def _show(screen: Screen, document: dict[str, Any]) -> None:
    table = grid(
        "what", "on", "batch", "bits", "tokens", "bytes, ms", "dense, ms", "fastest", "speed-up", "× sdpa",
        "× bf16", "GB/s", "read, of MB", "code, µs", "error or KL", title=document["mode"],
        right=(*range(1, 7), *range(8, 15)),
    )  # fmt: skip
    for row in document["rows"]:
        ms = row["milliseconds"]
        table.add_row(
            str(row.get("shape", row.get("model"))),
            _ran_on(row),
            str(row.get("batch", 1)),
            f"{row['bits_per_element']:.2f}",
            f"{row['tokens']:,}",
            f"{ms['bytes']:.2f}",
            f"{ms[row['fastest_dense']]:.2f}",
            row["fastest_dense"].removesuffix("_float32"),
            f"{row['speed_up']:.2f}",
            *(f"{row[name]:.2f}" if name in row else "" for name in ("speed_up_sdpa", "speed_up_bfloat16")),
            f"{row['bytes_read'] / ms['bytes'] / 1e6:.2f}",
            f"{row['bytes_read'] / 1e6:.1f}, {row['dense_bytes_read'] / 1e6:.0f}",
            f"{row['encode_microseconds_per_token']:.1f}",
            _quality(row),
        )
    screen.table(table)
    made = document["provenance"]
    copies = document["copy_gb_per_second"].items()
    moved = ", ".join(f"{rate:.1f} GB/s {f'with {n} thread(s)' if n.isdigit() else f'on {n}'}" for n, rate in copies)
    screen.say(
        f"{document['device']}, kernels of the {document['kernels']}; a copy in memory moves {moved}; medians of "
        f"{document['rounds']} rounds, torch {made['versions'].get('torch', '?')}, commit {made['commit'] or 'unknown'}"
    )


def _ran_on(row: dict[str, Any]) -> str:
    """Threads of the CPU, or another device."""
    n = row["threads"]
    return f"{n} thread" + "s" * (n > 1) if row["device"] == DEFAULT_DEVICE else row["device"]


def _quality(row: dict[str, Any]) -> str:
    """Of a model, the KL of its codec; of a made-up layer, how far reading bytes is from decoding them in float64."""
    if row["kl"] is not None:
        return f"{row['kl']:.4f}"
    return "" if row.get("output_error") is None else f"{row['output_error']:.0e}"


def _check_target(output: Path) -> None:
    """ValueError if the files cannot be written, or only over others of these names."""
    import json

    from karhunen.folder import check_writable

    check_writable(output)
    for file in (output / "speed.json", output / "speed.png"):
        try:
            ours = not file.exists() or "copy_gb_per_second" in json.loads((output / "speed.json").read_text("utf-8"))
        except (OSError, ValueError):
            ours = False
        if not ours:
            raise ValueError(f"{file} is there and is not of `karhunen bench`; choose another --output")


def _write(document: dict[str, Any], output: Path) -> None:
    import json

    from karhunen.evaluation.speed.speed_plot import speed_figure

    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(rounded(document), indent=1) + "\n", encoding="utf-8")
    speed_figure(document).savefig(output / "speed.png", dpi=150)
