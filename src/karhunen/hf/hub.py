"""Codecs on the Hugging Face Hub, through the hub's own mixin: a repository is an artifact and a model card.

    HubCodec(codec).push_to_hub("org/name")
    codec = HubCodec.from_pretrained("org/name").codec

The model card is written from the report card, so what was measured travels with the codec. What is fetched is checked
as every artifact is: hashes of both files, known classes and fields, no code.
"""

from pathlib import Path
from typing import Any, final

from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download

from karhunen.codec import Codec
from karhunen.folder import CONFIG, TENSORS

HEADER = """---
library_name: karhunen
tags:
- kv-cache
- compression
- karhunen
---
"""


@final
class HubCodec(ModelHubMixin):  # type: ignore[misc]
    """A codec with the hub's `save_pretrained`, `push_to_hub` and `from_pretrained`."""

    def __init__(self, shared: Codec) -> None:  # the mixin fills arguments from fields of config.json of their name
        self.codec = shared

    def _save_pretrained(self, save_directory: Path) -> None:
        self.codec.save_pretrained(save_directory)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **others: Any,
    ) -> "HubCodec":
        if others:
            raise ValueError(f"a codec takes no {', '.join(sorted(others))}; leave it out")
        folder = Path(model_id)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    model_id,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                    allow_patterns=[CONFIG, TENSORS],
                )
            )
        return cls(Codec.from_pretrained(folder))

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """What the codec is for, and its report card."""
        return ModelCard(HEADER + card_text(self.codec))


def card_text(codec: Codec) -> str:
    """Markdown: the model it belongs to, how it was made, what was measured, how it is used."""
    origin, model, card = codec.origin, codec.model, codec.card
    made_for = (
        f"Recipe `{origin.recipe or 'unnamed'}`, codec `{codec.fingerprint()}`, for a `{model.architecture}` with "
        f"{len(model.layers)} layers, configuration `{model.config_hash}`, weights `{model.weights_hash or 'any'}`."
    )
    lines = [
        f"# A KV-cache codec for {card.model if card else model.architecture}",
        "",
        made_for,
        f"Calibrated on {origin.n_tokens:,} tokens. It fits this model only; another one is refused.",
        "",
        "## Measured",
        "",
    ]
    if card is None:
        lines.append("Nothing yet: `karhunen verify` measures a codec against the uncompressed model.")
    else:
        verdict = (
            f"`karhunen verify{' --quick' if card.quick else ''}` on {card.model} in {card.dtype}, "
            f"{card.n_scored:,} tokens scored, "
            f"{card.bits_per_element:.3f} bits per element ({card.ratio:.1f} times smaller than 16 bits): "
            f"**{'passed' if card.passed else 'not good enough'}**."
        )
        lines += [verdict, "", "| gate | measured | wanted | uncompressed | verdict |", "|---|---|---|---|---|"]
        for gate in card.gates:
            wanted = f"{'≥' if gate.at_least else '≤'} {gate.limit:.4g} {gate.unit}".rstrip()
            value = "" if gate.reason else f"{gate.value:.4g} {gate.unit}".rstrip()
            dense = "" if gate.dense is None else f"{gate.dense:.4g}"
            cells = (gate.name, value, wanted, dense, gate.said)
            lines.append(f"| {' | '.join(cells)} |")
        made = ", ".join(f"{name} {value}" for name, value in card.made.items() if value)
        lines += ["", f"Made with {made}."]
    lines += [
        "",
        "## Use",
        "",
        "```python",
        "import karhunen",
        "from karhunen.hf.hub import HubCodec",
        "",
        'codec = HubCodec.from_pretrained("ORG/NAME").codec',
        "with karhunen.compressed(model, codec):",
        "    model.generate(...)",
        "```",
    ]
    return "\n".join(lines) + "\n"
