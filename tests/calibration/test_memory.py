"""What the arithmetic of memory says, against worked examples and against an allocator's record."""

from typing import Any

import pytest
import torch
import transformers as tf
from tests.allocations import peak_bytes
from tests.hf.tiny import FAMILIES, build

from karhunen import recipes
from karhunen.byte_sizes import bytes_of
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.memory import Work, memory_of, statistics_bytes
from karhunen.calibration.memory_plan import plan_memory
from karhunen.calibration.placement import Placement, accelerators, devices_of, place
from karhunen.hf.describe import identity_of
from karhunen.hf.sizes import sizes_of
from karhunen.statistics.need import Need

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3": {"hidden_size": 160, "intermediate_size": 512, "head_dim": 64},
}
LATENT = {"hidden_size": 192, "intermediate_size": 512, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "v_head_dim": 32}
T = 384


def held(family: str, recipe: str, vocabulary: int, batch: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes that the arithmetic says, and bytes that calibration was seen to hold beside the weights."""
    model = build(family, vocab_size=vocabulary, **SHAPES.get(family, LATENT)).to(dtype)
    tokens = torch.randint(1, vocabulary, (2 * batch, T), generator=torch.Generator().manual_seed(0))
    needs = tuple(recipes.make(recipe).needs())
    identity_of(model)
    seen = peak_bytes(lambda: calibrate(model, tokens, needs, sequence_tokens=T, batch=batch))
    sizes = sizes_of(model)
    (host,) = memory_of(sizes, Work(needs, sizes.full_layers, tokens.numel(), T, batch))
    return host.working, seen


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["karhunen", "nova_kv", "spectra"])
@pytest.mark.parametrize(("vocabulary", "batch"), [(300, 1), (300, 4), (20000, 1)])
@pytest.mark.parametrize("family", SHAPES)
def test_the_arithmetic_says_what_an_allocator_sees(family: str, vocabulary: int, batch: int, recipe: str) -> None:
    said, seen = held(family, recipe, vocabulary, batch)
    assert 0.7 * said <= seen <= 1.1 * said, f"{seen / said:.2f} of {said:,} bytes"


@pytest.mark.long
def test_the_arithmetic_says_what_an_allocator_sees_of_latent_attention() -> None:
    said, seen = held("mla", "karhunen", 300, 1)
    assert 0.7 * said <= seen <= 1.1 * said, f"{seen / said:.2f} of {said:,} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPES)
def test_the_arithmetic_says_what_an_allocator_sees_of_bfloat16(family: str) -> None:
    said, seen = held(family, "karhunen", 300, 2, torch.bfloat16)
    assert 0.7 * said <= seen <= 1.1 * said, f"{seen / said:.2f} of {said:,} bytes"


UNLIKE = {
    *("mamba",),  # caches nothing
    *("mla",),  # caches another vector than it reads
    *("gemma4", "gemma3n"),  # some layers are of another width, or cache nothing of their own
    *("gpt_neox",),  # the tiny one names KV heads, which the family does not have
}

KARHUNEN = tuple(recipes.make("karhunen").needs())
LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def llama(size: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Llama 3's shapes, without weights."""
    with torch.device("meta"):
        return tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**LLAMA, **SIZES[size]), dtype=dtype)


def placed(model: Any, n_devices: int, memory: str, sequence_tokens: int = 2048, **settings: Any) -> Placement:
    devices = tuple(f"cuda:{i}" for i in range(n_devices))
    free = {**dict.fromkeys(devices, bytes_of(memory)), "cpu": bytes_of("64GB")}
    work = Work(settings.pop("needs", KARHUNEN), (), 16384, sequence_tokens)
    return place(model, devices, work, free, **{"batch": None, **settings})


def test_a_model_of_8_billion_weights_fits_on_a_card_of_24_gb() -> None:
    found = placed(llama("8B"), 1, "24GB")
    card, host = found.plan.devices
    assert found.device_map == {"": "cuda:0"}
    assert card.weights == 2 * 8_030_261_248, "the published number of weights, in bfloat16"
    assert card.gradients["inputs of layers"] == 32 * 2048 * 4096 * 2
    assert card.peak < 24e9
    assert (host.weights, host.peak) == (0, host.statistics)
    assert found.plan.work.batch == 4, "8,192 tokens at a time"
    samples = 2 * 32 * 16384 * 8 * 128 * 4  # keys and values, layers, vectors, heads, float32
    assert samples < host.statistics < 1.1 * samples


def test_a_model_of_70_billion_weights_fits_on_eight_cards_of_24_gb_and_not_on_six() -> None:
    found = placed(llama("70B"), 8, "24GB")
    *cards, host = found.plan.devices
    assert sum(card.weights for card in cards) == 2 * 70_553_706_496
    assert max(card.peak for card in cards) < 24e9
    assert host.device == "cpu"
    assert sum(card.gradients["inputs of layers"] for card in cards) == 80 * 2048 * 8192 * 2
    at_heads = [card.device for card in cards if card.gradients["logits"]]
    assert at_heads in ([], [cards[-1].device]), "only where the head is"
    assert found.plan.line().startswith(f"memory: {len(cards)} devices, the fullest cuda:")
    with pytest.raises(ValueError, match=r"the weights do not fit into the .* GB that are left for them on 6 dev"):
        placed(llama("70B"), 6, "24GB")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_devices": 1, "memory": "12GB"}, "spread the weights over devices .*or use --dtype bfloat16"),
        ({"n_devices": 1, "memory": "18GB", "batch": 4}, r"4 sequences at a time of 2,048 tokens.*\(--batch 1\)"),
        ({"n_devices": 1, "memory": "18GB"}, r"sequences of 1,024 tokens would \(--sequence-tokens 1024\)"),
        ({"n_devices": 1, "memory": "16.1GB"}, "spread the model over devices .*or shorter sequences"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"calibration does not fit.*{words}") as error:
        placed(llama("8B"), **settings)
    assert "\n" not in str(error.value)


def test_statistics_that_the_host_cannot_hold_are_refused() -> None:
    sizes = sizes_of(llama("8B"), {"": "cuda:0"})
    work = Work(KARHUNEN, sizes.full_layers, 16384, 2048)
    with pytest.raises(ValueError, match=r"cpu 4.5 GB of statistics \(4.0 GB free\); use fewer tokens"):
        plan_memory(sizes, work, {"cuda:0": bytes_of("80GB"), "cpu": bytes_of("4GB")})


def test_a_batch_shrinks_until_it_fits() -> None:
    needs = tuple(recipes.make("nova_kv").needs())
    sizes = ("80GB", "18.2GB", "17.8GB")
    assert [placed(llama("8B"), 1, memory, needs=needs).plan.work.batch for memory in sizes] == [4, 2, 1]


def test_logits_of_all_tokens_never_exist_at_once() -> None:
    longer = [placed(llama("8B"), 1, "80GB", sequence_tokens=t).plan.devices[0] for t in (2048, 4096)]
    all_logits = 2048 * 128256 * 4
    assert longer[0].gradients["backward of a layer"] + longer[0].gradients["logits"] < all_logits


def test_a_model_here_fits_what_it_was_told() -> None:
    model, needs = build("llama"), [Need("moments", "key")]
    with pytest.raises(ValueError, match="calibration does not fit: one sequence of 300 tokens"):
        calibrate(model, torch.ones(2, 300, dtype=torch.long), needs, memory=300_000)
    told: list[str] = []
    tokens = torch.randint(1, 99, (2, 300), generator=torch.Generator().manual_seed(0))
    calibrate(model, tokens, needs, memory=30_000_000, on_plan=lambda plan: told.append(plan.line()))
    assert len(told) == 1
    assert "30 MB free beside the weights); 1 sequence of up to 300 tokens at a time" in told[0]
    with pytest.raises(ValueError, match="batch=0 is not a number of sequences"):
        calibrate(model, tokens, needs, batch=0)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNLIKE))
def test_widths_read_off_the_configuration_are_those_that_are_cached(family: str) -> None:
    model = build(family)
    sizes, shapes = sizes_of(model), identity_of(model).layers
    assert len(sizes.layers) == len(shapes)
    for layer, shape in zip(sizes.layers, shapes, strict=True):
        if shape.kind in ("full", "sliding"):
            assert (layer.n_kv_heads, layer.n_query_heads) == (shape.n_kv_heads, shape.n_query_heads)
            assert (layer.key, layer.value) == (shape.n_kv_heads * shape.key_dim, shape.n_kv_heads * shape.value_dim)
    assert sum(sizes.weight_bytes(d) for d in sizes.devices) == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "recipe"),
    [*(("llama", name) for name in ("karhunen", "nova_kv", "spectra", "kvquant")), ("mla", "karhunen")],
)
def test_bytes_of_statistics_are_those_that_are_kept(family: str, recipe: str) -> None:
    model = build(family)
    tokens = torch.randint(1, 99, (3, 300), generator=torch.Generator().manual_seed(0))
    needs = tuple(recipes.make(recipe).needs())
    found = calibrate(model, tokens, needs)
    kept = sum(x.nbytes for layer in found.layers.values() for s in layer.measured.values() for x in vars(s).values())
    said = statistics_bytes(sizes_of(model), Work(needs, tuple(found.layers), tokens.numel(), 300))
    assert kept <= said <= 1.35 * kept  # tokens that a need leaves out are in what is said


def test_devices_are_named_one_or_many() -> None:
    assert devices_of("cpu") == ("cpu",)
    assert devices_of("cuda", local_rank=3) == ("cuda:3",)
    assert devices_of("cuda:0, cuda:1") == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="'gpu' names no device; use cpu"):
        devices_of("gpu")


def test_devices_of_every_kind_are_named_as_torch_and_accelerate_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"cpu": 1, "xpu": 2}
    monkeypatch.setattr("karhunen.calibration.placement.present", lambda: seen)
    assert devices_of("auto") == ("xpu:0", "xpu:1")
    assert devices_of("xpu", local_rank=1) == ("xpu:1",)
    seen.update(xpu=0, mps=1)
    assert devices_of("auto") == devices_of("mps", local_rank=1) == ("mps",)
    seen.update(mps=0)
    with pytest.raises(ValueError, match="there is no accelerator here to spread the model over; use --device cpu"):
        devices_of("auto")
    assert (accelerators(2), accelerators(1, "mps")) == (("cuda:0", "cuda:1"), ("mps",))
