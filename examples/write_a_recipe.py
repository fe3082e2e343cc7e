"""Write a recipe: choose a part for each axis, for keys and for values.

    python examples/write_a_recipe.py [MODEL]

Here: rotate each vector so that no coordinate stands out, then four bits for a key's and two for a value's numbers.
"""

import sys

import karhunen
from karhunen.allocation.uniform import Uniform
from karhunen.calibration.texts import calibration_text, evaluation_text
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent


def rotated(key_bits: int = 4, value_bits: int = 2) -> Recipe:
    """Evenly spaced points for rotated vectors, one range for each token and head; the newest 64 tokens exact."""

    def side(bits: int) -> Side:
        return Side(transform=Hadamard(), allocation=Uniform(bits), quantizer=Affine(PerToken(), clip=0.95))

    return Recipe("rotated", key=side(key_bits), value=side(value_bits), window=SinkRecent(sink=4, recent=64))


def main(name: str = "smollm2", prompt_letters: int = 8000) -> None:
    model, tokenizer = karhunen.load(name)
    recipe = rotated()
    codec = karhunen.fit(recipe, karhunen.calibrate(model, calibration_text(), recipe.needs(), tokenizer))
    prompt = tokenizer(evaluation_text()[:prompt_letters], return_tensors="pt")
    with karhunen.compressed(model, codec) as session:
        model.generate(**prompt, max_new_tokens=4, do_sample=False)
    held = session.report().total
    print(f"needs from calibration: {len(recipe.needs())} statistics")
    print(f"coded tokens: {held.coded_bits_per_element:.2f} bits for each number, ranges included")


if __name__ == "__main__":
    main(*sys.argv[1:])
