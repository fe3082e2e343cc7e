"""What fits where, against figures worked out by hand and those of the papers."""

import pytest

from karhunen.planning import table
from karhunen.planning.advice import advice
from karhunen.planning.capacity import MOST, Capacity, Machine, Work, capacity, largest, step_seconds, weight_bytes
from karhunen.planning.plan import make_plan
from karhunen.planning.rate import DENSE, Rate, nominal
from karhunen.planning.shape import CacheLayer, ModelShape, Weights

GIB = 2**30
PAPER_RESERVE = 1_120_000_000
"""Bytes that SPECTRA's table of capacities leaves free beside 16.06 GB of weights: 65k and 524k tokens of 128 KiB."""
PAPER = {
    24: {1: 65e3, 3.56: 232e3, 6.56: 427e3, 9.48: 617e3, 12.19: 793e3},
    80: {1: 524e3, 3.56: 1.86e6, 6.56: 3.44e6, 9.48: 4.97e6, 12.19: 6.39e6},
}


def model(name: str) -> ModelShape:
    found = table.find(name)
    assert found is not None
    return found


def windowed(bits: float, layers: tuple[CacheLayer, ...], sink: int = 4, recent: int = 128) -> Rate:
    """A rate whose first `sink` and newest `recent` tokens are exact."""
    exact = sink + recent
    return Rate("w", dict.fromkeys(layers, bits), lambda n: (min(n, exact), max(0, n - exact)), "window")


@pytest.mark.parametrize("gibibytes", PAPER)
def test_the_capacities_of_spectras_paper_come_out(gibibytes: int) -> None:
    """Llama 3.1 8B in float16. Its 24 and 80 GB are GiB: 24·10⁹ bytes hold 60k tokens beside the weights, not 65k."""
    shape = model("llama-3.1-8b")
    machine = Machine(gibibytes * GIB, reserve_bytes=PAPER_RESERVE)
    for ratio, n_tokens in PAPER[gibibytes].items():
        rate = DENSE if ratio == 1 else nominal(ratio, shape)
        found = capacity(shape, rate, machine, Work(weights="float16", cache_dtype="float16"))
        assert found.max_context == pytest.approx(n_tokens, rel=0.02)
    decimal = capacity(shape, DENSE, Machine(gibibytes * 10**9), Work())
    assert decimal.max_context is not None
    assert decimal.max_context < 0.94 * PAPER[gibibytes][1]


def test_five_percent_of_24_gib_reproduce_them_too() -> None:
    shape, machine = model("llama-3.1-8b"), Machine(24 * GIB, reserve_bytes=24 * GIB // 20)
    for ratio in (1, 12.19):
        rate = DENSE if ratio == 1 else nominal(ratio, shape)
        assert capacity(shape, rate, machine, Work()).max_context == pytest.approx(PAPER[24][ratio], rel=0.02)


def test_a_cache_of_70b_is_what_the_formula_gives() -> None:
    """2 · 80 layers · 8 heads · 128 · 32,000 tokens · 16 sequences · 2 bytes; half of it is the 84 GB one reads of."""
    shape = model("llama-3.1-70b")
    held = capacity(shape, DENSE, Machine(), Work(context=32000, batch=16)).held_bytes
    assert held == 2 * 80 * 8 * 128 * 32000 * 16 * 2 == 167_772_160_000
    assert held / 2 == pytest.approx(84e9, rel=0.002)
    assert capacity(shape, DENSE, Machine(), Work(context=32768, batch=16)).held_bytes == 171_798_691_840
    assert capacity(shape, DENSE, Machine(), Work(32000, 16, "float8")).held_bytes == held / 2


def test_what_is_longest_fits_and_one_more_does_not() -> None:
    shape = model("gemma3-4b")
    rate = windowed(2.0, shape.codable)
    machine, work = Machine(16 * GIB, 2, GIB), Work(context=8192, batch=3)
    found = capacity(shape, rate, machine, work)
    assert found.max_context is not None
    assert found.max_batch is not None
    room = 2 * 15 * GIB - weight_bytes(shape, work)
    for n, fits in ((found.max_context, True), (found.max_context + 1, False)):
        assert (3 * rate.held_bytes(shape, n) <= room) == fits
    for n, fits in ((found.max_batch, True), (found.max_batch + 1, False)):
        assert (n * rate.held_bytes(shape, 8192) <= room) == fits


def test_sliding_layers_and_the_window_keep_a_short_text_from_being_smaller() -> None:
    """Of Gemma 3 270M's layers 3 grow and 15 hold at most 512 tokens; a token of a layer is 512 numbers."""
    shape = model("gemma3-270m")
    rate = windowed(2.0, shape.codable)
    assert rate.held_bytes(shape, 132) == shape.dense_bytes(132) == 18 * 132 * 512 * 2
    n = 4096
    assert rate.held_bytes(shape, n) == 3 * (132 * 512 * 2 + (n - 132) * 512 * 2 / 8) + 15 * 512 * 512 * 2
    assert rate.nominal_ratio(shape) == 8
    assert rate.ratio(shape, 132) == 1
    assert rate.ratio(shape, n) == pytest.approx((3 * n + 15 * 512) / (3 * (132 + (n - 132) / 8) + 15 * 512))
    assert rate.ratio(shape, 1 << 30) == pytest.approx(8, abs=1e-3)


def test_a_latent_is_cached_in_place_of_keys_and_values() -> None:
    """DeepSeek-V3: 512 numbers and 64 rotary ones in 61 layers, for 128 heads."""
    shape = model("deepseek-v3")
    assert shape.dense_bytes(1) == 61 * (512 + 64) * 2 == 70_272
    assert [layer.kind for layer in shape.codable] == ["latent"] * 61


def test_a_step_reads_the_weights_once_and_every_sequences_cache() -> None:
    shape, machine = model("llama-3.1-8b"), Machine(bandwidth=10**12, n_devices=2)
    read = 2 * (8_030_261_248 - 128256 * 4096)  # a row of the input embedding is read, not all
    for batch in (1, 64):
        seconds = step_seconds(shape, DENSE, machine, Work(context=1000, batch=batch), batch)
        assert seconds == pytest.approx((read + batch * 1000 * 131072) / 2e12)


def test_experts_are_read_as_far_as_tokens_visit_them() -> None:
    """Of 8 experts a token visits 2: one token reads a quarter, two tokens 1 − (3/4)² of them, many all."""
    weights = Weights(1000, n_expert=800, n_experts=8, n_used=2)
    assert weights.read_bytes(1) == 2 * (200 + 200)
    assert weights.read_bytes(2) == 2 * (200 + 800 * (1 - 0.75**2))
    assert weights.read_bytes(1000) == pytest.approx(2 * 1000)
    assert weights.held_bytes(8) == 1000


def test_mxfp4_experts_of_gpt_oss_take_what_their_files_do() -> None:
    assert weight_bytes(model("gpt-oss-20b"), Work()) == pytest.approx(13.76e9, rel=0.01)
    assert weight_bytes(model("gpt-oss-120b"), Work()) == pytest.approx(65.25e9, rel=0.01)


def test_a_state_does_not_grow_and_nothing_limits_a_model_of_states() -> None:
    layer = CacheLayer("linear", state=400, recurrent=300, note="recurrent state")
    shape = ModelShape("m", "mamba", "", (layer,) * 3, Weights(1000))
    assert shape.dense_bytes(1) == shape.dense_bytes(10**6) == 3 * (400 * 2 + 300 * 4) == 6000
    found = capacity(shape, nominal(8, shape), Machine(10**6), Work(context=1))
    assert found.max_context is None
    assert found.unlimited
    assert found.max_batch == (10**6 - 2000) // 6000
    assert advice(shape, Work(), None, [(DENSE, found)])[0].said == "nothing to code"
    assert largest(lambda n: n <= 12) == 12
    assert largest(lambda _: True) == MOST


def test_weights_that_do_not_fit_leave_no_room_and_are_said() -> None:
    plan = make_plan(model("llama-3.1-70b"), Machine(24 * GIB), Work(), [])
    assert plan.dense.max_context == plan.dense.max_batch == 0
    assert "the weights alone do not fit" in [remark.said for remark in plan.warnings]


def test_advice_is_by_length_batch_and_kind() -> None:
    def said(name: str, context: int, batch: int) -> str:
        shape = model(name)
        plan = make_plan(shape, Machine(80 * GIB), Work(context, batch), [windowed(2.0, shape.codable)])
        return "; ".join(remark.said for remark in plan.advice)

    assert said("llama-3.1-8b", 2000, 1).startswith("little to gain below 4,096 tokens")
    assert said("llama-3.1-8b", 65536, 8).startswith("worth it; ")
    assert "worth it if memory" in said("llama-3.1-8b", 16384, 1)
    assert "batches gain more" in said("llama-3.1-8b", 32768, 1)
    assert "one sequence gains too" in said("llama-3.2-1b", 120000, 1)
    assert "grouped queries" in said("llama-3.1-8b", 65536, 8)
    assert "latent already" in said("deepseek-v2-lite", 65536, 8)
    assert "a hybrid" in said("gemma3-27b", 65536, 8)
    assert "a hybrid" in said("qwen3-next-80b-a3b", 65536, 8)
    assert said("phi-4-mini", 65536, 8) == "nothing to code"


def test_warnings_are_by_model_and_machine() -> None:
    def said(name: str, **machine: int) -> set[str]:
        plan = make_plan(model(name), Machine(80 * GIB, **machine), Work(context=40000), [])
        return {remark.said for remark in plan.warnings}

    assert "the keys have a bias" in said("qwen2.5-7b")
    assert {"the keys have a bias", "the softmax has learned sinks"} <= said("gpt-oss-20b")
    assert not said("llama-3.1-8b")
    assert "longer than the model reads" in said("phi-4")
    assert "the cache is not spread evenly" in said("qwen2.5-7b", n_devices=8)
    assert "seconds are floors" in said("llama-3.1-8b", bandwidth=10**12)


def test_wrong_values_are_refused_when_they_are_made() -> None:
    shape = model("llama-3.1-8b")
    unknown = ModelShape("m", "", "", shape.layers)
    cases = (
        (lambda: Machine(n_devices=0), "0 devices"),
        (lambda: Machine(10, reserve_bytes=10), "leaves nothing"),
        (lambda: Work(context=0), "0 tokens"),
        (lambda: Work(cache_dtype="bf16"), "unknown dtype 'bf16'"),
        (lambda: nominal(0.5, shape), "not a compression ratio"),
        (lambda: CacheLayer("sliding"), "window of None"),
        (lambda: Weights(10, n_expert=11), "parameters of 10"),
        (lambda: Weights(10, n_experts=2, n_used=3), "3 of 2 experts"),
        (lambda: weight_bytes(unknown, Work()), "--weights 16GB"),
    )
    for make, words in cases:
        with pytest.raises(ValueError, match=words):
            make()
    given = capacity(unknown, DENSE, Machine(24 * GIB), Work(weights=16 * 10**9))
    assert isinstance(given, Capacity)
    assert given.max_context == (24 * GIB - 16 * 10**9) // 131072
