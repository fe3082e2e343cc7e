"""`karhunen report`: results become a page, pictures and a table."""

from pathlib import Path

from karhunen.cli.screen import Screen


def run(sources: tuple[Path, ...], output: Path, readme: Path | None, as_json: bool) -> None:
    """Read all results below the given folders and write their report to `output`."""
    with Screen(as_json).open() as screen:
        write(screen, sources, output, readme=readme)


def write(
    screen: Screen, sources: tuple[Path, ...], output: Path, *, readme: Path | None = None, document: bool = True
) -> None:
    """The work of the verb, for other verbs too; `document` prints the JSON document."""
    from karhunen.evaluation.results.report import update_between_markers, write_report
    from karhunen.evaluation.results.result import read_results

    if missing := [str(path) for path in sources if not path.exists()]:
        raise ValueError(f"no such folder: {', '.join(missing)}; make results with `karhunen evaluate`")
    results = [result for source in sources for result in read_results(source)]
    if readme is not None:
        update_between_markers(readme, results)
    written = write_report(results, output)
    screen.say(f"{output / 'index.html'}: {len(results)} results, {len(written) - 3} pictures")
    if document:
        screen.document({"results": len(results), "written": [str(path) for path in written]})
