"""What a result has to hold for tables, pictures and comparisons: a file that lacks it is refused when it is read."""

from collections.abc import Mapping
from typing import Any, cast

OPTIONAL = "?"  # at the end of a name: the field may be missing
ANY_NAME = "*"

NUMBER = "a number"
INTERVAL = {"mean": NUMBER, "low?": NUMBER, "high?": NUMBER}
SIZES = dict.fromkeys(("codes", "side", "exact", "dense", "n_elements", "n_coded_elements"), int)

SHAPE: Mapping[str, Any] = {
    "fingerprint": str,
    "configuration": {
        **dict.fromkeys(("model", "weights_hash", "dtype", "inputs", "recipe", "text"), str),
        "seed": int,
        "rate": (int, None),
        "task": {"name": str, "prefill_tokens?": int},
        "calibration?": [str],
    },
    "metrics?": {
        **{f"{name}?": INTERVAL for name in ("kl", "top1_agreement", "nll_delta")},
        **{f"{name}?": (NUMBER, None) for name in ("perplexity_coded", "perplexity_dense", "score", "dense_score")},
        "conclusive?": bool,
    },
    "cache": {
        "bytes": dict.fromkeys(("codes", "scales_and_gains", "exact_tokens", "dense"), int),
        "coded_bits_per_element": NUMBER,
        "layers": [{"account": SIZES}],
    },
    "documents?": [{"coded_bits_per_element?": NUMBER}],
    "tokens?": [{"kl": [NUMBER], "agree": [NUMBER], "nll_delta": [NUMBER]}],
    "answers?": [{"coded_score": (NUMBER, bool)}],
    "layers?": [{"layer": int, "output_error": NUMBER, "attention_kl?": (NUMBER, None)}],
    "bits?": [{"layer": int, "slot": str, "heads": [NUMBER]}],
    "seconds?": {ANY_NAME: (NUMBER, None)},
    "made": {
        "commit": (str, None),
        "machine": str,
        "n_threads": int,
        "date": str,
        "versions": {ANY_NAME: str},
    },
}


def check_shape(result: Mapping[str, Any]) -> None:
    """ValueError, naming the field, unless a result holds what is read of results."""
    _check(result, SHAPE, "")
    cache = result["cache"]
    sizes = [layer["account"] for layer in cache["layers"]]
    if any(value < 0 for account in sizes for value in account.values() if isinstance(value, int | float)):
        raise ValueError("cache.layers holds a size below 0")
    if any(account["n_elements"] and not account["dense"] for account in sizes):
        raise ValueError("cache.layers holds elements of no bytes")
    if any(account["n_elements"] for account in sizes):
        held = cache["bytes"]
        if not held["dense"] or held["codes"] + held["scales_and_gains"] + held["exact_tokens"] <= 0:
            raise ValueError("cache.bytes says that nothing is held")
        if any(account["n_coded_elements"] for account in sizes) and held["codes"] + held["scales_and_gains"] <= 0:
            raise ValueError("cache.bytes says that what is coded takes no bytes")


def _check(value: Any, shape: Any, path: str) -> None:
    if isinstance(shape, tuple):
        if not any(_is(value, part) for part in cast("tuple[Any, ...]", shape)):
            raise ValueError(f"{path} is {_said(value)}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{path} is {_said(value)}, not a list")
        for i, item in enumerate(cast("list[Any]", value)):
            _check(item, shape[0], f"{path}[{i}]")
    elif isinstance(shape, Mapping):
        _check_mapping(value, cast("Mapping[str, Any]", shape), path)
    elif not _is(value, shape):
        raise ValueError(f"{path} is {_said(value)}")


def _check_mapping(value: Any, shape: Mapping[str, Any], path: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{path or 'it'} is {_said(value)}, not an object")
    held = cast("dict[str, Any]", value)
    for name, part in shape.items():
        if name == ANY_NAME:
            for key, item in held.items():
                _check(item, part, f"{path}.{key}")
            continue
        key, here = name.removesuffix(OPTIONAL), f"{path}.{name.removesuffix(OPTIONAL)}".removeprefix(".")
        if key in held:
            _check(held[key], part, here)
        elif not name.endswith(OPTIONAL):
            raise ValueError(f"{here} is missing")


def _is(value: Any, kind: Any) -> bool:
    if kind is None:
        return value is None
    if kind == NUMBER:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _said(value: Any) -> str:
    return repr(value)[:40] if not isinstance(value, dict | list) else f"a {type(value).__name__}"
