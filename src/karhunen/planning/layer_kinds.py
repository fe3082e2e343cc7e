"""Which layers slide where a configuration does not say it layer by layer: as the class of its `model_type` has it.

    layer_types said                 as said
    every n-th layer is full         Gemma 2 and 3, gpt-oss, Cohere 2, EXAONE 4, OLMo 3
    from a first layer on, if asked  Qwen 2 and 3 (`use_sliding_window`, `max_window_layers`)
    all of them, if there is one     Mistral, Mixtral, Phi 3

A configuration that transformers wrote says every setting; a config.json leaves out what is its class's default, which
is known for these classes only: another one is refused, not guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

FULL, SLIDING = "full_attention", "sliding_attention"
UNSAID = object()
LOCAL, GLOBAL = "L", "G"  # EXAONE's letters


@final
@dataclass(frozen=True)
class Rule:
    """`window` of the class where nothing is said; `pattern`: every n-th layer is full, 0 for none; `asked`: only where
    `use_sliding_window` is true; then from layer `first` on."""

    window: int | None = None
    pattern: int = 0
    asked: bool = False
    first: int = 0


RULES: Mapping[str, Rule] = {
    "mistral": Rule(4096), "ministral": Rule(4096), "mixtral": Rule(), "phi3": Rule(), "phimoe": Rule(),
    "starcoder2": Rule(), "qwen2": Rule(4096, asked=True, first=28),
    "qwen3": Rule(4096, asked=True, first=28), "qwen3_moe": Rule(4096, asked=True), "gemma2": Rule(4096, 2),
    "gemma3": Rule(4096, 6), "gemma3_text": Rule(4096, 6), "gpt_oss": Rule(128, 2), "cohere2": Rule(4096, 4),
    "exaone4": Rule(4096, 4), "olmo3": Rule(4096, 4),
}  # fmt: skip
ALL_FULL = (
    "llama", "gpt2", "gptj", "gpt_neox", "bloom", "opt", "phi", "cohere", "glm", "glm4", "granite", "olmo", "olmo2",
    "stablelm", "nanochat", "internlm3", "seed_oss", "arcee", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
"""Their classes know no window."""


def is_known(kind: str) -> bool:
    """Whether the defaults of a `model_type` are."""
    return kind in RULES or kind in ALL_FULL


def layer_kinds(own: Mapping[str, Any], kind: str, n_layers: int, complete: bool) -> list[str] | None:
    """The kind of each layer; None where it is not known. `complete`: the settings are all there are, as transformers
    writes them, and a class of no rule has the same window in every layer, or none.

    ValueError for a pattern that is none.
    """
    rule = RULES.get(kind)
    if rule is None and not complete and kind not in ALL_FULL:
        return None
    rule = rule or Rule(asked="use_sliding_window" in own, first=int(own.get("max_window_layers") or 0))
    given: Any = own.get("sliding_window", UNSAID)
    window = (None if complete else rule.window) if given is UNSAID else given
    if not window or (rule.asked and not own.get("use_sliding_window", False)):
        return [FULL] * n_layers
    said: Any = own.get("sliding_window_pattern", own.get("_sliding_window_pattern"))
    if isinstance(said, str):
        return _lettered(said, n_layers)
    pattern = int(said or rule.pattern or n_layers + 1)
    first = int(own.get("max_window_layers", rule.first)) if rule.asked and rule.first else 0
    return [SLIDING if i >= first and (i + 1) % pattern else FULL for i in range(n_layers)]


def with_default_window(own: Mapping[str, Any], kind: str, complete: bool) -> Mapping[str, Any]:
    """The settings, with the window that the class has where the file says none."""
    rule = RULES.get(kind)
    if complete or rule is None or rule.window is None or "sliding_window" in own:
        return own
    return {**own, "sliding_window": rule.window}


def _lettered(pattern: str, n_layers: int) -> list[str]:
    """LLLG over and over."""
    if not pattern or set(pattern) - {LOCAL, GLOBAL}:
        raise ValueError(
            f"sliding_window_pattern={pattern!r} is no pattern; use a number, or letters {LOCAL} (sliding) and "
            f"{GLOBAL} (full), such as LLLG"
        )
    return [SLIDING if pattern[i % len(pattern)] == LOCAL else FULL for i in range(n_layers)]
