"""Attention to coded tokens, as defined: decode them, then softmax. SPECTRA's Mode A.

k̂, v̂ = decode(bytes);   a_n = softmax_n(scale · qᵀ k̂_n);   output = Σ_n a_n v̂_n,   lse = log Σ_n exp(scale · qᵀ k̂_n)

The logarithm of the sum lets the exact tokens of the window, read apart, be merged in without loss.
"""

from jaxtyping import Float, Int
from torch import Tensor

from karhunen.codec import LayerCodec, Packed
from karhunen.kernels.softmax import Partial, attended


def attend(
    codec: LayerCodec,
    key: Packed,
    value: Packed,
    positions: Int[Tensor, "b t"],
    query: Float[Tensor, "b q m d"],
    scale: float,
) -> Partial:
    """Queries, after RoPE, read every coded token: these have left the window, so all lie in the past."""
    k = codec.key.decode(key, positions).to(query.dtype)
    v = codec.value.decode(value, positions).to(query.dtype)
    grouped = query.unflatten(1, (k.shape[1], -1))  # [b h q m d]
    part = attended(grouped @ k[:, :, None].mT * scale, v[:, :, None])
    return Partial(part.mean.flatten(1, 2), part.log_sum.flatten(1, 2))
