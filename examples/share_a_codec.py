"""Share a codec: save it, load it elsewhere, and see that it refuses every other model.

    python examples/share_a_codec.py FOLDER [MODEL]

With an account at the hub, `HubCodec(codec).push_to_hub("you/your-codec")` uploads what this writes.
"""

import sys
from pathlib import Path

import torch

import karhunen
from karhunen.hf.hub import HubCodec


def main(folder: str, name: str = "smollm2") -> None:
    model, tokenizer = karhunen.load(name)
    recipe = karhunen.make("kivi:bits=4")
    codec = karhunen.fit(recipe, karhunen.calibrate(model, "any text " * 500, recipe.needs(), tokenizer))

    HubCodec(codec).save_pretrained(folder)  # `codec.save_pretrained` writes the same without a model card
    for file in sorted(Path(folder).iterdir()):
        print(f"{file.name}: {file.stat().st_size:,} bytes")

    shared = HubCodec.from_pretrained(folder).codec
    print(f"the same codec: {shared.fingerprint() == codec.fingerprint()}")
    karhunen.CompressedCache(model, shared).close()  # fits the model that it was made for

    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)  # another model now, as after training
    try:
        karhunen.CompressedCache(model, shared)
    except ValueError as reason:
        print(f"refused: {reason}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("give a folder for the codec")
    main(*sys.argv[1:])
