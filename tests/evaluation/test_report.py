"""One page, whether there is one result or five hundred; it asks nothing of a network."""

import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from karhunen import recipes
from karhunen.evaluation.results import plots
from karhunen.evaluation.results.compare import compare, select
from karhunen.evaluation.results.page import chart_data
from karhunen.evaluation.results.report import BEGIN, END, grouped, update_between_markers, write_report
from karhunen.evaluation.results.result import Result
from karhunen.evaluation.results.rows import COLUMNS, bits_per_element, markdown, row_of, rows_of

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'karhunen[plots]'")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def made_up(recipe: str, bits: float, kl: float, seed: int = 0, model: str = "tiny") -> Result:
    """A result of 64 tokens whose every KL is `kl`."""
    n, n_coded = 1000, 900
    size = 100  # scalars per token
    account = {
        "codes": int(n_coded * size * bits / 8), "side": 0, "exact": (n - n_coded) * size * 4,
        "dense": n * size * 4, "coded_dense": n_coded * size * 4, "n_elements": n * size,
        "n_coded_elements": n_coded * size,
    }  # fmt: skip
    interval = {"mean": kl, "low": kl * 0.9, "high": kl * 1.1, "unit": "blocks of 32 tokens", "n_units": 2}
    values = {"kl": [kl] * 64, "agree": [1] * 63 + [0], "nll_delta": [kl / 2] * 64}
    return {
        "fingerprint": f"{seed:012x}",
        "configuration": {
            "model": model, "weights_hash": "w", "dtype": "float32", "inputs": "i", "seed": seed, "rate": 8,
            "recipe": recipe, "text": f"{recipe}:bits={bits}", "task": {"name": "texts", "prefill_tokens": 936},
        },
        "metrics": {
            "kl": {**interval, "p99": kl * 3}, "top1_agreement": {"mean": 63 / 64}, "nll_delta": {"mean": kl / 2},
            "perplexity_dense": 9.0, "perplexity_coded": 9.1, "n_tokens": 64,
        },
        "documents": [{"name": "prose <0>"}],
        "tokens": [values],
        "cache": {
            "bytes": {"codes": account["codes"], "scales_and_gains": 0, "exact_tokens": account["exact"],
                      "dense": account["dense"]},
            "coded_bits_per_element": bits, "bits_per_element": 0.0, "layers": [{"account": account}],
        },
        "layers": [{"layer": i, "attention_kl": kl, "output_error": kl / 3} for i in range(3)],
        "bits": [{"layer": i, "slot": s, "heads": [bits + i, bits - i]} for i in range(2) for s in ("key", "value")],
        "seconds": {"decode_prompt": 0.1},
        "made": {"commit": "0123456789", "machine": "a <machine>", "n_threads": 2, "versions": {"torch": "2"},
                 "date": "2030-01-01T00:00:00+00:00"},
    }  # fmt: skip


class Page(HTMLParser):
    """What a browser would meet: tags, addresses, rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("n", [1, 12])
def test_the_page_holds_every_result_and_asks_nothing_of_a_network(n: int, tmp_path: Path) -> None:
    names = recipes.names()
    results = [made_up(names[i % len(names)], 1 + i % 5, 0.01 * (1 + i), seed=i) for i in range(n)]
    written = write_report(results, tmp_path)
    page = Page((tmp_path / "index.html").read_text())
    assert all(address.startswith("data:") for address in page.addresses)
    assert page.tags.count("tr") == 1 + n + 2, "a table of results, and one of provenance"
    assert page.tags.count("img") == len([path for path in written if path.suffix == ".png"])
    assert all(path.stat().st_size > 0 for path in written)
    assert not re.search(r"https?://", re.sub(r"data:[^']*'", "", (tmp_path / "index.html").read_text()))


@pytest.mark.slow
def test_five_hundred_results_make_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    names = recipes.names()
    results = [made_up(names[i % len(names)], 1 + i % 7, 0.001 * (1 + i), seed=i) for i in range(500)]
    write_report(results, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert Page(page).tags.count("tr") == 1 + 500 + 2
    assert len(page) < 8_000_000


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    result = made_up("int4", 4, 0.1)
    result["configuration"]["text"] = "int4:</script><b>"
    write_report([result], tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "</script><b>" not in page
    assert "a &lt;machine&gt;" in page
    assert "<machine>" not in page


def test_the_picture_of_the_page_knows_every_row() -> None:
    result = made_up("karhunen", 2, 0.01)
    found = json.loads(chart_data([row_of(result)]))
    (point,) = found["rows"]
    assert (point["bits"], point["kl"], point["changed"]) == (2, 0.01, pytest.approx(1 / 64))
    assert point["id"] == result["fingerprint"]
    assert point["bars"] == {"kl": pytest.approx([0.009, 0.011])}
    assert "KL 0.0100 nats (0.0090 to 0.0110)" in point["says"]
    assert found["looks"]["karhunen"]["marker"] == "*"


def test_a_method_looks_the_same_everywhere_and_like_no_other() -> None:
    looks = {name: tuple(sorted(plots.style(name).items())) for name in recipes.names()}
    assert len(set(looks.values())) == len(looks)
    assert plots.style("a method of tomorrow") == plots.style("a method of tomorrow")


def test_a_picture_says_n_model_text_and_commit() -> None:
    said = plots.caption([made_up("int4", 4, 0.1), made_up("int2", 2, 0.3)])
    for words in ("n = 64 tokens", "tiny (float32)", "prose <0>", "0123456789"):
        assert words in said


def test_the_rate_is_that_of_coded_tokens_and_of_all_where_some_are_dropped() -> None:
    coded = made_up("int4", 4, 0.1)
    assert bits_per_element(coded) == 4
    nothing = made_up("full", 0, 0.0)
    account = nothing["cache"]["layers"][0]["account"]
    account.update(codes=0, exact=account["dense"], n_coded_elements=0)
    nothing["cache"]["bytes"].update(codes=0, exact_tokens=account["dense"])
    assert (bits_per_element(nothing), row_of(nothing).ratio_to_16_bits) == (16, 1)
    dropped = copy.deepcopy(nothing)
    dropped["cache"]["bytes"]["exact_tokens"] //= 4
    assert bits_per_element(dropped) == pytest.approx(4)


def test_a_table_says_both_intervals_and_small_divergences_with_two_digits() -> None:
    result = made_up("int4", 4, 0.1)
    result["metrics"] = {
        "kl": {"mean": 0.000348, "low": 0.00021, "high": 0.0012},
        "top1_agreement": {"mean": 0.9933, "low": 0.991, "high": 0.9954},
    }
    cells = dict(zip(COLUMNS, row_of(result).cells(), strict=True))
    assert (cells["KL, nats"], cells["KL 95 %"]) == ("0.00035", "0.00021 to 0.0012")
    assert (cells["top-1"], cells["top-1 95 %"]) == ("0.993", "0.991 to 0.995")


def test_bytes_are_those_of_all_documents() -> None:
    result = made_up("int4", 4, 0.1)
    first = bits_per_element(result)
    dtype_bits = 8 * result["cache"]["bytes"]["dense"] / result["cache"]["layers"][0]["account"]["n_elements"]
    result["documents"] = [{"coded_bits_per_element": 4.0}, {"coded_bits_per_element": 4.5}]
    assert bits_per_element(result) == pytest.approx(first + 0.25 * 16 / dtype_bits)


def test_an_interval_that_reaches_zero_is_drawn_to_the_end() -> None:
    row = row_of(made_up("int4", 4, 0.1))
    assert plots._bar(0.5, [(row, 0.5)], lambda _: (0.0, 0.75)) == (0.5, 0.25)
    assert plots._bar(0.5, [(row, 0.5)], lambda _: (None, None)) == (0.0, 0.0)


def test_markdown_goes_between_the_markers(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results = [made_up("int4", 4, 0.1)]
    update_between_markers(file, results)
    update_between_markers(file, results)
    assert file.read_text() == f"before\n{BEGIN}\n{markdown([row_of(results[0])])}\n{END}\nafter\n"
    assert "| `0123456789` |" in file.read_text()
    file.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        update_between_markers(file, results)


def test_compare_pairs_the_same_tokens() -> None:
    a, b = made_up("karhunen", 2, 0.1), made_up("int2", 2.5, 0.3)
    b["tokens"][0]["kl"] = [0.1 + 0.2 * (i % 2) for i in range(64)]
    found = {d.measure: d for d in compare([a], [b])}
    assert found["kl"].winner == "A"
    assert found["kl"].difference.mean == pytest.approx(0.1)
    assert found["agree"].winner == "", "equal on every token"
    assert {d.measure: d for d in compare([b], [a])}["kl"].winner == "B"
    with pytest.raises(ValueError, match="same model"):
        compare([a], [made_up("int2", 2, 0.1, seed=1)])
    assert select([a, b], "int2") == [b]
    with pytest.raises(ValueError, match="karhunen"):
        select([a, b], "nothing")


@pytest.mark.slow
def test_a_browser_opens_the_page_and_sorts_its_table(tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser on this machine; looked for {', '.join(BROWSERS)}")
    names = [name for name in recipes.names() if not name.startswith("int")][:12]
    others = [made_up(name, 2, 0.02 * (1 + i), seed=9 + i) for i, name in enumerate(names)]
    integers = [made_up("int4", 4, 0.1), made_up("int2", 2, 0.3, seed=1), made_up("int8", 8, 0.01, seed=2)]
    write_report([*integers, *others], tmp_path)
    page = tmp_path / "index.html"
    click = "<script>document.querySelectorAll('table.sortable th')[3].click()</script></body>"
    page.write_text(page.read_text().replace("</body>", click))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}"]
    done: Any = subprocess.run(
        [browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'aria-sort="ascending"' in done.stdout
    shown = re.findall(r"<td>(int\d):bits", done.stdout)
    assert shown == ["int8", "int4", "int2"], "least KL first"
    named = re.findall(r'<text [^>]*data-recipe="(\w+)"', done.stdout)
    assert sorted(named) == sorted(names[:10]), "ten at first, the least KL near two bits"
    assert done.stdout.count('type="checkbox"') == len(names) + 3, "and a choice of all"


def test_tokens_held_exact_beside_their_codes_count_with_both() -> None:
    """Nine of 900 coded tokens kept exact as well: 16 bits for one in a hundred."""
    result = made_up("karhunen", 2.0, 0.01)
    extra = 9 * 100 * 4
    result["cache"]["bytes"]["exact_tokens"] += extra
    result["cache"]["layers"][0]["account"]["exact"] += extra
    assert bits_per_element(result) == pytest.approx(2.0 + 16 * 9 / 900)


def test_results_of_different_documents_are_never_in_one_picture_or_under_one_name(tmp_path: Path) -> None:
    one, other = made_up("int4", 4, 0.1), made_up("int4", 4, 0.3, seed=1)
    other["configuration"]["inputs"] = "another text"
    assert [row.task for row in rows_of([one])] == ["texts"]
    assert [row.task for row in rows_of([one, other])] == ["texts #i", "texts #anothe"]
    assert [len(mine) for mine in grouped([one, other, one]).values()] == [1, 2]
    with pytest.raises(ValueError, match="nothing in A"):
        compare([one], [other])
    third = made_up("int2", 2, 0.5)
    write_report(
        [one, third, other, third | {"configuration": third["configuration"] | {"inputs": "another text"}}], tmp_path
    )
    assert len(list(tmp_path.glob("*-rate-distortion.png"))) == 2
