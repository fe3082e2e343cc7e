"""Wrong inputs, each answered in one line that says what was given, what was wanted and what would do."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.synthetic import SMALL, cached, codec, quick, statistics

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.metrics.output import OutputMetric
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import Need

# Choices that the type checker of the tests would refuse before the library does, so they are tried without it.
UNTYPED = {
    'make("karhunnen")': r"unknown recipe 'karhunnen'; did you mean karhunen\? `karhunen recipes` lists the \d\d",
    'make("Nova-KV")': r"unknown recipe 'Nova-KV'; did you mean nova_kv or ",
    'make("int")': r"unknown recipe 'int'; did you mean (int\d or ){2}int\d\? ",
    'make("")': r"unknown recipe ''; `karhunen recipes` lists the \d\d",
    'make("kivi:bit=2")': r"recipe kivi has no option \['bit'\]; known: \['bits', 'group', 'recent', 'sink'\]",
    'make("full:bits=2")': r"recipe full has no option \['bits'\]; known: none",
    'make("kivi:bits")': r"option 'bits' of recipe kivi has no value; write bits=\.\.\.",
    'make("kivi:bits=two")': r"option kivi:bits='two' is not of type int",
    'make("kivi:bits=2.5")': r"option kivi:bits=2\.5 is not of type int",
    'make("karhunen:joined=2")': r"option karhunen:joined=2 is not of type bool",
    'make("int4:group=true")': r"option int4:group=True is not of type int",
    'make("int4:group=None")': r"option int4:group=None is not of type int",
    'make("spectra:value_bits=lots")': r"option spectra:value_bits='lots' is not of type float or None",
    'make("kivi:bits=0")': r"bits=0 is out of range; use 1 to 16",
    'make("kivi:group=0")': r"a range over 0 values is empty; use 1 or more",
    'make("kivi:sink=-1")': r"sink=-1 and recent=128 count tokens; use 0 or more",
    'make("quarot:clip=0.2")': r"clip=0\.2 is not a quantile above one half",
    'make("spectra:bits=0")': r"bits=0 is out of range; use more than 0",
    'make("fp8:number=e9m9")': r"unknown float8 format 'e9m9'; known: \['e4m3', 'e5m2'\]",
    'WaterFilling(2.0, "planet")': r"unknown scope 'planet'; known: head, layer, model",
    "Uniform(2.5)": r"bits=2\.5 is not a whole number; give an integer",
    "SinkRecent(sink=0.1)": r"sink=0\.1 is not a whole number",
    'QueryMetric("softmax")': r"unknown weighting 'softmax'; known: uniform, attention",
    'GroupVQ(entries="float4")': r"unknown entries 'float4'; known: float16, float8_e5m2",
    'GroupVQ(grouping="random")': r"unknown grouping 'random'; known: stratified",
    'GroupVQ(gain="loud")': r"unknown gain 'loud'; known: none, float16, log8",
    'Blocks("int5")': r"unknown numbers 'int5'; known: int8, int4, float4",
    'LloydMax(gain="loud")': r"unknown gain 'loud'; known: none, float16, log8",
    "Recipe.from_dict([])": r"this is a tuple, not a Recipe",
    'Recipe.from_dict({"class": "Uniform", "bits": 2})': r"this is a Uniform, not a Recipe",
    'Recipe.from_dict({"class": "Recipe", "name": "x"})': r"Recipe: .*missing .*'key' and 'value'",
    'LayerShape("diagonal")': r"unknown layer kind 'diagonal'; known: \['full', 'sliding', 'other'\]",
}

PROGRAM = """
import json, sys
from karhunen.allocation.uniform import Uniform
from karhunen.allocation.water_filling import WaterFilling
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.blocks import Blocks
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.quantizers.lloyd_max import LloydMax
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.identity import LayerShape
from karhunen.windows.sink_recent import SinkRecent
answers = {}
for expression in json.load(sys.stdin):
    try:
        answers[expression] = ["nothing", repr(eval(expression))]
    except Exception as error:
        answers[expression] = [type(error).__name__, str(error)]
print(json.dumps(answers))
"""


@cache
def answers() -> dict[str, tuple[str, str]]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(list(UNTYPED)),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parent.parent / "src")},
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("expression", UNTYPED)
def test_a_wrong_choice_is_refused_when_it_is_made(expression: str) -> None:
    kind, message = answers()[expression]
    assert kind == "ValueError", message
    assert re.search(UNTYPED[expression], message), message
    assert "\n" not in message


def refusal(action: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert type(caught.value) is ValueError


# recipes that do not go together


def test_a_recipe_for_one_side_only_is_refused() -> None:
    refusal(
        lambda: Recipe("half", Side(), None), "'half' codes only one of keys and values; give both sides or neither"
    )


def test_values_with_a_rotary_frame_are_refused() -> None:
    key = make("spectra").key
    refusal(lambda: Recipe("turned", Side(), key), "'turned' gives values a rotary frame; values carry no rotation")


def test_a_metric_of_the_other_side_is_refused() -> None:
    refusal(lambda: QueryMetric().needs(Need("moments", "value")), "use OutputMetric or Plain for values")
    refusal(lambda: OutputMetric().needs(Need("moments", "key")), "use QueryMetric or Plain for keys")


# sizes that do not fit


def test_a_group_that_does_not_divide_is_refused_with_those_that_do() -> None:
    side = Side(quantizer=Affine(PerToken(24)))
    recipe = Recipe("odd", side, side)
    pattern = (
        r"layer 0, keys: group=24 does not divide the 32 coefficients of a vector; use (one of )?\[1, 2, 4, 8, 16, 32\]"
    )
    refusal(lambda: fit(recipe, statistics(recipe, SMALL)), pattern)


def test_vector_groups_that_do_not_divide_are_refused() -> None:
    side = Side(quantizer=GroupVQ(size=5))
    recipe = Recipe("odd", side, side)
    refusal(
        lambda: fit(recipe, statistics(recipe, SMALL)), r"layer 0, keys: size=5 does not divide the 32 coefficients"
    )


def test_codebooks_too_large_to_train_are_refused() -> None:
    recipe = make("nova_kv", bits=8)
    refusal(
        lambda: fit(recipe, statistics(recipe, SMALL)), r"layer 0, keys: 4 coefficients at 8 bits need 2\^32 entries"
    )


def test_too_little_calibration_text_is_refused() -> None:
    recipe = quick(make("nova_kv", bits=3))
    pattern = "layer 0, keys: 300 calibration samples cannot train 4096 codebook entries; calibrate on more text"
    refusal(lambda: fit(recipe, statistics(recipe, SMALL)), pattern)


# statistics that are not there


def test_statistics_not_gathered_are_named() -> None:
    gathered = statistics(quick(make("kivi")), SMALL)
    about = r"moments of the keys \(block 1, heads joined, without the first 3 tokens\)"
    pattern = rf"layer 0, keys: the recipe needs {about}, which .* calibrate again"
    refusal(lambda: fit(quick(make("spectra")), gathered), pattern)


def test_a_layer_never_observed_is_named() -> None:
    recipe = quick(make("spectra"))
    gathered = statistics(recipe, SMALL, SMALL)
    gathered = replace(gathered, layers={0: gathered.layers[0]})
    refusal(lambda: fit(recipe, gathered), "layer 1 was never observed during calibration")


def test_statistics_about_other_sinks_are_not_taken_for_these() -> None:
    recipe = make("spectra")
    gathered = statistics(quick(recipe), SMALL)
    refusal(lambda: fit(recipe, gathered), "which these statistics do not hold")


@pytest.mark.parametrize("name", ["spectra", "karhunen"])
def test_a_model_without_rotation_is_refused_by_a_rotary_frame(name: str) -> None:
    recipe = quick(make(name))
    gathered = statistics(recipe, SMALL, turn=False)
    pattern = rf"recipe '{name}' codes keys relative to their rotation .* this synthetic .* codes keys as they are "
    refusal(lambda: fit(recipe, gathered), pattern)


def test_a_model_without_rotation_is_coded_after_rope() -> None:
    recipe = quick(make("nova_kv"))
    assert fit(recipe, statistics(recipe, SMALL, turn=False)).layers


# artifacts


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    codec("spectra").save_pretrained(tmp_path / "codec")
    return tmp_path / "codec"


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_missing_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        refusal(lambda f=folder: Codec.from_pretrained(f), f"no artifact at {folder}: it has no config.json; make one")


def test_a_truncated_table_file_is_refused(artifact: Path) -> None:
    whole = (artifact / "tensors.safetensors").read_bytes()
    for n in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (artifact / "tensors.safetensors").write_bytes(whole[:n])
        refusal(
            lambda: Codec.from_pretrained(artifact), r"tensors\.safetensors is truncated or altered: .* make it again"
        )
    (artifact / "tensors.safetensors").unlink()
    refusal(lambda: Codec.from_pretrained(artifact), r"is incomplete: tensors\.safetensors is missing")


@pytest.mark.parametrize("where", [0, 9, 0.5, -1])
def test_a_flipped_bit_in_the_tables_is_refused(artifact: Path, where: float) -> None:
    data = bytearray((artifact / "tensors.safetensors").read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 0x10
    (artifact / "tensors.safetensors").write_bytes(data)
    refusal(
        lambda: Codec.from_pretrained(artifact), "is truncated or altered: its SHA-256 is not the one in config.json"
    )


def test_an_altered_configuration_is_refused(artifact: Path) -> None:
    """A codec whose window or widths were changed by hand decodes what was stored before to something else."""

    def change(config: dict[str, Any]) -> None:
        config["codec"]["window"]["recent"] = 21

    edit(artifact, change)
    refusal(lambda: Codec.from_pretrained(artifact), r"config\.json is altered: .* make it again")


@pytest.mark.parametrize("text", ["", "{", '{"format": ', "\0\1\2"])
def test_a_configuration_that_is_no_json_is_refused(artifact: Path, text: str) -> None:
    (artifact / "config.json").write_text(text)
    refusal(lambda: Codec.from_pretrained(artifact), r"config\.json is not JSON: ")


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_configuration_of_another_kind_is_refused(artifact: Path, text: str) -> None:
    (artifact / "config.json").write_text(text)
    refusal(lambda: Codec.from_pretrained(artifact), r"config\.json holds no artifact: it is a \w+, not an object")


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (3, "install a newer one, or make it again"),
        (0, "make it again"),
        (None, "make it again"),
        (True, "make it again"),
    ],
)
def test_another_version_is_refused_with_what_would_do(artifact: Path, version: object, advice: str) -> None:
    edit(artifact, lambda config: config.update(version=version))
    refusal(
        lambda: Codec.from_pretrained(artifact),
        f"has format version {version}; this karhunen reads versions 1 and 2: {advice}$",
    )


def test_another_format_is_refused(artifact: Path) -> None:
    edit(artifact, lambda config: config.update(format="karhunen-statistics"))
    refusal(lambda: Codec.from_pretrained(artifact), "holds 'karhunen-statistics', not 'karhunen-codec'")


def test_saving_over_something_else_is_refused(tmp_path: Path, artifact: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("dear")
    refusal(
        lambda: codec("int4").save_pretrained(tmp_path / "thesis"),
        r"holds chapter1\.txt, which no karhunen-codec consists of; choose a new or empty folder",
    )
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "dear"
    codec("int4").save_pretrained(artifact)
    assert Codec.from_pretrained(artifact).fingerprint() == codec("int4").fingerprint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codec", "thesis"], "no half-written folder stays"


def test_the_codec_of_another_model_is_refused_with_the_first_difference() -> None:
    made = codec("int4")
    others = {
        "it was made for a synthetic, this model is a other": replace(made.model, architecture="other"),
        "it was made for 1 layers, this model has 2": replace(made.model, layers=(SMALL, SMALL)),
        r"layer 0 differs: made for .*key_dim=32.*, this model has .*key_dim=64": replace(
            made.model, layers=(LayerShape("full", 2, 4, 64, 64),)
        ),
        "it was made for configuration c, this model's is d": replace(made.model, config_hash="d"),
        "it was made for weights w, this model's are v": replace(made.model, weights_hash="v"),
    }
    for reason, model in others.items():
        refusal(lambda m=model: made.check_model(m), f"this codec does not fit the model: {reason}")
    made.check_model(made.model)
    made.check_model(replace(made.model, weights_hash=""))


# vectors that cannot be coded


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_vectors_that_are_no_numbers_are_refused(bad: float) -> None:
    key, _ = cached(SMALL, 1, 8)
    key[0, 1, 3, 5] = bad
    side = codec("int4").layers[0].key
    refusal(lambda: side.encode(key, torch.arange(8)[None]), "NaN or infinity among the vectors to be coded")


def test_a_word_that_an_option_knows_is_that_word() -> None:
    """`none` is None elsewhere."""
    assert make("q4_0:rotation=none") == make("q4_0", rotation="none")
    assert make("karhunen:bits=2,token_bytes=none") == make("karhunen", bits=2, token_bytes=None)


@pytest.mark.parametrize(
    ("text", "said"),
    [("exllamav3:key_bits=9", "2 to 8 bits"), ("exllamav3:value_bits=1", "2 to 8 bits"),
     ("karhunen:progressive=true,layers=0", "1 layer of refinement or more")],
)  # fmt: skip
def test_rates_that_a_format_does_not_have_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(text)
