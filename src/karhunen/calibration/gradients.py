"""Gradients of the model's predictions become Fisher moments in the frame that was asked for."""

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor, arange, nn

from karhunen.calibration.measure import counted
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.gradients import NEAR_TOKENS, read_gradients
from karhunen.hf.rotary import DetectedRotary
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need

CLIP_QUANTILE = 0.995


def measure_gradients(
    model: nn.Module,
    tokens: Int[Tensor, " t"],
    needs: list[Need],
    layers: tuple[int, ...],
    rotaries: Mapping[int, DetectedRotary],
    seed: int,
    near_tokens: int = NEAR_TOKENS,
) -> dict[int, dict[Need, Moments]]:
    """Moments of the gradients of one sequence, by layer and need.

    A gradient by a key turns into the frame as the key does. ValueError naming the layers that showed none.
    """
    found = read_gradients(model, tokens, seed, near_tokens)
    if missing := [layer for layer in layers if layer not in found]:
        raise ValueError(
            f"layers {missing} show no gradient: their attention does not read the cached keys as they are; "
            "use a recipe without the Fisher metric"
        )
    positions = arange(len(tokens))[None]
    measured: dict[int, dict[Need, Moments]] = {}
    for layer in layers:
        rotary = rotaries.get(layer, DetectedRotary())
        for need in needs:
            seen = found[layer]
            gradient = (seen.by_key if need.slot == "key" else seen.by_value).cpu()
            turn = rotary.key if need.slot == "key" else rotary.value
            frame = RopeFrame(need.block_tokens, need.joined)
            inside = frame.forward(gradient, positions, turn)[0][:, counted(need, seen.key, seen.value).cpu()]
            measured.setdefault(layer, {})[need] = Moments.of(_clipped(inside))
    return measured


def _clipped(gradient: Float[Tensor, "g n e"]) -> Float[Tensor, "g n e"]:
    """Gradients no longer than the CLIP_QUANTILE of their lengths: a handful of tokens would carry half of the sum."""
    length = gradient.norm(dim=-1)
    most = length.quantile(CLIP_QUANTILE, dim=-1, keepdim=True)
    return gradient * (most / length.clamp_min(1e-30)).clamp_max(1)[..., None]
