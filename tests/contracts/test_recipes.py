"""Laws of every recipe, found by folder: a new file is held to them with no list edited."""

import gc
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import accumulate, cycle, pairwise

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.synthetic import SMALL, cached, codec, quick, statistics
from torch import Tensor

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.recipe import Recipe, recipe_kinds
from karhunen.recipes import make, names
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import SLOTS
from karhunen.store.layer_store import LayerStore
from karhunen.windows.partition import Place
from karhunen.windows.score import Queries

N_TOKENS = 101  # several pages, several KIVI blocks, and neither a multiple of any

SHAPES = {
    "32": SMALL,
    "96_gqa": LayerShape("full", 1, 7, 96, 96),
    "80_batch_of_2": LayerShape("full", 1, 1, 80, 80),
    "key_32_value_48": LayerShape("full", 2, 4, 32, 48),
}

CHUNKS = {"ones": [1], "fives": [5], "sixty_fours": [64], "mixed": [1, 5, 64, 3, 20]}

RECIPES = pytest.mark.parametrize("name", names())
CODING = [name for name in names() if make(name).key is not None]


def store_of(made: Codec) -> LayerStore:
    return LayerStore(made.layers.get(0), made.window)


def filled(made: Codec, key: Tensor, value: Tensor, sizes: Iterable[int] = (10**9,)) -> LayerStore:
    store = store_of(made)
    for start, stop in spans(key.shape[2], sizes):
        part = key[:, :, start:stop]
        asking = None if made.window.reads == "never" else Queries(part.repeat_interleave(2, dim=1), 0.2)
        store.append(part, value[:, :, start:stop], queries=asking)
    return store


def spans(n: int, sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    edges = [0]
    for edge in accumulate(cycle(sizes)):
        edges.append(min(edge, n))
        if edge >= n:
            break
    return pairwise(edges)


def contents(store: LayerStore) -> dict[str, Tensor]:
    """Everything held, without spare room."""
    found = {}
    for slot in SLOTS:
        found[f"{slot}.sink"], found[f"{slot}.recent"] = store.exact(slot)
        if (packed := store.packed(slot)) is not None:
            found[f"{slot}.planes"] = packed.planes
            found |= {f"{slot}.{name}": tensor for name, tensor in packed.side.items()}
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def differing(a: LayerStore, b: LayerStore) -> list[str]:
    mine, theirs = contents(a), contents(b)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not same_bits(mine[name], theirs[name])]


@RECIPES
def test_a_recipe_survives_the_way_through_json(name: str) -> None:
    recipe = make(name)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict(recipe.to_dict()).fingerprint() == recipe.fingerprint()


def test_equal_recipes_have_equal_fingerprints() -> None:
    assert make("spectra", bits=2) == make("spectra", bits=2.0)
    assert make("spectra", bits=2).fingerprint() == make("spectra", bits=2.0).fingerprint()
    prints = [make(name).fingerprint() for name in names()] + [make("kivi", bits=3).fingerprint()]
    assert len(set(prints)) == len(prints)


@RECIPES
def test_a_recipe_is_named_as_its_file(name: str) -> None:
    assert make(name).name == name


@RECIPES
def test_an_unknown_field_is_refused_with_the_known_ones(name: str) -> None:
    data = make(name).to_dict()
    with pytest.raises(ValueError, match=r"unknown Recipe field\(s\) \['colour'\]; known: \['key', 'name'"):
        Recipe.from_dict({**data, "colour": 1})


@RECIPES
def test_an_unknown_kind_is_refused_with_the_known_ones(name: str) -> None:
    data = make(name).to_dict()
    with pytest.raises(ValueError, match=r"unknown kind 'Guess'; known: .*'SinkRecent'"):
        Recipe.from_dict({**data, "window": {"class": "Guess"}})


@RECIPES
def test_an_unknown_option_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe {name} has no option \['colour'\]; known: "):
        make(f"{name}:colour=1")


def test_every_kind_of_a_recipe_is_found_by_folder() -> None:
    used: set[str] = set()

    def walk(data: object) -> None:
        if isinstance(data, dict):
            used.update({data["class"]} if "class" in data else ())
            for value in data.values():
                walk(value)

    for name in names():
        walk(make(name).to_dict())
    assert used <= recipe_kinds().keys()
    assert {"Recipe", "Side", "SinkRecent", "Affine"} <= used


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CODING)
def test_appending_in_any_way_gives_the_same_bytes(name: str, shape: str) -> None:
    made = codec(name, SHAPES[shape])
    key, value = cached(SHAPES[shape], 2 if "batch" in shape else 1, N_TOKENS)
    at_once = filled(made, key, value)
    assert at_once.n_coded > 0
    for label, sizes in CHUNKS.items() if SHAPES[shape] is SMALL else [("mixed", CHUNKS["mixed"])]:
        assert differing(at_once, filled(made, key, value, sizes)) == [], label


@pytest.mark.parametrize("name", CODING)
def test_rows_of_a_batch_are_coded_as_if_alone(name: str) -> None:
    key, value = cached(SMALL, 2, N_TOKENS)
    together = filled(codec(name), key, value)
    for row in (0, 1):
        alone = filled(codec(name), key[row : row + 1], value[row : row + 1])
        together_row = {k: v[row : row + 1] for k, v in contents(together).items()}
        assert all(same_bits(tensor, together_row[k]) for k, tensor in contents(alone).items())


@pytest.mark.parametrize("name", CODING)
def test_a_token_is_encoded_once_and_its_bytes_never_change(name: str) -> None:
    key, value = cached(SMALL, 1, N_TOKENS)
    store = store_of(codec(name))
    seen: dict[str, Tensor] = {}
    n_grown = 0
    for start, stop in spans(N_TOKENS, [7]):
        store.append(key[:, :, start:stop], value[:, :, start:stop])
        now = {k: v.clone() for k, v in contents(store).items() if not k.endswith(("sink", "recent"))}
        for part, before in seen.items():
            assert same_bits(before, now[part][..., : before.shape[-1]]), part
            n_grown += now[part].shape[-1] > before.shape[-1]
        seen = now
    assert n_grown > 0


@pytest.mark.parametrize("name", CODING)
def test_decoding_is_deterministic_and_independent_of_what_follows(name: str) -> None:
    key, value = cached(SMALL, 1, N_TOKENS)
    early, late = filled(codec(name), key[:, :, :90], value[:, :, :90]), filled(codec(name), key, value)
    coded = slice(0, codec(name).window.sink_tokens + early.n_coded)
    for first, again, longer in zip(early.read(), early.read(), late.read(), strict=True):
        assert torch.equal(first, again)
        assert_near(first[:, :, coded], longer[:, :, coded], SUM)


@pytest.mark.parametrize("name", CODING)
def test_exact_tokens_are_bit_exact_and_coded_ones_are_closer_than_zero(name: str) -> None:
    key, value = cached(SMALL, 1, N_TOKENS)
    store = filled(codec(name), key, value)
    first, last = codec(name).window.sink_tokens, codec(name).window.sink_tokens + store.n_coded
    for x, got in zip((key, value), store.read(), strict=True):
        assert torch.equal(got[:, :, :first], x[:, :, :first])
        assert torch.equal(got[:, :, last:], x[:, :, last:])
        error = (got - x)[:, :, first:last].norm() / x[:, :, first:last].norm()
        assert 0 < error < 0.8


@RECIPES
def test_the_partition_of_any_number_of_tokens_covers_each_once(name: str) -> None:
    window = make(name).window
    for granule in (1, 3, 32):
        coded = [0]
        for n in [*range(40), *range(120, 420, 7)]:
            parts = window.partition(n, granule)
            assert parts.n_tokens == n
            assert sum(parts.count(place) for place in Place) == n
            assert parts.count(Place.CODED) % granule == 0
            coded.append(parts.count(Place.CODED))
        assert coded == sorted(coded), "a coded token never comes back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@RECIPES
def test_the_report_is_the_sum_of_the_bytes_held(name: str, dtype: torch.dtype) -> None:
    key, value = (x.to(dtype) for x in cached(SMALL, 2, N_TOKENS))
    store = filled(codec(name), key, value, [80, 1, 5])
    held = store.tensors().values()
    account = store.account()
    assert account.held == sum(tensor.nbytes for tensor in held) > 0
    assert account.dense == key.nbytes + value.nbytes
    assert account.n_elements == key.numel() + value.numel()
    if make(name).key is not None:
        assert account.codes > 0
        assert account.coded_ratio > 1.5


@RECIPES
def test_a_store_holds_nothing_but_what_it_reports(name: str) -> None:
    """No view keeps a larger tensor alive, and no tensor is hidden in an attribute."""
    key, value = cached(SMALL, 1, 160)
    store = filled(codec(name), key, value, [140, 1, 5])
    held = store.tensors()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held.values() if t.numel()}
    assert sum(storages.values()) == sum(tensor.nbytes for tensor in held.values())
    # the codec is shared by every cache and counted as tables; what else is reachable is the store's own
    shared = {id(t) for t in reachable(store.codec)} if store.codec else set()
    own = [t for t in reachable(store) if id(t) not in shared]
    hidden = [tuple(t.shape) for t in own if t.numel() and t.untyped_storage().data_ptr() not in storages]
    assert hidden == []


def reachable(root: object) -> list[Tensor]:
    """Tensors that an object keeps alive, through attributes and containers."""
    found, seen, waiting = [], set(), [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict | list | tuple | set) or type(item).__module__.startswith("karhunen"):
            waiting.extend(gc.get_referents(item))
    return found


@pytest.mark.parametrize("name", CODING)
def test_a_saved_codec_is_the_same_codec(name: str, tmp_path) -> None:
    made = codec(name)
    made.save_pretrained(tmp_path / "codec")
    loaded = Codec.from_pretrained(tmp_path / "codec")
    assert loaded.fingerprint() == made.fingerprint()
    assert loaded.model == made.model
    assert loaded.origin == made.origin
    key, value = cached(SMALL, 1, 80)
    ours, theirs = filled(made, key, value), filled(loaded, key, value)
    assert differing(ours, theirs) == []
    assert all(torch.equal(a, b) for a, b in zip(ours.read(), theirs.read(), strict=True))
    assert theirs.account() == ours.account()


@RECIPES
def test_fitting_twice_gives_the_same_codec(name: str) -> None:
    recipe = quick(make(name))
    assert fit(recipe, statistics(recipe, SMALL)).fingerprint() == fit(recipe, statistics(recipe, SMALL)).fingerprint()


@pytest.mark.parametrize("n_kept", [0, 2, 41, 85])
@pytest.mark.parametrize("name", CODING)
def test_a_cropped_store_goes_on_as_the_shorter_one(name: str, n_kept: int) -> None:
    """Removing tokens and adding others leaves no trace of the removed ones, except decoded values of a cut block."""
    key, value = cached(SMALL, 1, N_TOKENS)
    store = filled(codec(name), key, value)
    before = [x[:, :, :n_kept] for x in store.read()]
    store.crop(n_kept)
    assert store.n_tokens == n_kept
    if n_kept:
        for was, now in zip(before, store.read(), strict=True):
            assert_near(now, was, SUM)
        assert store.account().held == sum(t.untyped_storage().nbytes() for t in store.tensors().values())
    store.append(key[:, :, n_kept:], value[:, :, n_kept:])
    assert store.n_tokens == N_TOKENS
    again, whole = store.read()[0], filled(codec(name), key, value).read()[0]
    assert (again - whole).norm() <= 0.2 * whole.norm()
    assert torch.equal(again[:, :, -10:], key[:, :, -10:])


@pytest.mark.parametrize("name", ["int4", "karhunen"])
@pytest.mark.parametrize("d", [80, 96, 112])
def test_odd_sizes_are_cropped_and_go_on(d: int, name: str) -> None:
    shape = LayerShape("full", 1, 7, d, d)
    key, value = cached(shape, 1, N_TOKENS)
    cut, short = (filled(codec(name, shape), x, y) for x, y in ((key, value), (key[:, :, :41], value[:, :, :41])))
    cut.crop(41)
    for store in (cut, short):
        store.append(key[:, :, 41:], value[:, :, 41:])
    for mine, whole in zip(cut.read(), short.read(), strict=True):
        assert mine.shape == whole.shape
        assert (mine - whole).norm() <= 0.2 * whole.norm()


@pytest.mark.parametrize("name", CODING)
def test_selecting_rows_selects_every_part(name: str) -> None:
    key, value = cached(SMALL, 3, N_TOKENS)
    rows = torch.tensor([2, 0, 0, 1])
    store = filled(codec(name), key, value)
    before = store.read()
    store.select(rows)
    for was, now in zip(before, store.read(), strict=True):
        assert torch.equal(now, was[rows])
    assert differing(store, filled(codec(name), key[rows], value[rows])) == []


@pytest.mark.parametrize("name", CODING)
def test_a_copy_and_its_original_go_separate_ways(name: str) -> None:
    key, value = cached(SMALL, 1, N_TOKENS)
    store = filled(codec(name), key[:, :, :70], value[:, :, :70])
    twin = deepcopy(store)
    assert twin.codec is store.codec, "tables are shared"
    twin.append(-key[:, :, 70:], -value[:, :, 70:])
    store.append(key[:, :, 70:], value[:, :, 70:])
    assert differing(store, filled(codec(name), key, value)) == []
    assert differing(store, twin) != []


@pytest.mark.parametrize("name", CODING)
def test_a_reset_store_starts_as_a_new_one(name: str) -> None:
    key, value = cached(SMALL, 1, N_TOKENS)
    store = store_of(codec(name))
    store.append(-key, -value, torch.tensor([5]))
    store.reset()
    assert store.n_tokens == store.account().held == 0
    store.append(key, value)
    assert differing(store, filled(codec(name), key, value)) == []


@pytest.mark.parametrize("name", CODING)
def test_strided_input_is_coded_as_its_copy(name: str) -> None:
    """Models hand over views: heads transposed, slices of a fused projection."""
    key, value = cached(SMALL, 1, N_TOKENS)
    fused = torch.cat([key, value], dim=1).transpose(1, 2).contiguous().transpose(1, 2)
    assert differing(filled(codec(name), fused[:, :2], fused[:, 2:]), filled(codec(name), key, value)) == []


@pytest.mark.parametrize("name", CODING)
def test_positions_decide_the_frame_and_padding_moves_them(name: str) -> None:
    """A row padded on the left by p tokens is coded as the unpadded row: its positions, not its indices, count."""
    pad = 6
    key, value = cached(SMALL, 1, N_TOKENS)
    padded = [torch.cat([torch.ones_like(x[:, :, :pad]), x], dim=2) for x in (key, value)]
    made = codec(name)
    shifted = LayerStore(made.layers[0], made.window)
    shifted.append(padded[0], padded[1], torch.tensor([pad]))
    side = made.layers[0].key
    first, n = shifted.partition.count(Place.EXACT), shifted.n_coded
    first = made.window.sink_tokens
    positions = torch.arange(first - pad, first - pad + n)[None]
    expected = side.encode(padded[0][:, :, first : first + n], positions)
    got = shifted.packed("key")
    assert got is not None
    assert torch.equal(got.planes, expected.planes)


def test_a_switch_is_written_as_in_python_or_in_lower_case() -> None:
    for text, joined in (("true", True), ("True", True), ("false", False), ("False", False)):
        recipe = make(f"karhunen:joined={text}")
        assert recipe.key is not None and recipe.key.frame.joined is joined
        assert recipe.value is not None and recipe.value.frame.joined is joined
    assert make("karhunen:joined=false") == make("karhunen")
