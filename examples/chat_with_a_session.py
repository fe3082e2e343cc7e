"""Chat, leave, and go on another day: the conversation's compressed cache lies in a folder.

    python examples/chat_with_a_session.py FOLDER [MODEL]          # run it twice with one FOLDER

The second run reads its new message only; what was said before comes back from disk, bit for bit.
"""

import sys
from pathlib import Path

import karhunen
from karhunen.hf.conversation import converse

MESSAGES = (
    "Here are my notes: the boat leaves at seven, the key is under the mat, and Ada brings the bread. " * 20,
    "What do my notes say about the key?",
)


def main(folder: str, name: str = "smollm2") -> None:
    model, tokenizer = karhunen.load(name)
    recipe = karhunen.make("kivi:bits=4")  # this one learns nothing from text, so there is nothing to wait for
    codec = karhunen.fit(recipe, karhunen.calibrate(model, "any text " * 500, recipe.needs(), tokenizer))

    message = MESSAGES[1] if Path(folder).exists() else MESSAGES[0]
    answer, resumed = converse(model, tokenizer, message, codec, folder, max_new_tokens=16)

    n_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    print(f"restored {resumed.n_tokens} tokens, then read {answer.n_prompt_tokens - resumed.n_tokens}")
    print(f"answer: {answer.text.strip()!r}")
    print(f"the folder takes {n_bytes:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("give a folder for the conversation")
    main(*sys.argv[1:])
