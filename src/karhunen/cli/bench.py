"""`karhunen bench`: attention read from bytes against the fastest dense attention, one layer or a whole model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from karhunen.cli.loading import load_model
from karhunen.cli.screen import Screen, grid, rounded

KERNEL_TOKENS = (1024, 4096, 16384)
MODEL_TOKENS = (1024, 4096)
SHAPES = ("3x3x64", "8x4x128")


def run(
    codec_folder: Path | None,
    model_name: str,
    shapes: tuple[str, ...],
    tokens: tuple[int, ...],
    batch: int,
    bits: float,
    threads: int,
    rounds: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """With a codec: decode steps of its model. Without: one layer of each shape, made up."""
    if codec_folder is not None and (shapes or batch != 1):
        raise ValueError("--codec times a model at batch 1; leave --shape and --batch out, or leave --codec out")
    import torch

    from karhunen.evaluation.provenance import provenance
    from karhunen.evaluation.speed import copy_bandwidth

    torch.set_num_threads(threads)
    with Screen(as_json).open() as screen:
        if codec_folder is None:
            mode, rows = "one layer's decode step", _layers(screen, shapes, tokens, batch, bits, rounds)
        else:
            mode, rows = "a model's decode step", _steps(screen, codec_folder, model_name, tokens, rounds)
        document: dict[str, Any] = {
            "mode": mode,
            "rounds": rounds,
            "copy_gb_per_second": copy_bandwidth(),
            "provenance": asdict(provenance()),
            "rows": rows,
        }
        _show(screen, document)
        if output is not None:
            _write(document, output)
            screen.say(f"written to {output}/speed.json and {output}/speed.png")
        screen.document(rounded(document))


def _layers(
    screen: Screen, shapes: tuple[str, ...], tokens: tuple[int, ...], batch: int, bits: float, rounds: int
) -> list[dict[str, Any]]:
    from karhunen.evaluation.kernel_speed import Shape, measure

    rows: list[dict[str, Any]] = []
    for shape in [Shape.parse(text) for text in shapes or SHAPES]:
        for n in tokens or KERNEL_TOKENS:
            screen.log(f"{shape}, {n:,} tokens")
            rows.append(measure(shape, n, batch, bits, rounds))
    return rows


def _steps(
    screen: Screen, codec_folder: Path, model_name: str, tokens: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    from karhunen.calibration.texts import evaluation_text
    from karhunen.codec import Codec
    from karhunen.evaluation.step_speed import measure

    codec = Codec.from_pretrained(codec_folder)
    model, tokenizer = load_model(screen, model_name, "float32")
    text = tokenizer(evaluation_text(), return_tensors="pt", truncation=False, verbose=False)["input_ids"][0]
    rows: list[dict[str, Any]] = []
    for n in tokens or MODEL_TOKENS:
        if n > len(text):
            raise ValueError(f"the evaluation text has {len(text):,} tokens; ask for at most so many, not {n:,}")
        screen.log(f"{model_name}, {n:,} tokens")
        rows.append({"model": model_name, "recipe": codec.origin.recipe, **measure(model, codec, text[:n], rounds)})
    return rows


def _show(screen: Screen, document: dict[str, Any]) -> None:
    table = grid(
        "what", "tokens", "bytes ms", "dense ms", "speed-up", "GB/s", "read MB", "dense MB", "code µs/token",
        "output error", "KL", title=document["mode"], right=tuple(range(1, 11)),
    )  # fmt: skip
    for row in document["rows"]:
        ms = row["milliseconds"]
        table.add_row(
            str(row.get("shape", row.get("model"))),
            f"{row['tokens']:,}",
            f"{ms['bytes']:.2f}",
            f"{ms[row['fastest_dense']]:.2f} {row['fastest_dense']}",
            f"{row['speed_up']:.2f}",
            f"{row['bytes_read'] / ms['bytes'] / 1e6:.2f}",
            f"{row['bytes_read'] / 1e6:.2f}",
            f"{row['dense_bytes_read'] / 1e6:.2f}",
            f"{row['encode_microseconds_per_token']:.1f}",
            "" if row.get("output_error") is None else f"{row['output_error']:.1e}",
            "n/a" if row["kl"] is None else f"{row['kl']:.4f}",
        )
    screen.table(table)
    made = document["provenance"]
    screen.say(
        f"a copy in memory moves {document['copy_gb_per_second']:.1f} GB/s; {made['n_threads']} thread(s), medians of "
        f"{document['rounds']} rounds, torch {made['versions'].get('torch', '?')}, commit {made['commit'] or 'unknown'}"
    )


def _write(document: dict[str, Any], output: Path) -> None:
    import json

    from karhunen.evaluation.speed_plot import speed_figure

    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(rounded(document), indent=1) + "\n", encoding="utf-8")
    speed_figure(document).savefig(output / "speed.png", dpi=150)
