"""`karhunen bench`: ratios are those within a round, and a made-up layer is read right."""

import pytest
import torch
from tests.hf.test_cache import fitted, model_of, tokens

from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.evaluation.speed import kernel_speed, step_speed
from karhunen.evaluation.speed.kernel_speed import Shape, made_up_codec, made_up_layer, output_error
from karhunen.evaluation.speed.measured import Timings
from karhunen.evaluation.speed.speed_plot import speed_figure


def test_a_speed_up_is_the_median_ratio_within_a_round() -> None:
    timings = Timings({"ours": (1.0, 10.0, 1.0), "dense": (2.0, 20.0, 300.0)})
    assert timings.speed_up("ours", "dense") == 2.0
    assert timings.fastest("ours", "dense") == "ours"


@pytest.mark.parametrize("text", ["3x3", "3x0x64", "axbxc", "3x3x63"])
def test_a_shape_is_refused_with_what_is_wanted(text: str) -> None:
    with pytest.raises(ValueError, match=r"HxQxD|multiple of 8"):
        Shape.parse(text)


def test_a_made_up_layer_is_read_from_bytes_as_defined() -> None:
    shape, generator = Shape.parse("2x3x16"), torch.Generator().manual_seed(0)
    codec = made_up_codec(shape, 2.0, generator)
    held = made_up_layer(codec, shape, 300, 1, generator)
    assert reader_of(codec, held).mode == "bytes"
    assert output_error(codec, held, torch.randn(1, 6, 1, 16, generator=generator)) < fused.TOLERANCE


def test_both_modes_give_rows_that_can_be_drawn() -> None:
    step = step_speed.measure(model_of("llama"), fitted("llama", "karhunen"), tokens(1, 60)[0], 1)
    rows = [
        {"threads": 1, "device": "cpu", **kernel_speed.measure(Shape(2, 2, 16), 300, 1, 2.0, 1)},
        {"threads": 1, "device": "cpu", "model": "tiny", "recipe": "karhunen", **step},
    ]
    assert all(row["speed_up"] > 0 and row["bytes_read"] > 0 for row in rows)
    assert rows[1]["how_read"] and all(how.startswith("bytes") for how in rows[1]["how_read"])
    assert model_of("llama").config._attn_implementation == "sdpa"
    made = {"n_threads": 1, "versions": {}, "commit": "", "machine": ""}
    document = {"mode": "test", "device": "cpu", "copy_gb_per_second": {"1": 1.0}, "provenance": made, "rows": rows}
    axes = speed_figure(document).axes
    labels = [line.get_label() for line in axes[0].lines[:2]]
    assert labels == ["2x2x16, batch 1, 1 thread(s), 2.00 bits", "tiny, karhunen, 1 thread(s)"]
