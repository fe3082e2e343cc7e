"""A stream of texts that change their kind, coded by a fixed codec, an adapted one, and one fitted for each kind.

    prose ─▶ code ─▶ novel ─▶ chat          documents one after the other, each a cache of its own
       fixed     the codec of the built-in text
       adapted   fitted anew before a document where the drift is above the threshold: axes, plan, codebooks
       fresh     calibrated on other text of the kind, gradients too: what there is to win
    and prose ─▶ prose ─▶ prose ─▶ prose    where adapting must do no harm

KL of the scored tokens of every document, and the drift before it. Test documents, and a chat that the model wrote;
what the fresh codecs are calibrated on are development documents.
What is done is kept in --work, and is not done again.

    python benchmarks/streams.py --statistics my-codec/statistics --work /tmp/streams --plot docs/streams.png
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from karhunen import fit, make
from karhunen.adaptation.adapter import THRESHOLD, Adapter
from karhunen.adaptation.forgetting import CALIBRATION_TOKENS, HALF_LIFE_TOKENS, Forgetting
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.own_samples import own_samples
from karhunen.evaluation.documents import default_documents
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.score import DenseRun, Document, run_dense, score
from karhunen.hf.embedded import load
from karhunen.statistics.artifact import load_statistics

STREAMS = {"changing": ("prose", "code", "literature", "chat"), "stationary": ("prose",) * 4}
WAYS = ("fixed", "adapted", "fresh")
LOOKS = {"fixed": ("#8a8a8a", "o"), "adapted": ("#0b6fb8", "s"), "fresh": ("#2a9d3a", "^")}


def main() -> None:
    """Score what is missing, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", default="karhunen:bits=2")
    parser.add_argument("--statistics", type=Path, required=True, help="of the built-in text")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--stream", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--split", default="test", choices=("development", "test"))
    parser.add_argument("--each", type=int, default=2, help="documents of a kind, one after the other")
    parser.add_argument("--prefill-tokens", type=int, default=1536)
    parser.add_argument("--scored-tokens", type=int, default=256)
    parser.add_argument("--half-life", type=int, default=HALF_LIFE_TOKENS)
    parser.add_argument(
        "--calibration-tokens", type=int, default=CALIBRATION_TOKENS, help="as many calibration counts for, always"
    )
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    parser.add_argument("--fresh-tokens", type=int, default=4096, help="of each kind; 0: no fresh codec")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    run = Run(parser.parse_args())
    for stream in run.given.stream:
        run.stream(stream)
    print(table(run.rows))
    if run.given.json:
        settings = {name: str(value) for name, value in vars(run.given).items()}
        run.given.json.write_text(
            json.dumps({"made": asdict(provenance()), "settings": settings, "rows": run.rows}, indent=1)
        )
    if run.given.plot:
        figure(run.rows).savefig(run.given.plot, dpi=110)


class Run:
    """One call, and what earlier ones found."""

    def __init__(self, given: Any) -> None:
        self.given, self.start = given, time.monotonic()
        given.work.mkdir(parents=True, exist_ok=True)
        self.file = given.work / f"rows-{given.split}.json"
        self.rows: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []
        self.model, self.tokenizer = load(given.model)
        self.recipe = make(given.recipe)
        self.known = load_statistics(given.statistics)
        self.codecs: dict[str, Any] = {}

    def stream(self, name: str) -> None:
        """Document by document. Drift and epochs depend on all that came before, so that is streamed again."""
        done = {row["at"]: row for row in self.rows if row["stream"] == name}
        adapter = Adapter(
            self.recipe,
            self.known,
            forgetting=Forgetting(self.given.half_life, self.given.calibration_tokens),
            threshold=self.given.threshold,
        )
        self.codecs["fixed"] = self.codecs.get("fixed", adapter.codec)
        for at, (kind, document) in enumerate(self.documents(name)):
            if time.monotonic() - self.start > 60 * self.given.minutes:
                sys.exit("time is up; call it again to go on")
            drift = adapter.total_drift()
            adapter.adapt()
            dense = run_dense(self.model, document)
            if at not in done:
                codecs = {"fixed": self.codecs["fixed"], "adapted": adapter.codec}
                if self.given.fresh_tokens and name == "changing":
                    codecs["fresh"] = self.fresh(kind)
                kl = {way: float(score(self.model, codec, dense).kl.mean()) for way, codec in codecs.items()}
                row = {"stream": name, "at": at, "kind": kind, "document": document.name, "drift": drift}
                self.keep({**row, "epoch": adapter.epoch, "kl": kl})
            self.learn(adapter, dense)

    def documents(self, name: str) -> list[tuple[str, Document]]:
        """Of development, as many of each kind as were asked for, each once."""
        kinds, each = STREAMS[name], self.given.each
        sizes = {"prefill_tokens": self.given.prefill_tokens, "scored_tokens": self.given.scored_tokens}
        counts = {kind: each * kinds.count(kind) for kind in ("prose", "code", "literature")}
        named = {f"n_{kind}": n for kind, n in counts.items()}
        found = iter(default_documents(self.tokenizer, self.given.split, seed=1, **named, **sizes))
        made: list[tuple[str, Document]] = []
        for kind in kinds:
            made += self.chats() if kind == "chat" else [(kind, next(found)) for _ in range(each)]
        return made

    def chats(self) -> list[tuple[str, Document]]:
        """What the model says, several samples to a document."""
        n = self.given.prefill_tokens + self.given.scored_tokens
        pieces = own_samples(self.model, self.tokenizer, n * self.given.each, seed=1, folder=self.given.work)
        tokens = torch.cat(pieces)
        parts = [tokens[i * n : (i + 1) * n] for i in range(self.given.each)]
        return [("chat", Document(f"chat {i}", part, self.given.prefill_tokens)) for i, part in enumerate(parts)]

    def fresh(self, kind: str) -> Any:
        """A codec of the kind's own text: other documents than those of the stream."""
        if kind not in self.codecs:
            n = self.given.fresh_tokens
            if kind == "chat":
                pieces = own_samples(self.model, self.tokenizer, n, seed=2, folder=self.given.work)
            else:
                counts = {f"n_{other}": (2 + self.given.each if other == kind else 0) for other in
                          ("prose", "code", "literature")}  # fmt: skip
                texts = default_documents(
                    self.tokenizer, "development", seed=2, **counts, prefill_tokens=n // 2 - 1, scored_tokens=1
                )
                pieces = [text.tokens for text in texts[-2:]]
            self.codecs[kind] = fit(self.recipe, calibrate(self.model, pieces, self.recipe.needs(), self.tokenizer))
        return self.codecs[kind]

    def learn(self, adapter: Adapter, dense: DenseRun) -> None:
        """What a watched cache of this document would hand on: all but the first and newest tokens."""
        window = self.recipe.window
        for layer in adapter.codec.layers:
            held = dense.cache.layers[layer]
            part = slice(window.sink_tokens, held.keys.shape[2] - window.recent_tokens)
            where = torch.arange(held.keys.shape[2])[None, part]
            adapter.add(layer, held.keys[:, :, part], held.values[:, :, part], where)

    def keep(self, row: dict[str, Any]) -> None:
        """Written down at once."""
        print(row, flush=True)
        self.rows.append(row)
        self.file.write_text(json.dumps(self.rows, indent=1))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| stream | document | drift before it | epoch | " + " | ".join(WAYS) + " |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        kl = " | ".join(f"{row['kl'][way]:.4f}" if way in row["kl"] else "" for way in WAYS)
        lines.append(f"| {row['stream']} | {row['document']} | {row['drift']:.2f} | {row['epoch']} | {kl} |")
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]]) -> Figure:
    """KL document by document, drift below it."""
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    made = Figure(figsize=(5.2 * len(streams), 5.2), layout="constrained")
    grid = made.subplots(2, len(streams), squeeze=False, height_ratios=(3, 1), sharex="col")
    for column, stream in enumerate(streams):
        mine = [row for row in rows if row["stream"] == stream]
        above, below = grid[0][column], grid[1][column]
        for way in WAYS:
            points = [(row["at"], row["kl"][way]) for row in mine if way in row["kl"]]
            colour, marker = LOOKS[way]
            if points:
                above.plot(*zip(*points, strict=True), color=colour, marker=marker, lw=1.4, ms=5, label=way)
        below.plot([row["at"] for row in mine], [row["drift"] for row in mine], color="#333333", marker=".", lw=1.2)
        above.set_ylim(bottom=0)
        above.set_title(f"a {stream} stream", fontsize=9)
        below.set_xticks([row["at"] for row in mine], [row["kind"] for row in mine], rotation=40, fontsize=7)
        for axes in (above, below):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("KL, nats")
    grid[1][0].set_ylabel("drift")
    grid[0][0].legend(frameon=False, fontsize=8)
    return made


if __name__ == "__main__":
    main()
