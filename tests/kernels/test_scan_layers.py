"""Tokens with layers of refinement, read by the compiled scan as its definition reads them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from tests.closeness import assert_near
from tests.kernels.examples import Example
from tests.synthetic import seeded

from karhunen.kernels.scan_attention import CodedTokens, Layers, available, naive, scan_attention

cpu = pytest.importorskip("karhunen.kernels.scan_attention.cpu")
pytestmark = pytest.mark.skipif(not available("cpu")[0], reason=available("cpu")[1])


@dataclass(frozen=True)
class Refined:
    """An example whose tokens have heat: about `share` of them have the first layer, a third of these the next."""

    base: Example
    share: float = 0.3
    n_layers: int = 3
    line: int = 0
    before: int = 0

    def layers(self) -> Layers:
        """Rows of the batch differ; the call's tokens come after `before` others."""
        b, n = self.base.b, self.base.t + self.before
        heat = (
            (torch.rand(b, n, generator=seeded(11)) ** 3 * 60 + 16 * (self.share - 0.5)).clamp(0, 255).to(torch.uint8)
        )
        heat[:, : self.before] = 40
        least = tuple(self.line + 16 * (layer + 1) for layer in range(self.n_layers))
        sides = [[replace(self.base, sizes=sizes).side(20 + i) for i, sizes in enumerate(layer)] for layer in SIZES]
        tables = tuple((key.tables, value.tables) for key, value in sides[: self.n_layers])
        codes = tuple(
            tuple(
                torch.randint(0, 256, (sum(t.n_planes for t in pair), int((heat[row].int() >= least[layer]).sum()) + 5),
                              generator=seeded(30 + row), dtype=torch.uint8)[:, :-5]
                for row in range(b)
            )
            for layer, pair in enumerate(tables)
        )  # fmt: skip
        return Layers(heat, least, codes, tables, self.before)


SIZES = (((5, 2, 9), (3, 13)), ((16,), (1, 1, 2)), ((12, 3), (7, 9)))
CASES = {
    "grouped heads": Refined(Example(t=700)),
    "every token has all layers": Refined(Example(t=300), line=-48),
    "no token has any": Refined(Example(t=100), line=200),
    "one layer": Refined(Example(t=300, r=1, h=1), n_layers=1),
    "rows of different classes": Refined(Example(b=2, r=1, t=1300)),
    "after other tokens": Refined(Example(t=300, first=37), before=130),
    "seven rows": Refined(Example(r=7, t=300)),
    "joined heads": Refined(Example(joined=True, t=300)),
    "no frame turns": Refined(Example(block=None, t=600, first=0)),
    "blocks of 16": Refined(Example(block=16, t=300)),
    "padded to the left": Refined(Example(t=300, first=-20)),
    "some coordinates do not turn": Refined(Example(t=300, rest=4)),
    "two small look-ups": Refined(Example(t=300, kind=(4, 4))),
    "overlapping look-ups": Refined(Example(t=300, kind=(6, 6))),
    "a few tokens": Refined(Example(t=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_layers_are_read_as_their_definition_reads_them(name: str, nan_filled_memory: None) -> None:
    case = CASES[name]
    example = case.base
    arguments = (example.side(2), example.side(3), example.frames())
    settings = {"first_position": example.first, "scale": example.d**-0.5, "layers": case.layers()}
    expected = naive.scan_attention(example.query().double(), *arguments, **settings)
    for n_threads in (1, 3):
        actual = cpu.scan_attention(example.query(), *arguments, n_threads=n_threads, **settings)
        assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
        assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)


@pytest.mark.parametrize("option", ["softcap", "mask", "hidden"])
def test_layers_count_before_the_cap_and_hidden_tokens_not_at_all(option: str, nan_filled_memory: None) -> None:
    case = CASES["rows of different classes"]
    example, layers = case.base, case.layers()
    mask = torch.rand(2, example.t, generator=seeded(5)) > 0.3
    hidden = tuple(x.sort().values if i else x for i, x in enumerate((~mask).nonzero(as_tuple=True)))
    order = (~mask).nonzero()[:, 1].argsort()
    hidden = tuple((~mask).nonzero()[order].T)
    settings = {"softcap": {"softcap": 2.0}, "mask": {"mask": mask}, "hidden": {"hidden": hidden}}[option]
    arguments = (example.side(2), example.side(3), example.frames())
    common = {"first_position": example.first, "scale": 0.5, "layers": layers}
    expected = naive.scan_attention(example.query().double(), *arguments, **common, **settings)
    actual = cpu.scan_attention(example.query(), *arguments, n_threads=1, **common, **settings)
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)
    without = cpu.scan_attention(example.query(), *arguments, n_threads=1, **common)
    assert (without.mean - actual.mean).norm() > 1e-3 * actual.mean.norm()


def test_the_definition_is_that_of_tokens_whose_planes_are_all_there() -> None:
    """Where every token has the layer, base and layer are one code whose planes add."""
    example, layers = Example(t=40), Refined(Example(t=40), n_layers=1, line=-48).layers()
    key, value = example.side(2), example.side(3)
    whole = []
    for side, base in enumerate((key, value)):
        tables, first = layers.tables[0][side], side * layers.tables[0][0].n_planes
        planes = layers.codes[0][0][None, first : first + tables.n_planes]
        heads = [
            [*(base.tables.plane(j) for j in range(*a)), *(tables.plane(j) for j in range(*b))]
            for a, b in zip(pairwise(base.tables.plane_start), pairwise(tables.plane_start), strict=True)
        ]
        order = [
            torch.cat([base.codes[:, slice(*a)], planes[:, slice(*b)]], dim=1)
            for a, b in zip(pairwise(base.tables.plane_start), pairwise(tables.plane_start), strict=True)
        ]
        whole.append(CodedTokens(torch.cat(order, 1), type(tables).from_planes(heads, example.d)))
    query, frames = example.query().double(), example.frames()
    expected = naive.scan_attention(query, *whole, frames, first_position=4)
    actual = naive.scan_attention(query, key, value, frames, first_position=4, layers=layers)
    assert_near(actual.mean, expected.mean, 1e-12)
    assert_near(actual.log_sum, expected.log_sum, 1e-12)


def test_layers_of_another_call_are_refused() -> None:
    case = CASES["grouped heads"]
    layers, sides = case.layers(), (case.base.side(2), case.base.side(3))
    with pytest.raises(ValueError, match="it has all of these"):
        cpu.scan_attention(case.base.query(), *sides, case.base.frames(), layers=replace(layers, first=1))
    gained = (replace(case.base, gain="half").side(2), sides[1])
    with pytest.raises(ValueError, match="tokens with gains have no layers"):
        cpu.scan_attention(case.base.query(), *gained, case.base.frames(), layers=layers)
    other = replace(case.base, kind=(4, 4))
    with pytest.raises(ValueError, match="that of their base"):
        cpu.scan_attention(other.query(), other.side(2), other.side(3), other.frames(), layers=layers)
    with pytest.raises(ValueError, match="least heats that rise"):
        replace(layers, least=layers.least[:2])
    with pytest.raises(ValueError, match="planes"):
        replace(layers, codes=layers.codes[::-1])
    if available("gpu")[0]:
        with pytest.raises(ValueError, match="no GPU kernel reads layers"):
            scan_attention(case.base.query(), *sides, case.base.frames(), layers=layers, path="gpu")
