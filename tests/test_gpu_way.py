"""The whole way by the GPU's kernels, on a GPU if there is one, else under Triton's interpreter: against definitions.

What is compared was computed from the same bytes: a prompt is attended to dense, so both ways code the same tokens.
"""

from typing import Any

import pytest
import torch
from tests.attention.test_fused import FROM_BYTES, layer, queries
from tests.closeness import assert_near
from tests.hf.test_cache import bits, coded_layers, fitted, generate, run, tokens
from tests.hf.tiny import build
from tests.synthetic import SMALL, quick
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.calibration.calibrate import calibrate
from karhunen.fitting import fit
from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache
from karhunen.kernels import triton_launch
from karhunen.kernels.paths import forced
from karhunen.kernels.scan_attention.gpu import TOLERANCE
from karhunen.recipes import make

pytestmark = pytest.mark.skipif(not triton_launch.INTERPRETED, reason="tensors lie on the host here")

LOGITS = 3 * TOLERANCE
"""Two layers and a head carry the errors of a layer's attention on."""
N_PROMPT = 40


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def model_of(family: str) -> Any:
    model = build(family)
    enable(model)
    return model


@pytest.mark.parametrize(
    ("name", "m"),
    [("karhunen", 1), ("block_centered_joined", 1), ("float_tables_long_blocks", 1), ("kinds_that_differ", 1),
     ("exceptions", 5), ("gain_bytes", 5)]
    + [pytest.param(name, 1, marks=pytest.mark.long) for name in FROM_BYTES if name != "pre_rope"],
)  # fmt: skip
def test_attention_to_a_layer_equals_its_definition(name: str, m: int) -> None:
    """Blocks of one token, and every kind of table, are read by tests/kernels/test_gpu.py and test_gpu_scan.py."""
    made, held = layer(FROM_BYTES[name], 41, b=2)
    query, found = queries(2, m), {}
    for path in ("gpu", "naive"):
        with forced(path):
            reader = reader_of(made, held)
            assert reader.description.startswith("bytes")
            found[path] = fused.attend(reader, held, query, scale=SMALL.key_dim**-0.5)
    assert_near(found["gpu"], found["naive"], TOLERANCE)


def test_rows_padded_on_the_left_begin_at_positions_of_their_own() -> None:
    recipe, offsets = FROM_BYTES["block_centered"], torch.tensor([0, 5, 40])
    made, held = layer(recipe, 75, b=3, offsets=offsets)
    seen = (torch.arange(75) >= offsets[:, None])[:, None, None]
    found = {}
    for path in ("gpu", "naive"):
        with forced(path):
            found[path] = fused.attend(
                reader_of(made, held), held, queries(3, 1), scale=SMALL.key_dim**-0.5, softcap=5.0, mask=seen
            )
    assert_near(found["gpu"], found["naive"], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_several_turns_a_crop_and_branches(family: str) -> None:
    model, made, found = model_of(family), fitted(family, "karhunen"), {}
    for path in ("gpu", "naive"):
        with forced(path):
            held = CompressedCache(model, made)
            out = [run(model, tokens(1, n, seed=n), held) for n in (N_PROMPT, 1, 5)]
            kept = bits(held)
            held.crop(-9)
            out.append(run(model, tokens(1, 1, seed=1), held))
            held.batch_repeat_interleave(2)
            out.append(run(model, tokens(2, 1), held)[:1])
            assert any(f"bytes, {path} path" in row.how_read for row in held.report().layers)
            found[path] = torch.cat(out, dim=1), kept
    assert_near(found["gpu"][0], found["naive"][0], LOGITS)
    assert found["gpu"][1] == found["naive"][1], "the prompt's bytes are the same"


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, N_PROMPT, dtype=torch.int64)
    mask[1, :9] = 0
    return {"attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="batch", marks=pytest.mark.long), pytest.param(padded(), id="padded"),
     pytest.param({"num_beams": 2}, id="beams")],
)  # fmt: skip
def test_a_model_generates_the_tokens_of_the_definition(settings: dict[str, Any]) -> None:
    model, made, found = model_of("llama"), fitted("llama", "karhunen"), {}
    for path in ("gpu", "naive"):
        with forced(path):
            held = CompressedCache(model, made)
            found[path] = generate(model, tokens(2, N_PROMPT), held, n=3, **settings)
            assert coded_layers(held)[0].store.n_coded
    assert found["gpu"] == found["naive"]


@pytest.mark.slow
def test_a_codec_calibrated_and_fitted_this_way_has_the_same_bytes() -> None:
    recipe, found = quick(make("karhunen")), {}
    text = tokens(1, 270)[0].tolist()
    for path in ("gpu", "naive"):
        with forced(path):
            found[path] = fit(recipe, calibrate(build("llama"), [text], recipe.needs(), min_tokens=16)).fingerprint()
    assert found["gpu"] == found["naive"]
