"""A codec from a file is believed where its parts are what they say: all else is refused at load, in one line."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.synthetic import SMALL, cached, codec
from torch import Tensor

from karhunen import folder as folders
from karhunen.codec import Codec
from karhunen.folder import CONFIG, TENSORS
from karhunen.recipes import names
from karhunen.statistics.need import SLOTS
from karhunen.store.layer_store import LayerStore

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def altered(folder: Path, change: Change) -> None:
    """Change configuration and tensors, and make the hashes right again."""
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / TENSORS)
    change(config["codec"], tensors)
    body = {"codec": config["codec"]}
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS)
    config |= body
    config["tensors_sha256"] = folders._sha256(folder / TENSORS)  # pyright: ignore[reportPrivateUsage]
    config["body_sha256"] = folders._body_sha256(body)  # pyright: ignore[reportPrivateUsage]
    (folder / CONFIG).write_text(json.dumps(config))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Codec.from_pretrained(folder)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def layer(codec: dict[str, Any], slot: str = "key") -> dict[str, Any]:
    return codec["layers"]["map"][0][1][slot]


def set_at(slot: str, *path: str, value: Any) -> Change:
    def change(codec: dict[str, Any], _: dict[str, Tensor]) -> None:
        at = layer(codec, slot)
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value

    return change


def tensor_at(end: str, made: Callable[[Tensor], Tensor]) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(end))
        tensors[name] = made(tensors[name])

    return change


def whole(**given: Any) -> Change:
    return lambda codec, _: codec.update(given)


CASES: dict[str, tuple[str, Change, str]] = {
    "a value transform that broadcasts": (
        "karhunen",
        tensor_at("value.transform.matrix", lambda x: x[..., :1]),
        "AffineMap: matrix is float32.2, 32, 1., not Float",
    ),
    "joined heads said to be one": (
        "spectra",
        set_at("key", "n_heads", value=1),
        "it codes 1 heads, and the layer has 2",
    ),
    "heads without end": ("int4", set_at("key", "n_heads", value=10**9), "codes 1000000000 heads"),
    "a table of NaN": ("spectra", tensor_at("inverse_matrix", lambda x: x * torch.nan), "holds NaN or infinity"),
    "a table of whole numbers": ("spectra", tensor_at("inverse_matrix", Tensor.long), "inverse_matrix is int64"),
    "a matrix of one axis": ("spectra", tensor_at("inverse_matrix", Tensor.flatten), r"inverse_matrix is float32\("),
    "a frame that lost its mean": ("karhunen", set_at("key", "mean", value=None), "mean is not the one of its frame"),
    "a rotation that is too wide": (
        "karhunen",
        set_at("key", "rotary", "offset", value=8),
        "rotation of 32 coordinates",
    ),
    "other bit fields": (
        "int4",
        set_at("key", "layout", "widths", value=[4] * 63),
        "63 bit fields do not lay out the 64",
    ),
    "a range of no tokens": ("kivi", set_at("key", "quantizer", "block_tokens", value=0), "ranges of 1 of 64"),
    "a block without end": (
        "kivi",
        set_at("key", "quantizer", "block_tokens", value=10**9),
        "1000000000 tokens at a time",
    ),
    "a width below zero": ("int4", tensor_at("key.quantizer.bits", lambda x: x - 9), "widths .* each 0 to 16"),
    "an unknown word": ("karhunen", set_at("key", "quantizer", "gain", value="loud"), "gain is 'loud', not Literal"),
    "a number for a switch": ("int4", set_at("key", "frame", "joined", value=1), "joined is 1, not bool"),
    "a switch for a number": ("int4", whole(window={"class": "SinkRecent", "recent": True}), "recent is True, not int"),
    "no number at all": (
        "karhunen",
        whole(window={"class": "SinkRecent", "recent": math.nan}),
        "recent is nan, not int",
    ),
    "a window below zero": ("int4", whole(window={"class": "SinkRecent", "recent": -1}), "use 0 or more"),
    "a layer that is not there": (
        "int4",
        whole(left_exact={"map": [[1, "why"]]}),
        r"\[0\] are coded and \[1\] exact, of 1",
    ),
    "a mapping of no pairs": ("int4", whole(left_exact={"map": [3]}), "no description of a value"),
    "a mapping that names a layer twice": ("int4", whole(left_exact={"map": [[1, "a"], [1, "b"]]}), "twice"),
    "a kind that is a list": ("int4", whole(window={"class": ["SinkRecent"]}), "no description of a value"),
    "a kind of another place": (
        "int4",
        set_at("key", "quantizer", value={"class": "RopeFrame"}),
        "a RopeFrame, not Quantizer",
    ),
    "codebooks without an entry": (
        "nova_kv",
        tensor_at("key.quantizer.entries", lambda x: x[:-1]),
        "entries are not those",
    ),
    "coordinates past the vector": (
        "nova_kv",
        tensor_at("key.quantizer.coordinates", lambda x: x + 30),
        "coordinates are not",
    ),
    "levels in no order": (
        "kvquant",
        tensor_at("key.quantizer.levels", lambda x: x.flip(0)),
        "levels are not 2 to 256",
    ),
    "a spread of zero": (
        "turboquant",
        tensor_at("key.quantizer.sigma", torch.zeros_like),
        "spreads .* are not above 0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_part_implies_is_checked_at_load(case: str, tmp_path: Path) -> None:
    name, change, words = CASES[case]
    codec(name).save_pretrained(tmp_path)
    altered(tmp_path, change)
    refused(tmp_path, words)


@pytest.mark.parametrize("name", names())
def test_every_fitted_codec_is_what_it_says(name: str, tmp_path: Path) -> None:
    codec(name).check()
    codec(name).save_pretrained(tmp_path)
    altered(tmp_path, lambda *_: None)
    assert Codec.from_pretrained(tmp_path).fingerprint() == codec(name).fingerprint()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": "karhunen-codec", "format": "karhunen-codec"}', "it names 'format' twice"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_configuration_of_several_meanings_is_refused(text: str, words: str, tmp_path: Path) -> None:
    codec("int4").save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(text)
    refused(tmp_path, words)


def test_a_description_nested_without_end_is_refused(tmp_path: Path) -> None:
    codec("int4").save_pretrained(tmp_path)
    nested: Any = 1
    for _ in range(400):
        nested = [nested]
    altered(tmp_path, whole(window=nested))
    refused(tmp_path, "window is a tuple, not .*Window|RecursionError")


VALUES = (None, -1, 0, 1, 2, 7, 63, 10**9, 0.5, -0.5, 1e30, "", "none", [], {}, True, [1, 2], {"map": []})
TENSOR_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x[:0], lambda x: x[:-1], lambda x: x.flatten(), lambda x: x[None], lambda x: x.mT if x.ndim > 1 else x,
    lambda x: -x.float(), lambda x: x.float() * torch.nan, lambda x: x.double(), lambda x: x.float() * 1e30,
    lambda x: (x.float() * 3).to(x.dtype), lambda x: torch.zeros_like(x), lambda x: x.int(),
)  # fmt: skip


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(leaf for key, value in pairs for leaf in leaves(value, (*path, key)))]


def mutated(random: Random, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if tensors and random.random() < 0.4:
        name = random.choice(sorted(tensors))
        if tensors[name].ndim:
            tensors[name] = random.choice(TENSOR_CHANGES)(tensors[name])
        return
    path = random.choice(leaves({k: config[k] for k in ("layers", "window", "left_exact", "model")})[1:])
    at: Any = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = copy.deepcopy(random.choice(VALUES))


def use(made: Codec) -> None:
    """As a cache does: code more tokens than the window holds, and read them."""
    key, value = cached(SMALL, 1, 96)
    for layer in made.layers.values():
        store = LayerStore(layer, made.window)
        store.append(key, value)
        assert all(bool(x.isfinite().all()) for x in store.read())
    for slot in SLOTS:
        assert all(layer.side(slot).layout.bytes_per_token >= 0 for layer in made.layers.values())


@pytest.mark.parametrize("name", ["int4", "karhunen", "nova_kv", "kivi", "spectra", "kvquant"])
def test_whatever_is_altered_a_codec_is_refused_at_load_or_decodes_to_numbers(name: str, tmp_path: Path) -> None:
    random = Random(name)
    codec(name).save_pretrained(tmp_path)
    config, tensors = (tmp_path / CONFIG).read_bytes(), (tmp_path / TENSORS).read_bytes()
    n_refused = 0
    for _ in range(25):
        (tmp_path / CONFIG).write_bytes(config)
        (tmp_path / TENSORS).write_bytes(tensors)
        altered(tmp_path, lambda *given: mutated(random, *given))
        try:
            made = Codec.from_pretrained(tmp_path)
        except ValueError as error:
            assert type(error) is ValueError  # noqa: PT017
            n_refused += 1
            continue
        use(made)
    assert n_refused > 12
