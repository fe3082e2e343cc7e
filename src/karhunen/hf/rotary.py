"""The rotation a model applies to what it caches: taken from the model itself, and proven on it.

    k_{n+s} = R(s) k_n      for the same tokens, run once at positions n and once at n + s

Attention sees only differences of positions, so everything but the keys' own rotation is the same in both runs, under
any RoPE scaling, learned sinks, sliding windows and linear layers. Candidates are the model's own `inv_freq` buffers
in either pairing, at the front or the end of the vector; the one that explains the second run is the layer's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.device import HOST
from karhunen.hf.probe import Update, n_positions, parameters, probe_tokens, text_config, updates
from karhunen.statistics.need import Slot
from karhunen.statistics.rotary import Rotary

SHIFTS = (1, 7, 90, 1000)

# Relative error of explained keys: rounding of the forward itself, grown over the depth of the model.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# A rotation is believed only if it leaves less than this part of what no rotation leaves.
CLEARLY = 0.25

USE_AS_CACHED = "use a recipe that codes keys as they are cached (post-RoPE), such as nova_kv, kivi or int4"
NOT_A_ROTATION = (
    f"this model's keys do not move by a rotation: its positions are learned or act in another way; {USE_AS_CACHED}"
)
NOT_KNOWN = (
    "this model's recurrent layers change its keys with all that came before, and no rotation explains them; "
    f"{USE_AS_CACHED}"
)


@final
@dataclass(frozen=True)
class DetectedRotary:
    """The rotations of a layer's two cache slots, None where a slot does not turn with the position.

    A `note` says that positions act on a slot in another way: its vectors cannot be moved between positions.
    """

    key: Rotary | None = None
    value: Rotary | None = None
    note: str = ""

    def of(self, slot: Slot) -> Rotary | None:
        """The rotation of one slot."""
        return self.key if slot == "key" else self.value


def detect_rotary(model: nn.Module) -> dict[int, DetectedRotary]:
    """The rotation of every layer that caches keys and values, by layer index.

    Runs a handful of ten-token forwards. ValueError where keys or values are not finite, naming the layer.
    """
    tokens = probe_tokens(model)
    limit = n_positions(model) - tokens.shape[1]
    shifts = sorted({min(shift, limit) for shift in SHIFTS if limit > 0})
    still = updates(model, tokens, **_at(model, tokens, 0))
    moved = {shift: _shifted(model, tokens, shift) for shift in shifts}
    candidates = list(_candidates(model))  # read after the runs: dynamic scaling rewrites its buffers
    found = {layer: _explain(layer, still[layer], moved, candidates) for layer in sorted(still)}
    if is_recurrent(model):
        found = {layer: replace(x, note=NOT_KNOWN if x.note else "") for layer, x in found.items()}
    if not any(layer.key or layer.value or layer.note for layer in found.values()) and _sees_positions(model):
        return dict.fromkeys(found, DetectedRotary(note=NOT_A_ROTATION))
    return found


def _at(model: nn.Module, tokens: Int[Tensor, "1 t"], first: int) -> dict[str, Tensor]:
    if "position_ids" not in parameters(model):
        return {}
    return {"position_ids": torch.arange(first, first + tokens.shape[1], device=HOST)[None]}


def _shifted(model: nn.Module, tokens: Int[Tensor, "1 t"], shift: int) -> dict[int, Update]:
    """The cache updates of `tokens` moved by `shift`: by position ids, or by masked padding where there are none."""
    if "position_ids" in parameters(model):
        return updates(model, tokens, **_at(model, tokens, shift))
    padding = tokens[:, :1].expand(1, shift)
    mask = torch.cat([tokens.new_zeros(1, shift), torch.ones_like(tokens)], dim=1)
    seen = updates(model, torch.cat([padding, tokens], dim=1), attention_mask=mask)
    return {layer: (key[:, :, shift:], value[:, :, shift:]) for layer, (key, value) in seen.items()}


def _sees_positions(model: nn.Module) -> bool:
    """Whether the first cached key of one token repeated depends on where it stands (layers of other kinds: False)."""
    if is_recurrent(model):
        return False
    tokens = probe_tokens(model)[:, :1].expand(1, 8)
    seen = updates(model, tokens)
    key = seen[min(seen)][0].float()
    return bool((key - key[:, :, :1]).norm() > TOLERANCE[seen[min(seen)][0].dtype] * key.norm())


def is_recurrent(model: nn.Module) -> bool:
    """Whether some layers are of another kind than attention."""
    config = text_config(model)
    declared = [getattr(config, name, None) or () for name in ("layer_types", "layers_block_type")]
    kinds: Iterable[str] = [kind for kinds in declared for kind in kinds]
    return any("attention" not in kind or kind == "linear_attention" for kind in kinds)


def _candidates(model: nn.Module) -> Iterator[Float[Tensor, " pairs"]]:
    """Every vector of frequencies the model holds; without any, the classical ones for its declared width."""
    held = [
        tensor.detach().float().cpu()
        for module in model.modules()
        for name, tensor in [*module.named_buffers(recurse=False), *_plain_tensors(module)]
        if name.endswith("inv_freq") and tensor.ndim == 1 and not tensor.is_meta
    ]
    config = text_config(model)
    if not held and (width := getattr(config, "rotary_dim", None)):
        base = float(getattr(config, "rope_theta", None) or 10000.0)
        held = [base ** -(torch.arange(0, int(width), 2, dtype=torch.float64, device=HOST) / int(width)).float()]
    distinct: list[Tensor] = []
    for frequencies in held:
        if not any(torch.equal(frequencies, other) for other in distinct):
            distinct.append(frequencies)
            yield frequencies
            yield -frequencies  # some models turn the other way


def _plain_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]


def _explain(
    layer: int, still: Update, moved: dict[int, dict[int, Update]], candidates: list[Tensor]
) -> DetectedRotary:
    slots: list[Rotary | None] = []
    note = ""
    for slot, name in enumerate(("keys", "values")):
        x = still[slot]
        if not bool(x.isfinite().all()):
            raise ValueError(
                f"layer {layer}: its {name} hold NaN or infinity on an ordinary text; "
                "run the model in bfloat16 or float32"
            )
        ys = {shift: seen[layer][slot] for shift, seen in moved.items() if layer in seen}
        if x.ndim != 4 or not ys:
            slots.append(None)
            continue
        unturned = _error(x, ys, None)
        rotary, error = _best(x, ys, candidates)
        explained = error <= min(TOLERANCE[x.dtype], CLEARLY * unturned)
        if not explained and unturned > TOLERANCE[x.dtype]:
            note = NOT_A_ROTATION
        slots.append(rotary if explained else None)
    return DetectedRotary(slots[0], slots[1], note)


def _best(x: Float[Tensor, "1 h t d"], ys: dict[int, Tensor], candidates: list[Tensor]) -> tuple[Rotary | None, float]:
    """The candidate that turns `x` into its shifted versions with the least relative error, and that error."""
    width = x.shape[-1]
    best: tuple[Rotary | None, float] = None, float("inf")
    for frequencies in candidates:
        n_rotated = 2 * frequencies.shape[0]
        if n_rotated > width:
            continue
        for offset in sorted({0, width - n_rotated}):
            for interleaved in (False, True):
                rotary = Rotary(frequencies, interleaved, offset)
                error = _error(x, ys, rotary)
                if error < best[1]:
                    best = rotary, error
    return best


def _error(x: Float[Tensor, "1 h t d"], ys: dict[int, Tensor], rotary: Rotary | None) -> float:
    """Relative error of R(s) x against the shifted run: median over tokens, largest over shifts.

    The median forgives a token that an expert router sends elsewhere for a rounding error.
    """
    x = x.detach().cpu().double()
    size = x.norm(dim=(1, 3)).clamp(min=1e-30)  # [1 t]
    errors: list[float] = []
    for shift, y in ys.items():
        guess = x if rotary is None else rotary.rotate(x, torch.full((1, 1, x.shape[-2]), shift, device=x.device))
        errors.append(float(((guess - y.detach().cpu().double()).norm(dim=(1, 3)) / size).median()))
    return float("inf") if any(error != error for error in errors) else max(errors)
