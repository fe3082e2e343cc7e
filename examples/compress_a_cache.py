"""Compress a cache: the whole way in one file.

    python examples/compress_a_cache.py [MODEL]

MODEL is `smollm2` (fetched once), `gemma3-270m`, or a folder that holds a model of transformers.
"""

import sys

import karhunen
from karhunen.calibration.texts import calibration_text, evaluation_text


def main(name: str = "smollm2", calibration_tokens: int = 4096, prompt_letters: int = 8000) -> None:
    model, tokenizer = karhunen.load(name)

    # Once for a model: let it read a text and measure what its cache holds, then fit a codec to that.
    recipe = karhunen.make("karhunen:bits=2")
    statistics = karhunen.calibrate(model, calibration_text(), recipe.needs(), tokenizer, max_tokens=calibration_tokens)
    codec = karhunen.fit(recipe, statistics)

    # Whenever it generates: inside the `with`, its cache is compressed.
    prompt = tokenizer(evaluation_text()[:prompt_letters], return_tensors="pt")
    with karhunen.compressed(model, codec) as session:
        model.generate(**prompt, max_new_tokens=16, do_sample=False)

    held = session.report().total
    print(f"prompt: {prompt['input_ids'].shape[1]:,} tokens")
    print(f"cache: {held.dense:,} bytes became {held.held:,}")
    print(f"coded tokens: {held.coded_bits_per_element:.2f} bits for each number in place of 16")


if __name__ == "__main__":
    main(*sys.argv[1:])
