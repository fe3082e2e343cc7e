"""Bit fields against their definition: the symbols of a token written one after another as a number in base 2."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from karhunen.packing.bit_fields import BitFields


def _planes(widths: list[int], symbols: Tensor) -> Tensor:
    """The definition: the bits of a token as one integer, its bytes from the least significant on."""
    n_bytes = -(-sum(widths) // 8)
    b, _, t = symbols.shape
    planes = torch.zeros(b, n_bytes, t, dtype=torch.uint8)
    for i in range(b):
        for j in range(t):
            number, offset = 0, 0
            for width, symbol in zip(widths, symbols[i, :, j].tolist(), strict=True):
                number |= symbol << offset
                offset += width
            planes[i, :, j] = torch.tensor(list(number.to_bytes(n_bytes, "little")), dtype=torch.uint8)
    return planes


@settings(deadline=None)  # how long an example takes is the machine's affair
@given(
    st.one_of(
        st.lists(st.integers(0, 16), min_size=1, max_size=20),
        st.integers(0, 8).flatmap(lambda w: st.integers(1, 40).map(lambda n: [w] * n)),
    ),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_planes_are_those_of_the_definition(widths: list[int], n_tokens: int, random) -> None:
    drawn = [[[random.randrange(1 << w) for _ in range(n_tokens)] for w in widths] for _ in range(2)]
    symbols = torch.tensor(drawn, dtype=torch.int32).reshape(2, len(widths), n_tokens)
    layout = BitFields(tuple(widths))
    planes = layout.pack(symbols)
    assert torch.equal(planes, _planes(widths, symbols))
    assert torch.equal(layout.unpack(planes), symbols)


def test_a_symbol_beyond_its_width_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        BitFields((3, 2)).pack(torch.tensor([[[8], [0]]]))
