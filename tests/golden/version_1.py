"""An artifact of format version 1, and what it gave: made once, by the code of commit d687fb0.

python -m tests.golden.version_1      writes both anew (there, with src on PYTHONPATH): later code writes version 2

Layer 0 is the recipe `karhunen`; layer 1 has keys of float8 tables in one frame, values with a byte for a gain.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.synthetic import quick, statistics
from torch import Tensor

from karhunen.allocation.uniform import Uniform
from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.codec import Codec, LayerCodec, Origin, Packed, SideCodec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.base import Codes
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.positions import Positions
from karhunen.store.snapshot import Snapshot
from karhunen.transforms.klt import KLT
from karhunen.windows.sink_recent import SinkRecent

ARTIFACT = Path(__file__).parent / "version_1"
EXPECTED = Path(__file__).parent / "version_1_expected.safetensors"
SHAPE = LayerShape("full", n_kv_heads=2, n_query_heads=4, key_dim=8, value_dim=8)
N_CODED, N_SINK, N_RECENT = 72, 4, 10  # coded tokens of two blocks of 64


def integers(*shape: int, salt: int) -> Tensor:
    """0 … 255 by a multiplicative hash."""
    n = torch.Size(shape).numel()
    return torch.tensor([((i + 977 * salt + 1) * 2654435761 >> 13) % 256 for i in range(n)]).reshape(shape)


def bytes_of(side: SideCodec, salt: int) -> Packed:
    """Known bytes; gains lie around one."""
    planes = integers(1, len(side.quantizer.widths), N_CODED, salt=salt).to(torch.uint8)
    gains = {"log8": (140 + integers(1, SHAPE.n_kv_heads, N_CODED, salt=salt + 1) % 20).to(torch.uint8)}
    gain = gains.get(getattr(side.quantizer, "gain", "none"))
    return Packed(planes, {} if gain is None else {"gain": gain})


def held_by(layer: LayerCodec) -> Snapshot:
    """Known bytes between known vectors."""

    def vectors(n: int, salt: int) -> dict[Slot, Tensor]:
        return {slot: integers(1, 2, n, 8, salt=salt + i).float() / 64 - 2 for i, slot in enumerate(SLOTS)}

    packed = {slot: bytes_of(layer.side(slot), salt=3 * i) for i, slot in enumerate(SLOTS)}
    return Snapshot(vectors(N_SINK, 11), vectors(N_RECENT, 13), packed, None, Positions(), N_CODED, 0)


def given_by(codec: Codec) -> dict[str, Tensor]:
    """For each layer the coefficients and the vectors of known bytes, and attention to them."""
    found: dict[str, Tensor] = {}
    query = integers(1, SHAPE.n_query_heads, 1, SHAPE.key_dim, salt=17).float() / 32 - 4
    at = N_SINK + torch.arange(N_CODED)[None]
    for index, layer in codec.layers.items():
        held = held_by(layer)
        assert held.packed is not None
        for slot in SLOTS:
            side, packed = layer.side(slot), held.packed[slot]
            codes = Codes(side.layout.unpack(packed.planes), packed.side)
            found[f"{index}.{slot}.coefficients"] = side.quantizer.decode(codes).float()
            found[f"{index}.{slot}.vectors"] = side.decode(packed, at).float()
        found[f"{index}.attention"] = fused.attend(reader_of(layer, held), held, query, scale=SHAPE.key_dim**-0.5)
    return found


def main() -> None:
    bytes_side = Side(transform=KLT(), quantizer=ByteVQ(gain="log8", n_iterations=1))
    group = GroupVQ(size=4, gain="none", entries="float8_e5m2", n_iterations=1)
    float8 = Side(RopeFrame(None), transform=KLT(), allocation=Uniform(2), quantizer=group)
    recipes = (quick(make("karhunen")), Recipe("float8", float8, bytes_side, SinkRecent(4, 10)))
    layers = {i: fit(recipe, statistics(recipe, SHAPE)).layers[0] for i, recipe in enumerate(recipes)}
    model = ModelIdentity("synthetic", "c", "w", (SHAPE, SHAPE))
    codec = Codec(model, SinkRecent(4, 10), layers, {}, Origin("version 1, made by d687fb0"))
    codec.save_pretrained(ARTIFACT)
    save_file(given_by(codec), EXPECTED)


if __name__ == "__main__":
    main()
