"""`karhunen inspect`: what a codec is made of, where its bits go, what its bytes are."""

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karhunen.cli.screen import Screen, grid, rounded
from karhunen.cli.verify import card_document, card_table

if TYPE_CHECKING:
    from karhunen.evaluation.results.composition import Anatomy


def run(folder: Path, as_json: bool) -> None:
    """Read an artifact and take it apart."""
    from karhunen.codec import Codec
    from karhunen.evaluation.results.composition import anatomy

    codec = Codec.from_pretrained(folder)
    screen = Screen(as_json)
    with screen.open():
        found = anatomy(codec)
        if not as_json:
            show(screen, found)
            if codec.card is not None:
                screen.table(card_table(codec.card))
            else:
                screen.say("no report card: `karhunen verify` makes one")
        card = None if codec.card is None else card_document(codec.card)
        screen.document(rounded({**document(found), "report_card": card}))


def document(found: "Anatomy") -> dict[str, Any]:
    """The same as plain values, ready for `json.dumps`."""
    return {
        "recipe": found.origin.recipe,
        "recipe_fingerprint": found.origin.recipe_fingerprint,
        "codec_fingerprint": found.fingerprint,
        "calibration": {"sources": list(found.origin.calibration), "tokens": found.origin.n_tokens},
        "versions": dict(found.origin.versions or {}),
        "notes": list(found.origin.notes),
        "model": {k: v for k, v in asdict(found.model).items() if k != "layers"} | {"layers": len(found.model.layers)},
        "window": found.window,
        "sides": [
            {**asdict(side), "bits_per_element": side.bits_per_element, "elements_per_token": side.n_elements}
            for side in found.sides
        ],
        "left_exact": {str(i): reason for i, reason in found.left_exact.items()},
        "bytes_per_token": {
            "codes": found.code_bytes_per_token,
            "scales_and_gains": found.side_bytes_per_token,
            "uncompressed_16_bit": found.reference_bytes_per_token,
            "left_exact_16_bit": found.exact_bytes_per_token,
        },
        "bits_per_element": found.bits_per_element,
        "table_bytes": found.table_bytes,
        "tokens_to_repay_tables": found.tokens_to_repay_tables,
    }


def show(screen: Screen, found: "Anatomy") -> None:
    """Tables on stdout."""
    origin, model = found.origin, found.model
    facts = grid("codec", origin.recipe or "unnamed")
    facts.add_row("recipe · codec fingerprint", f"{origin.recipe_fingerprint} · {found.fingerprint}")
    facts.add_row("model", f"{model.architecture}, {len(model.layers)} layers, configuration {model.config_hash}")
    facts.add_row("weights", model.weights_hash or "not readable as numbers; any weights are accepted")
    facts.add_row("calibration", "; ".join(origin.calibration) or "none")
    facts.add_row("calibration tokens", f"{origin.n_tokens:,}")
    facts.add_row("made with", ", ".join(f"{k} {v}" for k, v in (origin.versions or {}).items()))
    facts.add_row("window", found.window)
    for note in origin.notes:
        facts.add_row("note", note)
    screen.table(facts)
    if found.sides:
        screen.table(composition_table(found))
        screen.table(bits_table(found))
        screen.table(storage_table(found))
    screen.table(bytes_table(found))
    if found.left_exact:
        left = grid("layer", "left exact because", right=(0,))
        for layer, reason in found.left_exact.items():
            left.add_row(str(layer), reason)
        screen.table(left)


def composition_table(found: "Anatomy") -> Any:
    """Choices by axis, layers with the same ones together."""
    table = grid("axis", "keys", "values", title="composition")
    sides = {slot: [side for side in found.sides if side.slot == slot] for slot in ("key", "value")}
    for axis in found.sides[0].axes:
        said = [_few(dict.fromkeys(side.axes[axis] for side in sides[slot])) for slot in ("key", "value")]
        table.add_row(axis, *said)
    return table


def bits_table(found: "Anatomy") -> Any:
    """Per layer, side and head groups of one plan."""
    table = grid(
        *("layer", "side", "heads", "bits, least to most", "mean", "rank kept", "bits per element"),
        title="bit plan",
        right=(0, 3, 4, 5, 6),
    )
    for side in found.sides:
        first = 0
        for group, alike in groupby(side.bits):  # heads side by side with one plan are one row
            n = len(list(alike))
            bits = f"{group.least:.3g}" if group.least == group.most else f"{group.least:.3g} to {group.most:.3g}"
            rank = f"{group.rank} of {side.n_coefficients}"
            name = "joined" if len(side.bits) == 1 else str(first) if n == 1 else f"{first} to {first + n - 1}"
            last = f"{side.bits_per_element:.3f}" if first == 0 else ""
            table.add_row(str(side.layer), side.slot, name, bits, f"{group.mean:.2f}", rank, last)
            first += n
    return table


def storage_table(found: "Anatomy") -> Any:
    """Shared tables per layer and side, and what of them belongs to one head."""
    table = grid(
        *("layer", "side", "head groups", "transforms", "codebooks and widths", "all tables", "each head group"),
        title="storage plan, bytes",
        right=(0, 2, 3, 4, 5, 6),
    )
    for side in found.sides:
        numbers = (side.transform_bytes, side.quantizer_bytes, side.table_bytes, side.table_bytes // len(side.bits))
        table.add_row(str(side.layer), side.slot, str(len(side.bits)), *(f"{n:,}" for n in numbers))
    return table


def bytes_table(found: "Anatomy") -> Any:
    """One coded token of one sequence, and the tables."""
    table = grid("bytes", "", title="a coded token, all coded layers", right=(1,))
    table.add_row("codes", f"{found.code_bytes_per_token:,.1f}")
    table.add_row("scales and gains", f"{found.side_bytes_per_token:,.1f}")
    table.add_row("the same uncompressed, 16 bits a scalar", f"{found.reference_bytes_per_token:,}")
    table.add_row("bits per element", f"{found.bits_per_element:.3f}")
    if found.exact_bytes_per_token:
        table.add_row("full-attention layers left exact, 16 bits", f"{found.exact_bytes_per_token:,}")
    table.add_section()
    table.add_row("shared tables, once per model", f"{found.table_bytes:,}")
    if found.tokens_to_repay_tables is not None:
        table.add_row("coded tokens that repay them", f"{found.tokens_to_repay_tables:,}")
    return table


def _few(choices: dict[str, None]) -> str:
    """Up to three; layers often differ only in the number of their bytes."""
    names = list(choices)
    return "\n".join([*names[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])
