"""`karhunen compare`: which of two is better where."""

from pathlib import Path

from karhunen.cli.screen import Screen, grid, rounded

NAMES = {"kl": "KL, nats", "agree": "top-1", "nll_delta": "ΔNLL", "score": "score"}


def run(a: str, b: str, results: Path, as_json: bool) -> None:
    """Each of A and B is a folder or file of results, or a recipe among those in `results`."""
    from karhunen.evaluation.results.compare import compare, select
    from karhunen.evaluation.results.result import read_results

    with Screen(as_json).open() as screen:
        mine, other = (
            read_results(Path(name)) if Path(name).exists() else select(read_results(_folder(results, name)), name)
            for name in (a, b)
        )
        found = compare(mine, other)
        columns = ("model", "task", "A", "bits", "B", "bits", "measure", "A", "B", "B − A", "95 %", "better")
        table = grid(*columns, right=(3, 5, 7, 8, 9, 10))
        for d in found:
            table.add_row(
                d.model,
                d.task,
                d.a,
                f"{d.a_bits:.3f}",
                d.b,
                f"{d.b_bits:.3f}",
                NAMES[d.measure],
                f"{d.a_mean:.4f}",
                f"{d.b_mean:.4f}",
                f"{d.difference.mean:+.4f}",
                f"{d.difference.low:+.4f} to {d.difference.high:+.4f}",
                {"A": d.a, "B": d.b}.get(d.winner, "no difference seen"),
            )
        screen.table(table)
        screen.document(rounded({"differences": [d.to_dict() for d in found]}))


def _folder(results: Path, name: str) -> Path:
    """Where the results of a recipe are; ValueError on what is a path, and there is none."""
    if Path(name).parent != Path() or Path(name).suffix == ".json":
        raise ValueError(f"no such folder or file of results: {name}; give two that exist, or names of recipes")
    if not results.is_dir():
        raise ValueError(f"no such folder: {results}; give --results, or two folders of results")
    return results
