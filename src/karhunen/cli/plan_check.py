"""`karhunen plan --check`: the plan against the model as it runs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from karhunen.cli.loading import load_model, placed
from karhunen.cli.screen import Screen, grid
from karhunen.planning import table
from karhunen.planning.shape import ModelShape

if TYPE_CHECKING:
    from karhunen.codec import Codec
    from karhunen.evaluation.adoption import Tolerance


def checked(
    screen: Screen,
    name: str,
    codec: "Codec",
    shape: ModelShape,
    n_tokens: int,
    tolerance: "Tolerance",
    devices: tuple[str, ...],
) -> tuple[list[dict[str, Any]], bool]:
    """Print the list, of the model as it runs on `devices`; its lines as JSON, and whether all passed."""
    from karhunen.calibration.texts import evaluation_text
    from karhunen.evaluation.adoption import check_list, first_tokens
    from karhunen.hf.describe import identity_of
    from karhunen.hf.model_sources import MODELS

    entry = table.entry_of(name)
    name = entry["id"] if entry and name not in MODELS else name
    model, tokenizer = load_model(screen, name, "float32", placed(screen, name, "float32", devices))
    codec.check_model(identity_of(model))
    tokens = first_tokens(tokenizer, evaluation_text(), n_tokens)
    lines = check_list(model, tokenizer, codec, shape, tokens, tolerance=tolerance, part=screen.progress)
    said = ", ".join(devices)
    shown = grid("check", "", "found", title=f"before adopting this codec: {n_tokens:,} tokens, float32, on {said}")
    for line in lines:
        shown.add_row(line.name, "passed" if line.passed else "failed", line.said)
    screen.table(shown)
    return [asdict(line) for line in lines], all(line.passed for line in lines)
