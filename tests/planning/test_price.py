"""What a recipe is said to cost is what its bytes cost: beside the list of measured bits, and beside real codecs."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.hf.tiny import build
from tests.synthetic import WINDOW

from karhunen.evaluation.results.composition import anatomy, measured_bits
from karhunen.fitting import fit
from karhunen.planning.made_up import made_up_statistics
from karhunen.planning.price import price, said_window, split_of
from karhunen.planning.shape import CacheLayer, ModelShape
from karhunen.recipes import make, names
from karhunen.statistics.identity import LayerShape
from karhunen.windows.all_exact import AllExact
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.streaming import Streaming
from karhunen.windows.top_scored import TopScored

SOURCE = Path(__file__).parents[2] / "src"
LISTED = CacheLayer("full", 2, 4, 64, 64)  # of benchmarks/recipe_bits.py
N_LISTED = 2048
LOOSE = {
    "kvtc": 0.12,  # the list has it after DEFLATE
    "spectra": 0.03, "aatc": 0.05, "palu": 0.03,  # whole groups of another spectrum
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_priced_as_it_was_measured(name: str) -> None:
    """Coded tokens alone, and all tokens with the window, of 2,048 tokens in bfloat16."""
    shape = ModelShape("m", "", "", (LISTED,))
    rate, listed = price(name, make(name), shape), measured_bits()["bits"][name]
    assert (rate.coded_bits(shape) or 0) == pytest.approx(listed["coded"], rel=LOOSE.get(name, 0.002))
    held = 8 * rate.held_bytes(shape, N_LISTED) / (N_LISTED * LISTED.elements_per_token)
    assert held == pytest.approx(listed["all"], rel=LOOSE.get(name, 0.02))


@pytest.mark.parametrize("name", ["karhunen:bits=2", "spectra", "nova_kv", "kivi"])
def test_tables_are_those_of_a_real_codec(name: str) -> None:
    """Of all heads, where the price is made of some of them: 8 heads of 128 are 1,024 numbers."""
    recipe = make(name)
    layer = CacheLayer("full", 8, 32, 128, 128)
    shape = ModelShape("m", "", "", (layer,))
    rate = price(name, recipe, shape)
    whole = LayerShape("full", 8, 8, 128, 128)
    sides = [side for side in (recipe.key, recipe.value) if side is not None]
    if any(hasattr(side.quantizer, "n_iterations") for side in sides):
        from tests.synthetic import quick

        recipe = quick(recipe)
    codec = fit(recipe, made_up_statistics(recipe, whole))
    assert rate.table_bytes(shape) == pytest.approx(codec.table_bytes(), rel=0.02)
    found = anatomy(codec)
    assert rate.coded_bits(shape) == pytest.approx(found.bits_per_element, rel=0.01)
    assert rate.tables[layer].transforms == pytest.approx(sum(side.transform_bytes for side in found.sides), rel=0.01)


def test_a_split_is_the_windows_own() -> None:
    """3 sinks, 20 newest, pages of 8: of 100 tokens 72 are coded."""
    assert split_of(WINDOW, 1)(100) == (28, 72)
    assert split_of(SinkRecent(4, 128), 32)(1000) == (136, 864)
    assert split_of(AllExact(), 1)(50) == (50, 0)
    assert split_of(Streaming(4, 1020), 1)(5000) == (4 + 1020 + (5000 - 1024) % 16, 0)
    assert split_of(TopScored(), 1)(5000) == (1024, 0)
    assert said_window(SinkRecent(4, 128)) == "4 first and 128 to 143 newest tokens exact"
    assert said_window(AllExact()) == "every token exact"
    assert "others dropped" in said_window(Streaming())
    assert "dropped by score" in said_window(TopScored())


def test_what_a_recipe_cannot_code_is_refused_with_the_sizes() -> None:
    shape = ModelShape("m", "", "", (CacheLayer("full", 2, 4, 90, 90),))
    with pytest.raises(ValueError, match="nova_kv does not code layers of 2 heads of 90 and 90 numbers"):
        price("nova_kv", make("nova_kv"), shape)


def test_the_arithmetic_needs_no_torch() -> None:
    code = (
        "import sys; from karhunen.cli import run;"
        "code = run(['plan', 'gemma3-27b', '--memory', '80GiB', '--ratio', '8']);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gemma3-27b" in done.stdout


def test_price_leaves_no_layer_out_and_codes_no_other() -> None:
    model = build("gemma3")
    shape = ModelShape("m", "", "", tuple(
        CacheLayer("full", 1, 4, 32, 32) if kind == "full_attention" else CacheLayer("sliding", 1, 4, 32, 32, 16)
        for kind in model.config.layer_types
    ))  # fmt: skip
    assert list(price("int8", make("int8"), shape).bits) == [CacheLayer("full", 1, 4, 32, 32)]
