"""The text of one test document of each kind, one after the other, for a task that is a file.

An older commit, which does not know these documents, is scored on the same text so.

python benchmarks/document_text.py --tokens 2348 -o three.txt    # 2,048 read and 300 scored, three times
"""

import argparse
from pathlib import Path

from karhunen.evaluation.documents import default_documents
from karhunen.hf.embedded import load


def main() -> None:
    """Write the file; ValueError if its tokens are not those of the documents, so that it would be cut elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2348, help="of each document")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load(given.model)[1]
    counts = {"n_prose": 1, "n_code": 1, "n_literature": 1}
    found = default_documents(tokenizer, "test", **counts, prefill_tokens=given.tokens - 1, scored_tokens=1)
    text = "".join(tokenizer.decode(document.tokens) for document in found)
    n = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    if n != len(found) * given.tokens:
        raise ValueError(f"the text has {n} tokens, its documents {len(found) * given.tokens}; try another --tokens")
    given.output.write_text(text, encoding="utf-8")
    print(f"{given.output}: {', '.join(document.name for document in found)}")


if __name__ == "__main__":
    main()
