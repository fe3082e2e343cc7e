"""docs/examples.md: every file of examples/ as it is, with what it prints.

    python benchmarks/examples_page.py                 # the code, and the output where it was kept
    python benchmarks/examples_page.py --run NAME      # also run examples/NAME.py on SmolLM2 and keep its output

Outputs are kept in the page itself, between the code and the next heading; a changed file loses its output.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from karhunen.evaluation.results.provenance import provenance

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "examples.md"
HEAD = """# Examples

Complete programs, each under 60 lines, in the folder `examples/`. Tests run all of them on a tiny model; an output
below a program is SmolLM2-135M's. `examples/first_steps.ipynb` is a notebook that runs on a CPU.

Made by `benchmarks/examples_page.py`.
"""
ARGUMENTS = {
    "calibrate_on_your_text": ["docs"],
    "chat_with_a_session": ["{folder}/chat"],
    "plot_a_bit_plan": ["{folder}/codec", "{folder}/plan.png"],
    "share_a_codec": ["{folder}/codec"],
}
TWICE, AFTER = ("chat_with_a_session",), {"plot_a_bit_plan": "share_a_codec"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    PAGE.write_text(page(kept()), "utf-8")
    for name in options.run:
        said = ran(name)
        PAGE.write_text(page({**kept(), name: (source(name), said)}), "utf-8")


def kept() -> dict[str, tuple[str, str]]:
    """Code and output of each example on the page as it is now."""
    return outputs(PAGE.read_text("utf-8") if PAGE.exists() else "")


def names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def source(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text("utf-8")


def page(found: dict[str, tuple[str, str]]) -> str:
    """Markdown; an output stands only below the code that printed it."""
    parts = [HEAD]
    for name in names():
        title = (ast.get_docstring(ast.parse(source(name))) or name).splitlines()[0]
        parts.append(
            f"\n## {title.partition(':')[0].rstrip('.')}\n\n`examples/{name}.py`\n\n```python\n{source(name)}```\n"
        )
        if name in found and found[name][0] == source(name):
            parts.append(f"\n{found[name][1].strip()}\n")
    return "".join(parts)


def outputs(text: str) -> dict[str, tuple[str, str]]:
    """Code and output of each example on a page."""
    found = re.findall(r"`examples/(\w+)\.py`\n\n```python\n(.*?)```\n(.*?)(?=\n## |\Z)", text, flags=re.DOTALL)
    return {name: (code, said) for name, code, said in found if said.strip()}


def ran(name: str) -> str:
    """The command, what it printed, and where from."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.format(folder=folder) for word in ARGUMENTS.get(name, [])]
        if name in AFTER:
            run(AFTER[name], [word.format(folder=folder) for word in ARGUMENTS[AFTER[name]]])
        said = [run(name, words) for _ in range(2 if name in TWICE else 1)]
    shown = " ".join(word.replace("{folder}/", "") for word in ARGUMENTS.get(name, []))
    command = f"$ python examples/{name}.py {shown}".rstrip()
    text = "\n".join(f"{command}\n{one.replace(folder + '/', '').rstrip()}" for one in said)
    return f"```text\n{text}\n```\n\nCommit {provenance().commit}."


def run(name: str, words: list[str]) -> str:
    """What it printed; the error if it failed."""
    command = [sys.executable, "-W", "ignore", f"examples/{name}.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
