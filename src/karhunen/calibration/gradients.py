"""Gradients of the model's predictions become Fisher moments in the frame that was asked for."""

from collections.abc import Mapping
from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor, arange, nn

from karhunen.calibration.host import on_host, with_float64
from karhunen.calibration.measure import counted
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.gradients import SINK_TOKENS, ReadGradient, read_gradients
from karhunen.hf.rotary import DetectedRotary
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need

CLIP_QUANTILE = 0.995


def measure_gradients(
    model: nn.Module,
    tokens: Int[Tensor, " t"],
    needs: Mapping[int, list[Need]],
    rotaries: Mapping[int, DetectedRotary],
    seed: int,
) -> dict[int, dict[Need, Moments]]:
    """Moments of the gradients of one sequence, by layer and need, in the host's memory, for the `needs` of each layer;
    one backward pass for each `near_tokens` among them.

    A gradient by a key turns into the frame as the key does. ValueError naming the layers that showed none.
    """
    measured: dict[int, dict[Need, Moments]] = {}
    for near_tokens in sorted({need.near_tokens for mine in needs.values() for need in mine}):

        def listen(layer: int, seen: ReadGradient, near_tokens: int = near_tokens) -> None:
            mine = [need for need in needs.get(layer, ()) if need.near_tokens == near_tokens]
            rotary = rotaries.get(layer, DetectedRotary())
            found = {need: on_host(_moments(need, seen, rotary)) for need in mine}
            measured[layer] = measured.get(layer, {}) | found

        read_gradients(model, tokens, seed, listen, near_tokens)
    if missing := [layer for layer in needs if layer not in measured]:
        raise ValueError(
            f"layers {missing} show no gradient: their attention does not read the cached keys as they are; "
            "use a recipe without the Fisher metric"
        )
    return {layer: measured[layer] for layer in needs}


def _moments(need: Need, seen: ReadGradient, rotary: DetectedRotary) -> Moments:
    gradient = with_float64(seen.by_key if need.slot == "key" else seen.by_value)
    positions = arange(gradient.shape[2], device=gradient.device)[None]
    inside = RopeFrame(need.block_tokens, need.joined).forward(gradient, positions, rotary.of(need.slot))[0]
    read = replace(need, skip_tokens=max(need.skip_tokens, SINK_TOKENS))  # those before show no gradient
    return Moments.of(_clipped(inside[:, counted(read, seen.key, seen.value).to(gradient.device)]))


def _clipped(gradient: Float[Tensor, "g n e"]) -> Float[Tensor, "g n e"]:
    """Gradients no longer than the CLIP_QUANTILE of their lengths: a handful of tokens would carry half of the sum."""
    length = gradient.norm(dim=-1)
    most = length.quantile(CLIP_QUANTILE, dim=-1, keepdim=True)
    return gradient * (most / length.clamp_min(1e-30)).clamp_max(1)[..., None]
