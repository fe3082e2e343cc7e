"""The same work by this library and by the packages that do it too: quantized values, kept tokens, logits.

    python benchmarks/peers.py --output results/measured          # docs/peers.md says how to install the peers

One prompt of SmolLM2 gives keys, values and queries of every layer. Compared are
  values    relative squared error and measured bits: int4, int2, kivi · transformers' QuantizedCache (quanto, HQQ)
  logits    KL to the dense cache on what follows the prompt, the prompt read exactly, then quantized whole
  kept      the tokens each head keeps: streaming_llm, key_norm, snapkv, h2o · kvpress
  vectors   turboquant's error · turboquant-torch
A package that is not there is named under `skipped`.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from karhunen.calibration.texts import evaluation_text
from karhunen.codec import Codec
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.score import PAGE_TOKENS, DenseRun, Document, run_dense, score
from karhunen.fitting import fit
from karhunen.hf.capture import Observation, capturing
from karhunen.hf.describe import identity_of
from karhunen.hf.probe import cache_argument, text_config
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.store.layer_store import LayerStore
from karhunen.windows.attention_weights import weight_blocks
from karhunen.windows.budget import Tokens
from karhunen.windows.observed_attention import ObservedAttention
from karhunen.windows.score import Queries, Score
from karhunen.windows.streaming import Streaming
from karhunen.windows.top_scored import TopScored

PACKAGES = {"optimum-quanto": "optimum", "hqq": "hqq", "kvpress": "kvpress", "turboquant-torch": "turboquant"}
OURS = ("int4", "int2", "kivi:bits=4,group=64", "kivi:bits=2,group=64")
WHOLE = {"sink": 0, "recent": 0}  # QuantizedCache quantizes the whole prompt, its newest tokens too
KEPT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("results/measured"))
    given = parser.parse_args()

    from karhunen.hf.embedded import load

    model, tokenizer = load(given.model)
    n = given.tokens + given.scored
    tokens = tokenizer(evaluation_text()[: 8 * n], return_tensors="pt")["input_ids"][0, :n]
    seen: list[Observation] = []
    with capturing(model, seen.append) as run:
        run(tokens[None, : given.tokens], None)
    peers = {name: version(name) for name, module in PACKAGES.items() if find_spec(module) and installed(name)}
    body = {
        "what": "karhunen and the packages that do the same work, on the same tensors",
        "model": given.model,
        "prompt_tokens": given.tokens,
        "scored_tokens": given.scored,
        "packages": peers,
        "skipped": sorted(PACKAGES.keys() - peers.keys()),
        "values": list(values(model, seen, peers)),
        "logits": list(logits(model, Document("prompt", tokens, given.tokens), peers)),
        "kept": kept(model, seen, tokens[: given.tokens], peers),
        "vectors": vectors(model, seen, peers),
        "provenance": asdict(provenance()),
    }
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"peers-{given.model}.json").write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))


def installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def codec_of(model: Any, text: str, **options: Any) -> Codec:
    """A recipe that asks for no statistics."""
    identity = identity_of(model)
    empty = {i: LayerStatistics() for i in range(len(identity.layers))}
    return fit(make(text, **options), Statistics(identity, empty))


def relative_error(x: Tensor, back: Tensor) -> float:
    return float((back.float() - x.float()).square().sum() / x.float().square().sum())


# quantized values


def values(model: Any, seen: list[Observation], peers: dict[str, str]) -> Iterator[dict[str, Any]]:
    for text in OURS:
        codec = codec_of(model, text, **WHOLE)
        stores = []
        for found in seen:
            store = LayerStore(codec.layers[found.layer], codec.window)
            store.append(found.key, found.value)
            stores.append(store)
        reads = [store.read() for store in stores]
        yield {
            "method": text,
            "by": "karhunen",
            "bits_per_element": mean(store.account().coded_bits_per_element for store in stores),
            "key_error": mean(relative_error(f.key, k) for f, (k, _) in zip(seen, reads, strict=True)),
            "value_error": mean(relative_error(f.value, v) for f, (_, v) in zip(seen, reads, strict=True)),
        }
    for backend, bits, axis in peer_settings(peers):
        errors: dict[str, list[float]] = {"key": [], "value": []}
        sizes = []
        for found in seen:
            layer = quantized_cache(model, backend, bits, axis).layers[found.layer]
            layer.update(found.key, found.value)
            for slot, x in (("key", found.key), ("value", found.value)):
                stored = getattr(layer, f"_quantized_{slot}s")
                errors[slot].append(relative_error(x, layer._dequantize(stored)))
                sizes.append(8 * stored_bytes(stored) / x.numel())
        yield {
            "method": f"{backend}, {bits} bits, axis {axis}, groups of 64",
            "by": "transformers",
            "bits_per_element": mean(sizes),
            "key_error": mean(errors["key"]),
            "value_error": mean(errors["value"]),
        }


def peer_settings(peers: dict[str, str]) -> Iterator[tuple[str, int, int]]:
    for backend, package, axes in (("quanto", "optimum-quanto", (0, -1)), ("hqq", "hqq", (0, 1))):
        if package in peers:
            yield from ((backend, bits, axis) for bits in (4, 2) for axis in axes)


def quantized_cache(model: Any, backend: str, bits: int, axis: int) -> Any:
    from transformers import QuantizedCache

    axes = {"axis_key": axis, "axis_value": axis}
    return QuantizedCache(backend, text_config(model), nbits=bits, q_group_size=64, residual_length=128, **axes)


def stored_bytes(quantized: Any) -> int:
    """Bytes of the tensors that a quanto or HQQ value holds: symbols, scales, zero points."""
    if isinstance(quantized, tuple):  # HQQ: symbols, and what is known about them
        symbols, meta = quantized
        return symbols.nbytes + meta["scale"].nbytes + meta["zero"].nbytes
    packed = getattr(quantized._data, "_data", quantized._data)
    return packed.nbytes + quantized._scale.nbytes + quantized._shift.nbytes


# logits


def logits(model: Any, document: Document, peers: dict[str, str]) -> Iterator[dict[str, Any]]:
    dense = run_dense(model, document)
    for text in OURS:
        found = score(model, codec_of(model, text, **WHOLE), dense)
        yield {
            "method": text,
            "by": "karhunen",
            "kl": float(found.kl.mean()),
            "top1": float(found.agree.float().mean()),
        }
    for backend, bits, axis in peer_settings(peers):
        kl, agree = peer_divergence(model, quantized_cache(model, backend, bits, axis), dense)
        method = f"{backend}, {bits} bits, axis {axis}, groups of 64"
        yield {"method": method, "by": "transformers", "kl": kl, "top1": agree}


@torch.no_grad()
def peer_divergence(model: Any, cache: Any, dense: DenseRun) -> tuple[float, float]:
    """As `score` does: the prompt at once, then pages of tokens that read the cache."""
    document = dense.document
    prompt = document.tokens[None, : document.prefill_tokens]
    model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    pages = document.scored.split(PAGE_TOKENS)
    found = [model(input_ids=p[None], use_cache=True, **{cache_argument(model): cache}).logits[0] for p in pages]
    p, q = dense.logits.float().log_softmax(-1), torch.cat(found).float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0).mean()
    return float(kl), float((p.argmax(-1) == q.argmax(-1)).float().mean())


# kept tokens


def kept(model: Any, seen: list[Observation], tokens: Tensor, peers: dict[str, str]) -> list[dict[str, Any]]:
    """Share of the tokens which both keep, of `KEPT` per head, mean over heads and layers."""
    if "kvpress" not in peers:
        return []
    import kvpress

    ratio = 1 - KEPT / len(tokens)
    observed = kvpress.ObservedAttentionPress(ratio)
    snap = TopScored(ObservedAttention(32, 5, "mean"), Tokens(KEPT), Tokens(32))
    paper = replace(snap, score=ObservedAttention(32, 7, "max"))
    pairs: list[tuple[str, str, Any, Callable[[Observation], Tensor]]] = [
        ("streaming_llm", "StreamingLLMPress", kvpress.StreamingLLMPress(ratio, n_sink=4), by_age),
        ("key_norm", "KnormPress", kvpress.KnormPress(ratio), lambda o: by_score(make("key_norm").window.score, o, 0)),
        ("snapkv, 5 neighbours, mean", "SnapKVPress(32, 5)", kvpress.SnapKVPress(ratio, 32, 5), chosen(snap)),
        ("snapkv (7 neighbours, max)", "SnapKVPress(32, 5)", kvpress.SnapKVPress(ratio, 32, 5), chosen(paper)),
        ("h2o's sum", "ObservedAttentionPress", observed, lambda o: summed(o, False)),
        ("h2o's sum over the number of readers", "ObservedAttentionPress", observed, lambda o: summed(o, True)),
    ]  # fmt: skip
    attentions = attention_weights(model, tokens)
    rows = []
    for ours, theirs, press, mine in pairs:
        shares = [overlap(mine(found), pressed(model, press, found, attentions[found.layer])) for found in seen]
        rows.append({"ours": ours, "kvpress": theirs, "shared": mean(shares), "least layer": min(shares)})
    return rows


def overlap(a: Tensor, b: Tensor) -> float:
    """Of two sets of token indices `[b h KEPT]`."""
    return float((a[..., :, None] == b[..., None, :]).any(-1).float().mean())


def by_age(found: Observation) -> Tensor:
    parts = Streaming(4, KEPT - 4, page_tokens=1).partition(found.key.shape[2], 1)
    indices = torch.cat([torch.arange(a, b) for place, a, b in parts.runs if place.name != "DROPPED"])
    return indices.expand(*found.key.shape[:2], -1)


def by_score(rule: Score, found: Observation, n_recent: int) -> Tensor:
    return held(TopScored(rule, Tokens(KEPT), Tokens(n_recent)), found)


def chosen(window: TopScored) -> Callable[[Observation], Tensor]:
    return lambda found: held(window, found)


def held(window: TopScored, found: Observation) -> Tensor:
    """The indices of the keys that a store holds."""
    store = LayerStore(None, window)
    store.append(found.key, found.value, queries=queries_of(found))
    return torch.cdist(store.read()[0].double(), found.key.double()).argmin(-1)


def queries_of(found: Observation) -> Queries:
    assert found.attention is not None, found.unseen
    return Queries(found.attention.query, found.attention.scale)


def summed(found: Observation, per_reader: bool) -> Tensor:
    total = sum(w.sum(-2).mean(2) for w in weight_blocks(queries_of(found), found.key))
    n = found.key.shape[2]
    return (total / torch.arange(n, 0, -1) if per_reader else total).topk(KEPT, dim=-1).indices  # type: ignore[union-attr]


def pressed(model: Any, press: Any, found: Observation, attention: Tensor) -> Tensor:
    """What a press keeps of the same keys; queries are its own, from the same hidden states."""
    assert found.attention is not None, found.unseen
    hidden = found.attention.hidden
    rotation = model.model.rotary_emb(hidden, torch.arange(found.key.shape[2])[None])
    seen = attention if "Observed" in type(press).__name__ else None
    given = {"position_embeddings": rotation}
    return press.score(found.attention.module, hidden, found.key, found.value, seen, given).topk(KEPT, dim=-1).indices


@torch.no_grad()
def attention_weights(model: Any, tokens: Tensor) -> list[Tensor]:
    """The model's own, from its eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return list(model(tokens[None], output_attentions=True, use_cache=False).attentions)
    finally:
        model.set_attn_implementation(before)


# vectors


def vectors(model: Any, seen: list[Observation], peers: dict[str, str]) -> list[dict[str, Any]]:
    """Mean of ‖x − x̂‖² / ‖x‖² over the keys of all layers."""
    rows = []
    for bits, paper in ((1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)):
        codec, row = codec_of(model, f"turboquant:bits={bits}"), {"bits": bits, "paper": paper}
        ours = [
            (f.key, codec.layers[f.layer].key.distort(f.key, torch.arange(f.key.shape[2])[None]).float()) for f in seen
        ]
        row["karhunen"] = mean(vector_error(x, back) for x, back in ours)
        if "turboquant-torch" in peers:
            from turboquant.mse_quantizer import TurboQuantMSE

            theirs = TurboQuantMSE(seen[0].key.shape[-1], bits)
            row["turboquant-torch"] = mean(vector_error(f.key, theirs.dequantize(theirs.quantize(f.key))) for f in seen)
        rows.append(row)
    return rows


def vector_error(x: Tensor, back: Tensor) -> float:
    return float(((back - x).square().sum(-1) / x.square().sum(-1)).mean())


if __name__ == "__main__":
    with torch.no_grad():
        main()
