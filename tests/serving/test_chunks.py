"""Chunks of a cache server: every layout there and back, sizes that hold, starts found from keys."""

from dataclasses import replace

import pytest
import torch
from tests.serving.stand_in import FULL, codec_of
from tests.synthetic import rotary
from torch import Tensor

from karhunen.codec import Codec
from karhunen.serving.chunk_start import chunk_start
from karhunen.serving.chunks import ChunkCodec, page_of_buffer
from karhunen.statistics.identity import LayerShape

N, LAYERS = 64, 3
LATENT = LayerShape("full", 1, 4, 32, 8)


def chunk(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def shape_of(kind: str, layer: LayerShape, parts: int = 1) -> tuple[int, ...]:
    width = layer.n_kv_heads // parts * layer.key_dim
    return {
        "split": (2, LAYERS, N, width), "fused": (1, LAYERS, N, 2 * width),
        "latent": (1, LAYERS, N, layer.key_dim + layer.value_dim),
    }[kind]  # fmt: skip


@pytest.mark.parametrize(("kind", "layer"), [("split", FULL), ("fused", FULL), ("latent", LATENT)])
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_every_layout_comes_back(kind: str, layer: LayerShape, recipe: str) -> None:
    chunks = ChunkCodec(codec_of(*[layer] * LAYERS, recipe=recipe))
    given = chunk(shape_of(kind, layer))
    page = chunks.encode(given)
    got = torch.zeros_like(given)
    chunks.decode(page, got)
    assert float((got - given).float().norm() / given.float().norm()) < (0.02 if recipe == "int8" else 0.2)
    assert len(page) == chunks.max_bytes(given.shape, given.dtype), "no bound is tighter for a chunk at a text's start"


def test_split_and_fused_chunks_of_the_same_vectors_are_the_same_page() -> None:
    chunks = ChunkCodec(codec_of(*[FULL] * LAYERS))
    split = chunk(shape_of("split", FULL))
    both = split.unflatten(-1, (FULL.n_kv_heads, -1))
    fused = torch.cat([both[0], both[1]], -1).flatten(-2)[None]
    assert chunks.encode(split) == chunks.encode(fused.contiguous())


def test_ranks_code_their_own_heads() -> None:
    chunks = ChunkCodec(codec_of(*[FULL] * LAYERS))
    given = chunk(shape_of("split", FULL))
    for rank in (0, 1):
        own = given.unflatten(-1, (2, -1))[..., rank, :].contiguous()
        got = torch.zeros_like(own)
        page = chunks.encode(own, rank)
        chunks.decode(page, got, rank)
        assert float((got - own).float().norm() / own.float().norm()) < 0.02
        with pytest.raises(ValueError, match="heads"):
            chunks.decode(page, got, 1 - rank)


@pytest.mark.parametrize("shape", [(2, 2, N, 64), (2, 3, N, 65), (2, 3, N, 128), (3, 3, N, 64), (3, N, 64)], ids=str)
def test_another_models_chunks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a chunk of \["):
        ChunkCodec(codec_of(*[FULL] * LAYERS)).max_bytes(shape, torch.bfloat16)


def test_chunks_in_the_order_of_a_backend_are_refused_as_such() -> None:
    with pytest.raises(ValueError, match="engine-driven"):
        ChunkCodec(codec_of(*[FULL] * LAYERS)).max_bytes((LAYERS, N, 2 * FULL.n_kv_heads * 32), torch.bfloat16)


def test_codecs_that_turn_keys_back_and_know_no_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="handed over without them"):
        ChunkCodec(codec_of(FULL, recipe="spectra"))
    ChunkCodec(codec_of(FULL, recipe="spectra"), knows_starts=True)


def test_weights_are_part_of_a_pages_identity() -> None:
    codec, given = codec_of(*[FULL] * LAYERS), chunk(shape_of("split", FULL))
    page = ChunkCodec(codec, "a" * 32).encode(given)
    with pytest.raises(ValueError, match="other weights"):
        ChunkCodec(codec, "b" * 32).decode(page, given)


def test_a_buffer_longer_than_its_page() -> None:
    chunks = ChunkCodec(codec_of(*[FULL] * LAYERS))
    page = chunks.encode(chunk(shape_of("split", FULL)))
    buffer = torch.full((len(page) + 100,), 7, dtype=torch.uint8)
    buffer[: len(page)] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    assert page_of_buffer(buffer) == page
    for broken in (buffer[:30], torch.zeros(400, dtype=torch.uint8), buffer[: len(page) - 1]):
        with pytest.raises(ValueError, match="page"):
            page_of_buffer(broken)


def centered(mean: Tensor) -> Codec:
    """A codec whose keys have this mean before they are turned."""
    codec = codec_of(FULL, recipe="karhunen")
    layer = codec.layers[0]
    key = replace(layer.key, mean=mean, rotary=rotary(32))
    return replace(codec, layers={0: replace(layer, key=key)})


@pytest.mark.parametrize("start", [0, N, 7 * N, 500 * N])
def test_a_chunks_start_is_read_from_its_keys(start: int) -> None:
    generator = torch.Generator().manual_seed(start)
    mean = 3 * torch.randn(2, 32, generator=generator)
    keys = mean[:, None] + torch.randn(2, N, 32, generator=generator)
    turned = rotary(32).rotate(keys, torch.arange(start, start + N)).float()
    still = torch.zeros_like(turned)
    assert chunk_start(centered(mean), {0: (turned, still)}, 0, 1 << 16) == start
    assert chunk_start(centered(mean), {0: (turned[1:], still[1:])}, 1, 1 << 16) == start
    exchanged = replace(centered(mean), layers={0: centered(mean).layers[0].exchanged()})
    assert chunk_start(exchanged, {0: (still, turned)}, 0, 1 << 16) == start, "latent attention: its values turn"
