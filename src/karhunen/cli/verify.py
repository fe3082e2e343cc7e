"""`karhunen verify`: measure a codec against the uncompressed model, and keep the report card inside it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from karhunen.cli.loading import load_model, placed
from karhunen.cli.screen import Screen, grid, rounded

if TYPE_CHECKING:
    from karhunen.card import ReportCard

NOT_GOOD_ENOUGH = 3  # exit code of a verdict, which is no error


def run(
    folder: Path,
    model_name: str,
    texts: tuple[Path, ...],
    limits: dict[str, float],
    sizes: dict[str, Any],
    seed: int,
    dtype: str,
    device: str,
    keep: bool,
    quick: bool,
    as_json: bool,
) -> int:
    """Print the report card and keep it, a quick one only in place of none or of a quick one; 3 if a gate failed."""
    from karhunen.calibration.placement import chosen
    from karhunen.codec import Codec
    from karhunen.evaluation.verify import Limits, Size, verify

    devices = chosen(device)
    codec, limit, size = Codec.from_pretrained(folder), Limits(**limits), Size(**sizes)
    size = size.quickly if quick else size
    if missing := [path for path in texts if not path.exists()]:
        raise ValueError(f"{missing[0]} does not exist; give text files, or folders of them")
    with Screen(as_json).open() as screen:
        model, tokenizer = load_model(screen, model_name, dtype, placed(screen, model_name, dtype, devices))
        name = Path(model_name).name
        settings: dict[str, Any] = {"name": name, "limits": limit, "size": size, "seed": seed}
        verified = verify(model, tokenizer, codec, texts, **settings, part=screen.progress)
        card = verified.card
        assert card is not None, "verify makes a card"
        screen.table(card_table(card))
        said = " by a quick run; one without --quick says more" if quick else ""
        screen.say(f"{folder}: {'good enough' if card.passed else 'not good enough'}{said}")
        if keep and quick and codec.card is not None and not codec.card.quick:
            screen.say(f"{folder} keeps the report card of its full run")
        elif keep:
            verified.save_pretrained(folder)
        screen.document(rounded(card_document(card)))
        return 0 if card.passed else NOT_GOOD_ENOUGH


def card_table(card: "ReportCard") -> Any:
    """One row per gate."""
    kind = "quick report card" if card.quick else "report card"
    title = f"{kind}: {card.model}, {card.dtype}, {card.ratio:.1f} times smaller, {card.n_scored:,} tokens scored"
    table = grid("gate", "measured", "wanted", "uncompressed", "", title=title, right=(1, 2, 3))
    for gate in card.gates:
        wanted = f"{'≥' if gate.at_least else '≤'} {gate.limit:.4g}"
        dense = "" if gate.dense is None else f"{gate.dense:.4g}"
        value = "" if gate.reason else f"{gate.value:.4g} {gate.unit}".rstrip()
        table.add_row(gate.name, value, wanted, dense, gate.said)
    return table


def card_document(card: "ReportCard") -> dict[str, Any]:
    """The same as plain values, ready for `json.dumps`."""
    from dataclasses import asdict

    gates = [{**asdict(gate), "status": gate.status} for gate in card.gates]
    return {**asdict(card), "made": dict(card.made), "gates": gates, "passed": card.passed}
