"""What a recipe cannot do for a model is refused by `karhunen calibrate` before any text runs."""

import pytest
from tests.hf.tiny import build

from karhunen.cli.calibrate import _check_suits  # pyright: ignore[reportPrivateUsage]
from karhunen.recipes import make


@pytest.mark.parametrize(
    ("family", "recipe", "words"),
    [
        ("mistral", "int4", "int4 codes no layer of this mistral: sliding window of 16 tokens"),
        ("bloom", "key_norm", "adds a bias for the distance"),
        ("mla", "snapkv", "chooses tokens by the queries that read them"),
    ],
)
def test_a_recipe_that_does_not_suit_the_model_is_refused(family: str, recipe: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _check_suits(make(recipe), build(family))
    _check_suits(make("full"), build(family))
