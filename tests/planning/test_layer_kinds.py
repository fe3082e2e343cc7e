"""What a config.json leaves unsaid is what transformers' own class makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from transformers import DynamicCache

from karhunen.hf.gguf import silent_transformers
from karhunen.planning.layer_kinds import ALL_FULL, FULL, RULES, SLIDING, layer_kinds
from karhunen.planning.reading import read_shape

N_LAYERS = 32
SAID: list[dict[str, Any]] = [
    {}, {"sliding_window": 64}, {"sliding_window": None}, {"sliding_window": 64, "use_sliding_window": True},
    {"use_sliding_window": True}, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5},
    {"sliding_window": 64, "use_sliding_window": False},
]  # fmt: skip


def of_transformers(kind: str, said: dict[str, Any]) -> list[tuple[str, int | None]]:
    """As the class and its cache say: the kind of each layer, and the window of those that slide."""
    with silent_transformers():
        config = tf.AutoConfig.for_model(kind, num_hidden_layers=N_LAYERS, **said)
        config = config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
    slides = [getattr(layer, "is_sliding", False) for layer in layers] or [False] * N_LAYERS
    return [(SLIDING, config.sliding_window) if one else (FULL, None) for one in slides]


@pytest.mark.parametrize("kind", sorted({*RULES, *ALL_FULL} - {"gemma3"}))  # whose text is gemma3_text
def test_layers_are_those_of_the_class(kind: str) -> None:
    for said in SAID if kind in RULES else SAID[:1]:
        if said.get("sliding_window", 1) is None and RULES[kind].pattern:
            continue  # such a class has a window
        sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16}
        shape = read_shape(
            {"model_type": kind, "num_hidden_layers": N_LAYERS, **sizes, **said}, kind, "", complete=False
        )
        planned = [(SLIDING if layer.kind == "sliding" else FULL, layer.window_tokens) for layer in shape.layers]
        assert planned == of_transformers(kind, said), said


def test_letters_are_a_pattern_as_their_number_is() -> None:
    own = {"sliding_window": 64}
    lettered = layer_kinds({**own, "sliding_window_pattern": "LLLG"}, "exaone4", 30, complete=False)
    assert lettered == layer_kinds({**own, "sliding_window_pattern": 4}, "exaone4", 30, complete=False)
    with pytest.raises(ValueError, match="'LLXG' is no pattern"):
        layer_kinds({**own, "sliding_window_pattern": "LLXG"}, "exaone4", 30, complete=False)


SIZES = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**SIZES, "model_type": "somebody_elses"}, "through transformers only"),
        ({**SIZES, "model_type": "llama", "num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({**SIZES, "model_type": "llama", "hidden_size": 10**20}, "counts nothing that a model has"),
        ({**SIZES, "model_type": "llama", "num_key_value_heads": -4}, "counts nothing that a model has"),
        ({**SIZES, "model_type": "llama", "layer_types": [FULL] * 3}, "kind of 3 layers"),
    ],
)
def test_what_is_not_known_or_counts_too_much_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=said):
        read_shape(json.loads(file.read_text()), "it", str(file), complete=False)
