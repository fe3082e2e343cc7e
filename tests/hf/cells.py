"""One cell of the table of docs/reliability.md: a family and a recipe, on a tiny model of random weights.

refused     before the model has run over any text, with the reason
else        at 8 bits the logits are those of the uncompressed model, nearly, both decoded and read from bytes;
            at the recipe's own rate both ways give the same logits
"""

import gc
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, final

import torch
from tests.hf.families import model_of
from torch import Tensor

import karhunen
from karhunen import recipes
from karhunen.allocation.uniform import Uniform
from karhunen.attention import fused
from karhunen.calibration.calibrate import calibrate
from karhunen.cli.calibrate import _check_suits
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.capture import can_be_routed
from karhunen.hf.hooks import before_forward
from karhunen.hf.probe import cache_argument
from karhunen.quantizers.affine import Affine
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.need import Need

WINDOW = "sink=2,recent=8"
USUAL = {
    "full": "full", "int4": f"int4:{WINDOW}", "kivi": f"kivi:group=8,{WINDOW}", "nova_kv": f"nova_kv:{WINDOW}",
    "spectra": f"spectra:bits=6,{WINDOW}", "karhunen": f"karhunen:block_tokens=16,{WINDOW}",
    "snapkv": "snapkv:kept=40,recent=8",
}  # fmt: skip
"""At a rate of their own; 24 coefficients of a layer leave SPECTRA few bits beside their range."""
EIGHT_BITS = {
    **USUAL, "int4": f"int8:{WINDOW}", "kivi": f"kivi:bits=8,group=8,{WINDOW}", "spectra": f"spectra:bits=10,{WINDOW}",
    "karhunen": f"karhunen:bits=8,block_tokens=16,{WINDOW}", "snapkv": "snapkv:kept=1000,recent=8",
}  # fmt: skip
"""8 bits for each coefficient, ranges beside them; `snapkv` with room for every token."""
N_PROMPT = 80  # past sinks, a recent window and several blocks
PARTS = (5, 1, 1, 1, 1, 1)  # tokens of the forwards that read it
N_HEAD = 16  # tokens by which a forward over the text is known
CLOSE = 0.2
"""Of logits at 8 bits, by the largest; what a wrong layer, side or rotation moves them by stands in the tests."""
READ = 3 * fused.TOLERANCE
"""Of logits, after some layers that read bytes in place of decoded numbers."""
EXACT = 1e-5
"""Of logits, where nothing is coded."""


def ids(b: int, t: int, seed: int = 0) -> Tensor:
    """Of the tiny vocabulary."""
    return torch.randint(3, 99, (b, t), generator=torch.Generator().manual_seed(seed))


TEXT = ids(5, 500, seed=9)
"""What is calibrated on."""


@final
@dataclass(frozen=True)
class Cell:
    """What was seen. `error` is by the uncompressed model at 8 bits, `apart` between decoded and read from bytes at the
    usual rate (None where the model's attention cannot read bytes); both by the largest logit. `wrong` is empty if
    all is well."""

    family: str
    recipe: str
    refused: str = ""
    error: float | None = None
    apart: float | None = None
    wrong: str = ""


def cell_of(family: str, name: str) -> Cell:
    """Try a recipe on a family."""
    model, worked = shared_model(family), list[int]()
    remove = before_forward(model, lambda _, __, given: worked.append(_of_text(given["input_ids"])))
    try:
        made = [codec(family, recipe) for recipe in (eight_bits(name), recipes.make(USUAL[name]))]
    except ValueError as error:
        late = f"refused after {sum(worked)} tokens of text" if sum(worked) else ""
        return Cell(family, name, refused=str(error), wrong=late or ("" if len(str(error)) > 30 else "no reason"))
    finally:
        remove()
    return _measured(family, name, *made)


def _of_text(given: Tensor) -> int:
    """Tokens of the calibration text in a forward; others only look at the model."""
    heads = {tuple(row) for row in TEXT[:, :N_HEAD].tolist()}
    return given.numel() if any(tuple(row) in heads for row in given[:, :N_HEAD].tolist()) else 0


def eight_bits(name: str) -> Recipe:
    """The recipe with 8 bits for every coefficient."""
    recipe = recipes.make(EIGHT_BITS[name])
    if name != "nova_kv" or recipe.key is None or recipe.value is None:
        return recipe
    key = replace(recipe.key, allocation=Uniform(8), quantizer=_single(recipe.key.quantizer))
    value = replace(recipe.value, allocation=Uniform(8), quantizer=replace(_affine(recipe.value.quantizer), clip=1.0))
    return replace(recipe, key=key, value=value)


@cache
def shared_model(family: str) -> Any:
    """The same object at every call, so that what is known of it is asked once."""
    return model_of(family)


@cache
def codec(family: str, recipe: Recipe) -> Codec:
    """Calibrated as a user does it, refusals first."""
    model = shared_model(family)
    _check_suits(recipe, model)
    codec = fit(brief(recipe), statistics(family, tuple(recipe.needs())))
    CompressedCache(model, codec).close()
    return codec


@cache
def statistics(family: str, needs: tuple[Need, ...]) -> Statistics:
    """Of the text."""
    return calibrate(shared_model(family), TEXT, needs)


def brief(recipe: Recipe) -> Recipe:
    """With short training of codebooks."""
    if recipe.key is None or recipe.value is None:
        return recipe
    return replace(recipe, key=_trained_briefly(recipe.key), value=_trained_briefly(recipe.value))


def _trained_briefly(side: Side) -> Side:
    quantizer: Any = side.quantizer
    return replace(side, quantizer=replace(quantizer, n_iterations=4)) if hasattr(quantizer, "n_iterations") else side


def forget() -> None:
    """Models and codecs are gone."""
    shared_model.cache_clear()
    codec.cache_clear()
    statistics.cache_clear()
    gc.collect()


def _measured(family: str, name: str, at_eight: Codec, usual: Codec) -> Cell:
    model = shared_model(family)
    reading = _reading(model)
    dense, _ = _logits(model, dense_cache(model))
    wrong: list[str] = []
    errors: list[float] = []
    for way in filter(None, (model, reading)):
        found, held = _logits(way, CompressedCache(way, at_eight))
        errors.append(_apart(found, dense))
        wrong += _wrong_bytes(held, name)
    apart, exact = None, name in ("full", "snapkv")
    decoded, _ = _logits(model, CompressedCache(model, usual))
    if reading is not None:
        read, _ = _logits(reading, CompressedCache(reading, usual))
        apart = _apart(read, decoded)
    if not max(errors) <= (EXACT if exact else CLOSE):
        wrong.append(f"at 8 bits {max(errors):.2g} from the uncompressed model")
    if apart is not None and not apart <= READ:
        wrong.append(f"read from bytes {apart:.2g} from decoded")
    return Cell(family, name, error=max(errors), apart=apart, wrong="; ".join(wrong))


def _reading(model: Any) -> Any:
    """A copy whose attention reads bytes; None where it cannot be exchanged."""
    if not can_be_routed(model):
        return None
    copy = deepcopy(model)
    karhunen.enable(copy)
    return copy


@torch.no_grad()
def _logits(model: Any, held: Any) -> tuple[Tensor, Any]:
    """Of all forwards after the prompt."""
    text, found, start = ids(1, N_PROMPT + sum(PARTS)), list[Tensor](), N_PROMPT
    model(input_ids=text[:, :N_PROMPT], use_cache=True, **{cache_argument(model): held})
    for n in PARTS:
        part = text[:, start : start + n]
        found.append(model(input_ids=part, use_cache=True, **{cache_argument(model): held}).logits)
        start += n
    if isinstance(held, CompressedCache):
        held.close()
    return torch.cat(found, dim=1), held


def _wrong_bytes(held: CompressedCache, name: str) -> list[str]:
    """What its report gives away: nothing coded where something should be, or no reason where nothing is."""
    rows = held.report().layers
    unsaid = [row.index for row in rows if not row.n_coded and not row.reason]
    wrong = [f"layers {unsaid} are exact without a reason"] if unsaid and name not in ("full", "snapkv") else []
    if name not in ("full", "snapkv") and not any(row.n_coded for row in rows):
        wrong.append("nothing was coded")
    return wrong


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest difference by the largest number; NaN is infinitely far."""
    share = float((x - y).abs().max() / y.abs().max())
    return share if share == share else float("inf")


def _single(quantizer: Any) -> GroupVQ:
    """One coefficient a symbol; the recipe's own float8 entries have two bits behind the point."""
    assert isinstance(quantizer, GroupVQ)
    return replace(quantizer, size=1, entries="float16")


def _affine(quantizer: Any) -> Affine:
    assert isinstance(quantizer, Affine)
    return quantizer
