"""KL and top-1 of results by the kind of their documents: means over prose, code and literature.

python benchmarks/by_kind.py results/seeds/smollm2/texts_test@6_10_8/*@8-*.json
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from karhunen.evaluation.results.result import read_result


def row_of(result: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """(recipe, kind → cell); a document's name begins with its kind."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for document in result["documents"]:
        kinds[document["name"].split()[0]].append(document)
    cells = {
        f"{kind} ({len(own)})": f"{fmean(d['kl'] for d in own):.4f}, {fmean(d['top1_agreement'] for d in own):.1%}"
        for kind, own in kinds.items()
    }
    return str(result["configuration"]["text"]), cells


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    rows = [row_of(dict(read_result(path))) for path in parser.parse_args().results]
    columns = list(dict.fromkeys(kind for _, cells in rows for kind in cells))
    print("| | " + " | ".join(columns) + " |\n|---" + "|--:" * len(columns) + "|")
    for text, cells in rows:
        print(f"| `{text}` | " + " | ".join(cells.get(kind, "") for kind in columns) + " |")


if __name__ == "__main__":
    main()
