import math

import pytest
import torch
from tests.closeness import LAYERS, assert_near
from tests.hf.test_capture import own_attention
from tests.hf.tiny import build

from karhunen.calibration.measure import measure
from karhunen.calibration.reading import PAIRS_PER_ROW
from karhunen.hf.capture import Observation, capturing
from karhunen.hf.rotary import DetectedRotary, detect_rotary
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples

NEEDS = [
    Need("moments", "key", 1, skip_tokens=2),
    Need("moments", "key", 8, joined=True),
    Need("moments", "value"),
    Need("samples", "key", 4, skip_tokens=1, stride=3),
    Need("queries", "key", 8, skip_tokens=2),
    Need("queries", "key", 8, weighting="attention", skip_tokens=2),
    Need("queries", "key", None),
    Need("queries", "key", 4, joined=True),
    Need("attended", "value", skip_tokens=2),
    Need("output_gram", "value"),
]


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(seed))


def observe(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> list[Observation]:
    seen: list[Observation] = []
    with capturing(model, seen.append) as run:
        run(tokens, mask)
    return seen


def slot(found: DetectedRotary, need: Need) -> Rotary | None:
    return found.key if need.slot == "key" else found.value


def assert_same(one: Moments | Samples, other: Moments | Samples) -> None:
    assert type(one) is type(other)
    for name, tensor in vars(one).items():
        assert_near(tensor, getattr(other, name), LAYERS)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_padded_batch_measures_what_its_sequences_measure_alone(family: str, need: Need, side: str) -> None:
    model = build(family)
    found = detect_rotary(model)
    long, short = ids(1, 31), ids(1, 4, seed=2)
    batch, mask = torch.cat([long, torch.zeros(1, 31, dtype=torch.long)]), torch.ones(2, 31, dtype=torch.long)
    where = slice(27, 31) if side == "left" else slice(0, 4)
    batch[1, where] = short[0]
    mask[1] = 0
    mask[1, where] = 1
    padded = observe(model, batch, mask)
    for together, first, second in zip(padded, observe(model, long), observe(model, short), strict=True):
        rotary = slot(found[together.layer], need)
        apart = measure(need, first, rotary)
        if need.kind != "output_gram":
            apart = apart + measure(need, second, rotary)  # type: ignore[operator]
        assert_same(measure(need, together, rotary), apart)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi", "gpt_neox", "cohere"])
def test_the_frame_of_block_one_holds_the_keys_before_rope(family: str) -> None:
    """As captured behind the key projection (and QK-norm) by a hook."""
    model, before_rope = build(family), []
    for module in model.modules():
        if not hasattr(module, "layer_idx"):
            continue
        if hasattr(module, "k_norm"):
            module.k_norm.register_forward_hook(lambda _m, _a, out: before_rope.append(out))
        elif hasattr(module, "k_proj"):
            shape = (-1, module.head_dim)
            module.k_proj.register_forward_hook(lambda _m, _a, out, s=shape: before_rope.append(out.unflatten(-1, s)))
        elif hasattr(module, "query_key_value"):
            d = module.head_size
            module.query_key_value.register_forward_hook(
                lambda _m, _a, out, d=d: before_rope.append(out.unflatten(-1, (-1, 3 * d))[..., d : 2 * d])
            )
    found = detect_rotary(model)
    before_rope.clear()
    tokens = ids(1, 40)
    seen = observe(model, tokens)
    assert len(before_rope) == len(seen) > 0
    for observation, keys in zip(seen, before_rope, strict=True):
        heads = keys[0] if keys.shape[-3] == observation.key.shape[1] else keys[0].transpose(0, 1)  # [h t d]
        got = measure(Need("samples", "key", 1), observation, found[observation.layer].key)
        assert isinstance(got, Samples)
        assert_near(got.vectors, heads, LAYERS)


def expected_queries(seen: Observation, need: Need, rotary: Rotary | None) -> Moments:
    """The definition, spelled out over every pair of a row and a block, rows all taken."""
    attention = seen.attention
    assert attention is not None
    h, t = seen.key.shape[1], seen.key.shape[2]
    a = own_attention(seen)[0].double()
    group = attention.query.shape[1] // h
    parts: list[Moments] = []
    for head in range(h):
        vectors, weights = [], []
        for query_head in range(head * group, (head + 1) * group):
            for m in range(need.skip_tokens, t):
                for n in range(need.skip_tokens, m + 1):
                    if attention.window_tokens is not None and n <= m - attention.window_tokens:
                        continue
                    block = 0 if need.block_tokens is None else n // need.block_tokens * need.block_tokens
                    x = attention.query[0, query_head, m][None].double() * attention.scale
                    vectors.append(x if rotary is None else rotary.rotate(x, torch.tensor([-block])))
                    p = a[query_head, m, n]
                    weights.append(p * (1 - p) if need.weighting == "attention" else torch.ones((), dtype=p.dtype))
        parts.append(Moments.of(torch.cat(vectors)[None], torch.stack(weights)[None]))
    return Moments(*(torch.cat([getattr(part, name) for part in parts]) for name in ("count", "sum", "outer")))


@pytest.mark.parametrize("weighting", ["uniform", "attention"])
@pytest.mark.parametrize("block_tokens", [None, 1, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "cohere"])
def test_query_moments_are_those_of_all_rows_and_the_blocks_they_see(
    family: str, block_tokens: int | None, weighting: str
) -> None:
    model = build(family)
    found = detect_rotary(model)
    need = Need("queries", "key", block_tokens, weighting=weighting, skip_tokens=2)  # type: ignore[arg-type]
    for seen in observe(model, ids(1, 28)):
        rotary = found[seen.layer].key
        got = measure(need, seen, rotary)
        assert isinstance(got, Moments)
        assert_same(got, expected_queries(seen, need, rotary))


@pytest.mark.parametrize("weighting", ["uniform", "attention"])
def test_drawn_blocks_keep_the_total_weight_and_come_close_to_all_blocks(weighting: str) -> None:
    model = build("llama")
    found = detect_rotary(model)
    seen = observe(model, ids(1, 4 * PAIRS_PER_ROW))[1]
    need = Need("queries", "key", 1, weighting=weighting)  # type: ignore[arg-type]
    drawn = measure(need, seen, found[1].key)
    assert isinstance(drawn, Moments)
    rows = torch.arange(seen.key.shape[2])
    a = own_attention(seen)[0].double()
    weights = a * (1 - a) if weighting == "attention" else a.gt(0).double()
    torch.testing.assert_close(drawn.count, weights[:, rows].sum((1, 2)).unflatten(0, (2, 2)).sum(1), rtol=1e-4, atol=0)
    assert found[1].key is not None
    q = seen.attention.query[0][:, rows].double()[:, :, None] * seen.attention.scale  # type: ignore[union-attr]
    x = found[1].key.rotate(q.expand(-1, -1, a.shape[-1], -1), -torch.arange(a.shape[-1]))
    exact = torch.einsum("qrn,qrnd,qrne->qde", weights[:, rows], x, x).unflatten(0, (2, 2)).sum(1)
    assert (drawn.outer - exact).norm() < 0.02 * exact.norm()


def test_attended_values_weigh_by_squared_attention_per_row() -> None:
    model = build("llama")
    seen = observe(model, ids(1, 28))[1]
    got = measure(Need("attended", "value", skip_tokens=3), seen, None)
    assert isinstance(got, Moments)
    weight = own_attention(seen)[0][:, 3:].square().sum(1).unflatten(0, (2, 2)).sum(1)[:, 3:] / 25
    assert_same(got, Moments.of(seen.value[0, :, 3:], weight))


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "gpt_neox"])
def test_output_gram_is_the_cost_of_a_value_error_behind_the_projection(family: str) -> None:
    model = build(family)
    seen = observe(model, ids(1, 8))[0]
    gram = measure(Need("output_gram", "value"), seen, None)
    assert isinstance(gram, Moments)
    names = ("o_proj", "dense", "c_proj")
    projection = next(m for n, m in model.named_modules() if n.endswith(names) and "0" in n and "mlp" not in n)
    h, e = seen.value.shape[1], seen.value.shape[-1]
    group = seen.attention.query.shape[1] // h  # type: ignore[union-attr]
    error = torch.randn(e, generator=torch.Generator().manual_seed(3))
    expected = 0.0
    for query_head in range(group):  # the group of KV head 0
        x = torch.zeros(1, h * group * e)
        x[0, query_head * e : (query_head + 1) * e] = error
        with torch.no_grad():
            expected += float((projection(x) - projection(torch.zeros_like(x))).square().sum())
    assert float(error.double() @ gram.outer[0] @ error.double()) == pytest.approx(expected, rel=1e-4)


def test_heads_joined_lie_on_the_diagonal() -> None:
    model = build("llama")
    seen = observe(model, ids(1, 28))[0]
    for need in (Need("queries", "key"), Need("output_gram", "value")):
        apart = measure(need, seen, None)
        joined = measure(Need(need.kind, need.slot, joined=True), seen, None)
        assert isinstance(apart, Moments)
        assert isinstance(joined, Moments)
        assert torch.equal(joined.outer[0], torch.block_diag(*apart.outer))
        assert joined.sum.shape == (1, 24)


@pytest.mark.parametrize("kind", ["queries", "attended", "output_gram"])
def test_what_needs_queries_is_refused_where_they_are_out_of_reach(kind: str) -> None:
    seen = observe(build("mla"), ids(1, 8))[0]
    with pytest.raises(ValueError, match=r"layer 0: .*latent attention"):
        measure(Need(kind, "key" if kind == "queries" else "value"), seen, None)  # type: ignore[arg-type]


def test_bfloat16_models_are_measured_in_float64() -> None:
    model = build("llama").to(torch.bfloat16)
    seen = observe(model, ids(1, 64))[0]
    found = detect_rotary(model)[0].key
    one = measure(Need("moments", "key", 8), seen, found)
    assert isinstance(one, Moments)
    assert one.outer.dtype == torch.float64
    assert math.isclose(
        float(one.outer[0].diagonal().sum()), float(seen.key[0, 0].double().square().sum()), rel_tol=1e-6
    )
