"""Layers of an embedded code: any prefix decodes, and each layer takes error away."""

from dataclasses import replace

import pytest
import torch
from tests.progressive import codec
from tests.synthetic import SMALL, cached

from karhunen.allocation.water_filling import WaterFilling
from karhunen.quantizers.base import Codes
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.quantizers.embedded import Embedded, EmbeddedQuantizer
from karhunen.statistics.need import SLOTS


@pytest.mark.parametrize("slot", SLOTS)
def test_every_prefix_decodes_and_each_layer_takes_error_away(slot: str) -> None:
    side = codec().layers[0].side(slot)  # type: ignore[arg-type]
    quantizer = side.quantizer
    assert isinstance(quantizer, EmbeddedQuantizer)
    x = cached(SMALL, 1, 128, seed=9)[slot == "value"]
    at = torch.arange(128)[None]
    y = side.transform.forward(side.frame.forward(x, at, side.rotary, side.mean))
    codes = quantizer.encode(y)
    error = [float((quantizer.decode(Codes(codes.symbols[:, :n], {})) - y).square().sum()) for n in quantizer.edges]
    assert len(error) == 3
    assert error[0] > 1.3 * error[1] > 1.3**2 * error[2]  # two bytes more a head, of vectors they were trained on


def test_dropping_a_layer_is_truncation() -> None:
    """A code of fewer layers has the same bytes, fewer of them."""
    side = codec().layers[0].key
    quantizer = side.quantizer
    assert isinstance(quantizer, EmbeddedQuantizer)
    x, at = cached(SMALL, 2, 16)[0], torch.arange(16).expand(2, -1)
    shorter = replace(quantizer, parts=quantizer.parts[:2])
    less = replace(side, quantizer=shorter, layout=replace(side.layout, widths=shorter.widths))  # type: ignore[call-arg]
    n = quantizer.edges[1]
    assert torch.equal(less.encode(x, at).planes, side.encode(x, at).planes[:, :n])
    part = replace(side.encode(x, at), planes=side.encode(x, at).planes[:, :n])
    assert torch.equal(side.decode(part, at), less.decode(part, at))


def test_symbols_that_end_within_a_layer_are_refused() -> None:
    quantizer = codec().layers[0].key.quantizer
    assert isinstance(quantizer, EmbeddedQuantizer)
    with pytest.raises(ValueError, match="end within a layer"):
        quantizer.decode(Codes(torch.zeros(1, quantizer.edges[0] + 1, 4, dtype=torch.uint8), {}))


def test_what_a_layer_refines_has_no_gain() -> None:
    with pytest.raises(ValueError, match="gain"):
        Embedded(ByteVQ(gain="log8"), (WaterFilling(1.0),))
    with pytest.raises(ValueError, match="without gains"):
        EmbeddedQuantizer(())
