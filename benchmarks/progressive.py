"""Tokens of different rates against one rate: KL near and far, facts nobody asked about, a cache that shrinks.

    near      the 256 tokens after the prompt          far       256 tokens that come 768 later
    later     256 tokens that come 2,000 later (--scored 2304)
    needle    numbers planted in a prompt of 2,560 tokens and asked only at the end: log-probability of their digits
    topic     the prompt, 512 tokens of a document of another kind, then 256 with which the prompt goes on
    turns     a prompt that ends with a question about its end; its answer, 256 tokens, then questions about its start
    shrink    one greedy text, during which refinements are given back, half of them and then all
    step      a step with all refinements, at the base, and at one rate, in turn, one thread

Each measurement of a recipe on a document is a JSON in `--results`; what is there is not run again, so runs may be cut.

`mixed:share=0.4` as a recipe is ZipCache's mixed precision (mixed_precision.py).

    python benchmarks/progressive.py --split test --json results/measured/progressive.json --plot docs/progressive.png
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import mixed_precision
import torch
from matplotlib.figure import Figure
from mixed_precision import MixedCache
from torch import Tensor

from karhunen.allocation.water_filling import WaterFilling
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.texts import calibration_text
from karhunen.codec import Codec, SideCodec
from karhunen.evaluation.documents import Split, default_documents, encode
from karhunen.evaluation.results.plots import COLOURS, MARKERS
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.score import PAGE_TOKENS, DenseRun, Document, compared_with
from karhunen.fitting import fit
from karhunen.hf.attention import reading_bytes
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.capture import Attention
from karhunen.hf.embedded import load
from karhunen.hf.probe import cache_argument, inference
from karhunen.hf.queries import showing
from karhunen.packing.bit_fields import BitFields
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.quantizers.embedded import Embedded, EmbeddedQuantizer
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics, save_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.store.layer_store import LayerStore
from karhunen.store.report import Report
from karhunen.windows.base import Window
from karhunen.windows.refining import Refining
from karhunen.windows.score import Queries

PROMPT, NEAR, FAR, SCORED = 2560, slice(0, 256), slice(768, 1024), 1024
LATER = slice(2000, 2256)
AWAY, BACK = 512, 256  # tokens of another document, and of the prompt's own after them
BETWEEN, STARTS = 256, 3  # tokens between two turns; facts of the prompt's start that the second asks for
RECIPES = (
    "karhunen:bits=1", "karhunen:bits=1.25", "karhunen:bits=1.5", "karhunen:bits=2", "karhunen:bits=3",
    "karhunen:progressive=true,bits=1.25", "karhunen:progressive=true,bits=1.5", "karhunen:progressive=true,bits=2",
    "karhunen:progressive=true,bits=1.5 by keys", "karhunen:progressive=true,bits=2,layers=1", "snapkv_int4:kept=840",
)  # fmt: skip
FAMILIES = {
    "one rate": "karhunen:bits=",
    "progressive": "karhunen:progressive=true,bits=",
    "SnapKV + int4": "snapkv_int4",
}
BY_KEYS = " by keys"  # classes from the keys alone
QUERIES = Need("queries", "key", skip_tokens=4)
OBSERVED = 128  # queries of a prompt that are looked at
EMBEDDED = ",layers=1"  # at bits=2 every token has the one layer: an embedded code at one rate
PLACES = ("Lisbon", "Oslo", "Turin", "Quito", "Hanoi", "Dakar", "Leeds", "Perth", "Kyoto", "Malmo")
N_LAYERS = 3
STEPS = 48  # tokens generated at each stage of shrinking
STEPPED = {
    "all refinements": "",
    "base": "",
    "one rate": "karhunen:bits=1",
}  # stages of a timed step, and their recipes


def main() -> None:
    """Measure what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES))
    parser.add_argument("--split", choices=("development", "test"), default="test")
    parser.add_argument("--documents", type=int, nargs=3, default=[1, 1, 1], metavar=("PROSE", "CODE", "LITERATURE"))
    parser.add_argument(
        "--measure",
        nargs="+",
        default=["kl", "needle", "shrink"],
        choices=("fit", "kl", "needle", "topic", "turns", "shrink", "step"),
    )
    parser.add_argument("--statistics", type=Path, default=Path("results/progressive/statistics"))
    parser.add_argument("--results", type=Path, default=Path("results/progressive"))
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    parser.add_argument("--scored", type=int, default=SCORED, help="tokens after the prompt; below 1,024 none is far")
    parser.add_argument("--quick", action="store_true", help="short training of all tables: to look, not to publish")
    parser.add_argument("--every", type=int, default=1, help="code every so many layers only: to look, not to publish")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    run = _Run(
        given.model, given.split, given.results, given.statistics, given.prompt, given.scored, given.quick, given.every
    )
    run.measure(given.recipe, given.documents, given.measure)
    rows = run.rows(given.recipe)
    print(f"\n{table(rows)}\n")
    shrunk = run.found("shrink")
    print(shrink_table(shrunk))
    if steps := run.found("step"):
        print(f"\n{step_table(steps)}")
    document = {
        "made": asdict(provenance()),
        "model": given.model,
        "split": given.split,
        "quick": given.quick,
        "every": given.every,
        "rows": rows,
        "shrink": shrunk,
        "step": steps,
    }
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.plot:
        figure_of(document).savefig(given.plot, dpi=150)


class _Run:
    """Measurements of one model on one split."""

    def __init__(
        self,
        model_name: str,
        split: Split,
        results: Path,
        statistics_at: Path,
        n_prompt: int,
        n_scored: int,
        quick: bool,
        every: int,
    ) -> None:
        self.model_name, self.split, self.statistics_at = model_name, split, statistics_at
        self.n_prompt, self.n_scored, self.quick, self.every = n_prompt, n_scored, quick, every
        self.results = results / f"quick {every}" if quick or every > 1 else results

    def measure(self, recipes: Sequence[str], counts: Sequence[int], kinds: Sequence[str]) -> None:
        """Document by document: the dense run of each is needed by all recipes."""
        if "fit" in kinds:
            for recipe in recipes:
                _ = self.mixed(recipe) if recipe.startswith(mixed_precision.NAME) else self.codec(recipe)
        model, tokenizer = self.loaded
        sizes = dict(zip(("n_prose", "n_code", "n_literature"), counts, strict=True))
        found = default_documents(
            tokenizer, self.split, **sizes, prefill_tokens=self.n_prompt, scored_tokens=self.n_scored
        )
        self.documents = found
        if "topic" in kinds and len({document.name.split()[0] for document in found}) < 2:
            raise SystemExit(
                f"--measure topic changes between kinds of text; --documents {list(counts)} is one; ask for two"
            )
        every = {
            "kl": self.kl, "needle": self.needle, "topic": self.topic, "turns": self.turns, "shrink": self.shrink,
            "step": self.step,
        }  # fmt: skip
        for document in found:
            for kind, one in every.items():
                alone = kind in ("shrink", "step")
                wanted = recipes if not alone else [r for r in recipes if "progressive" in r][:1]
                missing = [r for r in wanted if not self.at(kind, document.name, r).is_file()]
                if kind in kinds and missing and (not alone or document is found[0]):
                    print(f"{document.name}: {kind} of {len(missing)} recipes", flush=True)
                    with inference(model):
                        one(document, missing)

    def kl(self, document: Document, recipes: Sequence[str]) -> None:
        """Near and far."""
        model, _ = self.loaded
        prompt = self.prompted(document.tokens[: self.n_prompt])
        dense = DenseRun(document, None, self.after(prompt, document), 0.0)
        for recipe in recipes:
            made = self.read(recipe, prompt)
            kl, agree, _, _ = compared_with(model, dense, made)
            far = float(kl[FAR].mean()) if len(kl) >= FAR.stop else None
            later = float(kl[LATER].mean()) if len(kl) >= LATER.stop else None
            self.keep(
                "kl", document.name, recipe, near=float(kl[NEAR].mean()), far=far, later=later,
                top1=float(agree[NEAR].float().mean()), bits=bits_of(made),
            )  # fmt: skip
            made.close()

    def needle(self, document: Document, recipes: Sequence[str]) -> None:
        """Facts between the document's paragraphs, asked one by one after 128 more tokens of it."""
        model, tokenizer = self.loaded
        tokens, asked = planted(tokenizer, document, self.n_prompt)
        prompt = self.prompted(tokens)
        for recipe in ("dense", *recipes):
            made = prompt.cache if recipe == "dense" else self.read(recipe, prompt)
            found = [_asked(model, made, question, digits) for question, digits in asked]
            self.keep(
                "needle", document.name, recipe, log_probability=[f[0] for f in found], right=[f[1] for f in found],
                bits=16.0 if recipe == "dense" else bits_of(made),
            )  # fmt: skip

    def shrink(self, document: Document, recipes: Sequence[str]) -> None:
        """Text and bytes before, while half of the refinements have gone, and at the base; read from bytes."""
        model, tokenizer = self.loaded
        for recipe in recipes:
            with reading_bytes(model):
                cache = CompressedCache(model, self.codec(recipe))
                token = logits(model, document.tokens[: self.n_prompt], cache)[-1].argmax()
                before = cache.report().total.refinements
                stages: list[dict[str, Any]] = []
                for stage, n_bytes in (("all refinements", 0), ("half given back", before // 2), ("base", 1 << 40)):
                    freed = cache.shrink(n_bytes)
                    said, seconds = [], list[float]()
                    for _ in range(STEPS):
                        said.append(int(token))
                        start = time.perf_counter()
                        token = logits(model, token[None], cache)[-1].argmax()
                        seconds.append(time.perf_counter() - start)
                    stages.append({
                        "stage": stage, "given_back": freed, "refinements": cache.report().total.refinements,
                        "held": cache.report().total.held, "bits": mean_bits(cache.report()),
                        "ms": 1e3 * statistics.median(seconds), "text": tokenizer.decode(said),
                    })  # fmt: skip
                self.keep("shrink", document.name, recipe, stages=stages)

    def topic(self, document: Document, recipes: Sequence[str]) -> None:
        """Another subject after the prompt, and back."""
        model, _ = self.loaded
        place = next(i for i, each in enumerate(self.documents) if each is document)
        other = self.documents[(place + 1) % len(self.documents)]
        prompt = self.prompted(document.tokens[: self.n_prompt])
        scored = torch.cat([other.tokens[:AWAY], document.scored[:BACK]])
        changed = Document(document.name, torch.cat([document.tokens[: self.n_prompt], scored]), self.n_prompt)
        dense = DenseRun(changed, None, self.after(prompt, changed), 0.0)
        for recipe in recipes:
            made = self.read(recipe, prompt)
            kl, _, _, _ = compared_with(model, dense, made)
            self.keep(
                "topic", document.name, recipe, other=other.name, away=float(kl[:AWAY].mean()),
                back=float(kl[AWAY:].mean()), bits=bits_of(made),
            )  # fmt: skip
            made.close()

    def turns(self, document: Document, recipes: Sequence[str]) -> None:
        """Two questions: the first decides classes, the second is about what it did not look at."""
        model, tokenizer = self.loaded
        tokens, asked = planted(tokenizer, document, self.n_prompt)
        question, digits = asked[-1]
        prompt = self.prompted(torch.cat([tokens, question[:-1]]))
        for recipe in ("dense", *recipes):
            made = deepcopy(prompt.cache) if recipe == "dense" else self.read(recipe, prompt)
            answer = logits(model, torch.cat([question[-1:], digits[:-1]]), made).float().log_softmax(-1)
            logits(model, torch.cat([digits[-1:], document.scored[:BETWEEN]]), made)
            found = [_asked(model, made, *each) for each in asked[:STARTS]]
            self.keep(
                "turns", document.name, recipe, first=float(answer.gather(1, digits[:, None]).mean()),
                second=[f[0] for f in found], right=[f[1] for f in found],
                bits=16.0 if recipe == "dense" else bits_of(made),
            )  # fmt: skip
            if recipe != "dense":
                made.close()

    def step(self, document: Document, recipes: Sequence[str]) -> None:
        """Milliseconds of a step, read from bytes: by the clock, and of the processor, which other work moves less."""
        model, _ = self.loaded
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for recipe in recipes:
            with reading_bytes(model):
                caches = {name: CompressedCache(model, self.codec(named or recipe)) for name, named in STEPPED.items()}
                for name, cache_ in caches.items():
                    logits(model, document.tokens[: self.n_prompt], cache_)
                    if name == "base":
                        cache_.shrink(1 << 40)
                taken: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
                for i in range(STEPS):
                    for name, cache_ in caches.items():
                        start, ran = time.perf_counter(), time.process_time()
                        logits(model, document.scored[i : i + 1], cache_)
                        taken[name].append((time.perf_counter() - start, time.process_time() - ran))
            rows = [
                {
                    "stage": name, "refinements": cache_.report().total.refinements, "bits": mean_bits(cache_.report()),
                    **dict(zip(("ms", "cpu_ms"), (1e3 * statistics.median(x) for x in zip(*taken[name], strict=True)),
                               strict=True)),
                }
                for name, cache_ in caches.items()
            ]  # fmt: skip
            self.keep("step", document.name, recipe, stages=rows, processor=provenance().machine)
        torch.set_num_threads(n_threads)

    def read(self, recipe: str, prompt: "Prompted") -> "CompressedCache | MixedCache":
        """A cache that has read the prompt, as if the model had done so with it."""
        model, _ = self.loaded
        if recipe.startswith(mixed_precision.NAME):
            share = mixed_precision.options(recipe)["share"]
            return mixed_precision.filled(model, self.mixed(recipe), share, deepcopy(prompt.cache), prompt.queries)
        text, by_keys, _ = recipe.partition(BY_KEYS)
        made = CompressedCache(model, self.codec(text), keep_decoded=True)
        layers: list[Any] = made.layers
        for index, layer in enumerate(layers):
            if index not in made.codec.windowed:
                layers[index] = deepcopy(prompt.cache.layers[index])
                continue
            if by_keys:
                observed: Any = FromKeys(layer.store, self.statistics.layers[index].get(QUERIES, Moments))
                layer.store.observed = observed
            held = prompt.cache.layers[index]
            layer.store.append(held.keys, held.values, queries=prompt.queries[index])
        return made

    def prompted(self, tokens: Tensor) -> "Prompted":
        """One forward, the first time."""
        at = self.results / "prompts" / f"{self._named(tokens)}.pt"
        if not at.is_file():
            model, _ = self.loaded
            _save(at, prompted(model, tokens))
        return torch.load(at, weights_only=False)

    def after(self, prompt: "Prompted", document: Document) -> Tensor:
        """What the dense model makes of the scored tokens, page by page."""
        at = self.results / "prompts" / f"{self._named(document.tokens)} after.pt"
        if not at.is_file():
            model, _ = self.loaded
            cache_, parts = deepcopy(prompt.cache), document.scored.split(PAGE_TOKENS)
            _save(at, torch.cat([logits(model, part, cache_) for part in parts]))
        return torch.load(at, weights_only=True)

    def _named(self, tokens: Tensor) -> str:
        return sha256(f"{self.model_name} {tokens.tolist()}".encode()).hexdigest()[:16]

    def codec(self, recipe: str) -> Codec:
        """Fitted once for all runs. Progressive codecs of one base are prefixes of one code with another window."""
        made = make(recipe)
        whole = short(widest(made)) if self.quick else widest(made)
        name = f"{self.model_name} {whole.fingerprint()}"
        at = self.results / "codecs" / sha256(name.encode()).hexdigest()[:16]
        if not (at / "config.json").is_file():
            print(f"fitting {recipe}", flush=True)
            made_of = thinned(self.statistics, self.every)
            replace(fit(whole, made_of), model=self.statistics.model).save_pretrained(at)
        return cut(Codec.from_pretrained(at), made.window)

    def mixed(self, recipe: str) -> tuple[Codec, Codec]:
        """Narrow and wide integers, which take no training."""
        group = int(mixed_precision.options(recipe)["group"])
        found = mixed_precision.codecs(thinned(self.statistics, self.every), group)
        low, high = (replace(codec, model=self.statistics.model) for codec in found)
        return low, high

    @cached_property
    def statistics(self) -> Any:
        """Measured once, of what all recipes need."""
        if not (self.statistics_at / "config.json").is_file():
            model, tokenizer = self.loaded
            needs = {need for recipe in RECIPES if BY_KEYS not in recipe for need in make(recipe).needs()}
            needs |= {QUERIES}
            save_statistics(calibrate(model, calibration_text(), needs, tokenizer), self.statistics_at)
        return load_statistics(self.statistics_at)

    @property
    def loaded(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        return _loaded(self.model_name)

    def at(self, kind: str, document: str, recipe: str) -> Path:
        """Where a measurement lies."""
        name = f"{self.model_name} {self.split} {document} {self.n_prompt} {self.n_scored} {recipe}"
        return self.results / kind / f"{sha256(name.encode()).hexdigest()[:16]}.json"

    def keep(self, kind: str, document: str, recipe: str, **measured: Any) -> None:
        """Write a measurement."""
        at = self.at(kind, document, recipe)
        at.parent.mkdir(parents=True, exist_ok=True)
        body = {"model": self.model_name, "split": self.split, "document": document, "recipe": recipe, **measured}
        at.write_text(json.dumps({**body, "made": asdict(provenance())}, indent=1) + "\n")
        print({k: v for k, v in body.items() if k not in ("model", "split", "document", "stages")}, flush=True)

    def found(self, kind: str) -> list[dict[str, Any]]:
        """All measurements of a kind on this split."""
        every = [json.loads(path.read_text()) for path in sorted((self.results / kind).glob("*.json"))]
        return [m for m in every if (m["model"], m["split"]) == (self.model_name, self.split)]

    def rows(self, recipes: Sequence[str]) -> list[dict[str, Any]]:
        """One for each recipe, means over documents; documents that not all recipes have are left out, and said."""
        kl, needle, topic, turns = (self.found(kind) for kind in ("kl", "needle", "topic", "turns"))
        rows: list[dict[str, Any]] = []
        for recipe in ("dense", *recipes):
            mine = [m for m in kl if m["recipe"] == recipe]
            asked = [m for m in needle if m["recipe"] == recipe]
            each = [x for m in asked for x in m["log_probability"]]
            changed = [m for m in topic if m["recipe"] == recipe]
            told = [m for m in turns if m["recipe"] == recipe]
            second = [x for m in told for x in m["second"]]
            if not any((mine, asked, changed, told)):
                continue
            rows.append({
                "recipe": recipe,
                "bits": statistics.mean(m["bits"] for m in mine or asked or changed or told),
                "documents": sorted(m["document"] for m in mine),
                **{k: mean_of([m[k] for m in mine if m.get(k) is not None]) for k in ("near", "far", "later", "top1")},
                **{k: mean_of([m[k] for m in changed]) for k in ("away", "back")},
                "first": mean_of([m["first"] for m in told]),
                "second": mean_of(second),
                "n_second": len(second),
                "second_right": sum(x for m in told for x in m["right"]) if told else None,
                "by_document": {m["document"]: [m["near"], m["far"]] for m in mine},
                "n_needles": len(each),
                "needle": mean_of(each),
                "right": sum(x for m in asked for x in m["right"]) if asked else None,
            })  # fmt: skip
        return rows


def widest(recipe: Recipe) -> Recipe:
    """With all layers, whatever a token has of them on average."""
    window = recipe.window
    if not isinstance(window, Refining) or recipe.key is None or recipe.value is None:
        return recipe
    layer = WaterFilling(window.layer_bits, "model")
    key, value = (
        replace(side, quantizer=replace(cast("Embedded", side.quantizer), layers=(layer,) * N_LAYERS))
        for side in (recipe.key, recipe.value)
    )
    return replace(recipe, key=key, value=value, window=replace(window, n_layers=N_LAYERS, mean_layers=1.0))


def thinned(found: Statistics, every: int) -> Statistics:
    """As if a model's other layers could not be coded."""
    other = LayerShape("other", 0, 0, 0, 0, note=f"one layer of {every} is coded")
    layers = tuple(shape if i % every == 0 else other for i, shape in enumerate(found.model.layers))
    return replace(found, model=replace(found.model, layers=layers))


def short(recipe: Recipe) -> Recipe:
    """The same with short training of byte codes."""

    def shorter(side: Side | None) -> Side | None:
        if side is None:
            return None
        inner = side.quantizer.inner if isinstance(side.quantizer, Embedded) else side.quantizer
        if not isinstance(inner, ByteVQ):
            return side
        quick = replace(inner, n_iterations=3, max_samples=4096)
        whole = replace(side.quantizer, inner=quick) if isinstance(side.quantizer, Embedded) else quick
        return replace(side, quantizer=whole)

    return replace(recipe, key=shorter(recipe.key), value=shorter(recipe.value))


def cut(codec: Codec, window: Window) -> Codec:
    """With another window, and no more layers than it gives."""
    if not isinstance(window, Refining):
        return replace(codec, window=window)

    def less(side: SideCodec) -> SideCodec:
        whole = cast("EmbeddedQuantizer", side.quantizer)
        quantizer = replace(whole, parts=whole.parts[: 1 + window.n_layers])
        return replace(side, quantizer=quantizer, layout=BitFields(quantizer.widths))

    layers = {i: replace(layer, key=less(layer.key), value=less(layer.value)) for i, layer in codec.layers.items()}
    return replace(codec, window=window, layers=layers)


@dataclass(frozen=True)
class Prompted:
    """A prompt that the dense model has read: its cache, and the last queries of each layer."""

    cache: Any
    queries: dict[int, Queries]


def prompted(model: Any, tokens: Tensor) -> Prompted:
    """One forward."""
    found: dict[int, Queries] = {}

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        rows = attention.query[:, :, -OBSERVED:].clone()
        index = int(cast("Any", attention.module).layer_idx)
        found[index] = Queries(rows, attention.scale, attention.softcap, attention.sinks)
        return plain()

    cache_ = dense_cache(model)
    with showing(model, attend):
        logits(model, tokens, cache_)
    return Prompted(cache_, found)


class FromKeys:
    """In place of what queries have paid: what queries as calibration saw them would pay, by the key alone.

    E exp(2 qᵀk) = exp(2 μᵀk + 2 kᵀΣk),  q Gaussian, a head's group alike;  the mean over KV heads
    """

    def __init__(self, store: LayerStore, queries: Moments) -> None:
        self.store, self.mean_query = store, queries.mean
        self.covariance = queries.covariance

    def mean(self, n: int) -> Tensor:
        """Of the first `n` exact tokens, up to a factor."""
        key = self.store.exact("key")[1][:, :, :n].double()
        linear = torch.einsum("bhtd,hd->bht", key, self.mean_query)
        power = 2 * linear + 2 * torch.einsum("bhtd,hde,bhte->bht", key, self.covariance, key)
        total = power.logsumexp(1)
        return (total - total.amax(1, keepdim=True)).exp()

    def tensors(self) -> dict[str, Tensor]:
        """Nothing is kept."""
        return {}

    def _nothing(self, *_: Any) -> None:
        """Queries are not looked at."""

    extend = see_all = see_exact = forget = keep = select = _nothing


@cache
def _loaded(name: str) -> tuple[Any, Any]:
    return load(name)


def logits(model: Any, tokens: Tensor, cache_: Any) -> Tensor:
    """Of the tokens given, which read `cache_`; a prompt's last alone."""
    keep = 1 if len(tokens) > 1024 else 0
    return model(input_ids=tokens[None], **{cache_argument(model): cache_}, use_cache=True, logits_to_keep=keep).logits[
        0
    ]


def _save(at: Path, made: Any) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made, at)


def planted(tokenizer: Any, document: Document, n_prompt: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The prompt with a fact for each place, and question and digits of each."""
    filler, n = document.tokens.tolist(), len(PLACES)
    generator = torch.Generator().manual_seed(0)
    numbers = [str(int(torch.randint(10**6, 10**7, (1,), generator=generator))) for _ in PLACES]
    said = [f" The access code of the office in {place} is" for place in PLACES]
    facts = [encode(tokenizer, f"{s} {number}.") for s, number in zip(said, numbers, strict=True)]
    step = (n_prompt - sum(map(len, facts)) - 256) // n  # the last 256 tokens hold no fact
    ids: list[int] = []
    for i, fact in enumerate(facts):
        ids += filler[i * step : (i + 1) * step] + fact
    ids += filler[n * step : n * step + n_prompt - len(ids)]
    asked = [
        (torch.tensor(encode(tokenizer, f"\n\n{s[1:]} ")), torch.tensor(encode(tokenizer, number)))
        for s, number in zip(said, numbers, strict=True)
    ]
    return torch.tensor(ids), asked


def _asked(model: Any, held: Any, question: Tensor, digits: Tensor) -> tuple[float, bool]:
    """Mean log-probability of the digits after the question, then forgotten; whether each leads."""
    tokens = torch.cat([question, digits[:-1]])
    found = logits(model, tokens, held)[len(question) - 1 :].float().log_softmax(-1)
    held.crop(-len(tokens))
    at = found.gather(1, digits[:, None])
    return float(at.mean()), bool((found.argmax(1) == digits).all())


def mean_of(numbers: Sequence[float]) -> float | None:
    """None of none."""
    return statistics.mean(numbers) if numbers else None


def bits_of(held: "CompressedCache | MixedCache") -> float:
    """`mean_bits` of a cache, of either kind."""
    return held.bits if isinstance(held, MixedCache) else mean_bits(held.report())


def mean_bits(report: Report) -> float:
    """Bits for each number of the tokens that have left the exact window, whether they are coded or gone; everything
    that is held of them counts: codes, heat, what is kept exact beside codes."""
    size = elements = 0.0
    for layer in report.layers:
        account = layer.account
        if not layer.n_tokens or (not account.codes and not layer.n_coded):
            continue
        exact = account.exact - account.exceptions
        gone = 1 - exact / account.dense
        size += account.coded
        elements += account.n_elements * gone
    return 8 * size / elements if elements else 0.0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; a column for what any row has."""
    kls = {"near": "KL near", "far": "KL far", "later": "KL later", "away": "KL of another topic", "back": "KL back"}
    logs = {"needle": "log-probability", "first": "first answer", "second": "second answer"}
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **{title: partial(_cell, key=key, form=".4f") for key, title in kls.items()},
        "same next token": partial(_cell, key="top1", form=".1%"),
        "facts found": partial(_counted, right="right", n="n_needles"),
        "facts of the start found": partial(_counted, right="second_right", n="n_second"),
        **{title: partial(_cell, key=key, form=".3f") for key, title in logs.items()},
    }
    columns = {title: cell for title, cell in columns.items() if any(cell(row) for row in rows)}
    lines = [f"| recipe | bits | {' | '.join(columns)} |", "|---" + "|--:" * (1 + len(columns)) + "|"]
    for row in rows:
        cells = [f"`{row['recipe']}`", f"{row['bits']:.2f}", *(cell(row) for cell in columns.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    return "" if row[key] is None else format(row[key], form)


def _counted(row: dict[str, Any], right: str, n: str) -> str:
    return f"{row[right]} of {row[n]}" if row[n] else ""


def step_table(steps: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of a step."""
    lines = ["| recipe | stage | refinements, bytes | bits | ms | ms of the processor |", "|---|---" + "|--:" * 4 + "|"]
    lines += [
        f"| `{one['recipe']}` | {s['stage']} | {s['refinements']:,} | {s['bits']:.2f} | {s['ms']:.1f} | "
        f"{s['cpu_ms']:.1f} |"
        for one in steps
        for s in one["stages"]
    ]
    return "\n".join(lines)


def shrink_table(shrunk: list[dict[str, Any]]) -> str:
    """Markdown: bytes and text of each stage."""
    lines = [
        "| stage | given back | refinements left | held | bits | ms a token | text |",
        "|---" + "|--:" * 5 + "|---|",
    ]
    for one in shrunk:
        for stage in one["stages"]:
            text = " ".join(stage["text"].split())
            lines.append(
                f"| {stage['stage']} | {stage['given_back']:,} | {stage['refinements']:,} | {stage['held']:,} | "
                f"{stage['bits']:.2f} | {stage['ms']:.0f} | {text} |"
            )
    return "\n".join(lines)


def figure_of(document: dict[str, Any]) -> Figure:
    """KL near, KL far and facts against bits."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, (key, title) in zip(
        figure.subplots(1, 3),
        (("near", "next 256 tokens"), ("far", "256 tokens, 768 later"), ("needle", "facts nobody asked about")),
        strict=True,
    ):
        for i, (name, start) in enumerate(FAMILIES.items()):
            mine = [r for r in document["rows"] if r["recipe"].startswith(start)]
            mine = [r for r in mine if EMBEDDED not in r["recipe"] and BY_KEYS not in r["recipe"]]
            mine = sorted((r for r in mine if r[key] is not None), key=lambda r: r["bits"])
            y = [-r[key] if key == "needle" else r[key] for r in mine]
            axes.plot([r["bits"] for r in mine], y, label=name, color=COLOURS[i], marker=MARKERS[i])
        axes.set_title(title)
        axes.set_xlabel("bits per number outside the window")
        axes.set_ylabel("−log-probability of a digit, nats" if key == "needle" else "KL, nats")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    made = document["made"]
    said = (
        f"{document['model']}, {document['split']} documents: commit {made['commit'] or 'unknown'}, {made['machine']}"
    )
    figure.suptitle(said, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
