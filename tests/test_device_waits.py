"""What the host waits for in a decode step: nothing; and once a layer in a step that codes, whatever the recipe.

Counted on a device that is none (tests/fake_device.py). docs/devices.md says the same in words.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.fake_device import fake_device
from tests.hf.test_cache import fitted, run, tokens
from tests.hf.tiny import build
from tests.synthetic import WINDOW, codec
from tests.test_every_device import N_PROMPT, moved

from karhunen.codec import Codec
from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_of
from karhunen.kernels.paths import forced
from karhunen.recipes import names as recipe_names
from karhunen.windows.small_norm import NormBelow

HEAD = {"num_hidden_layers": 1, "head_dim": 32}
DECODES_PAGES = ("a copy from cuda to cpu (pages.py", "a copy from cpu to cuda (pages.py")
"""A page that is entropy-coded is decoded on the host, a side at a time."""


@pytest.fixture(autouse=True)
def _definitions() -> Iterator[None]:
    with torch.no_grad(), forced("naive"):
        yield


@cache
def one_layer(name: str) -> Codec:
    """Fitted to made-up vectors of that layer's shape."""
    return replace(codec(name), model=identity_of(build("llama", **HEAD)))


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "full"])
def test_a_step_of_any_recipe_waits_for_nothing(name: str) -> None:
    """Nor do those that look at queries. A step that codes waits for a look at the layer's tokens, and for each side
    whose symbols are bit fields for a look at those. Left out is the first step that reads, as below."""
    made = one_layer(name)
    group = made.window.group_tokens(max((layer.granule_tokens for layer in made.layers.values()), default=1))
    with fake_device() as device:
        model: Any = device.model(build("llama", **HEAD))
        enable(model)
        held = CompressedCache(model, made)
        store = held.coded_layers()[0].store
        run(model, tokens(1, WINDOW.sink + WINDOW.recent + 2 * group - 3).to(device.device), held)
        run(model, tokens(1, 1).to(device.device), held)
        quiet, coding = [], []
        while len(quiet) < 3:
            n_coded = store.n_coded
            device.waits.clear()
            run(model, tokens(1, 1).to(device.device), held)
            (quiet if store.n_coded == n_coded else coding).append(list(device.waits))
        how_read = held.report().layers[0].how_read
    if name == "kvtc":
        assert all(wait.startswith(DECODES_PAGES) for waits in quiet for wait in waits)
        assert [len(waits) for waits in quiet] == [4] * len(quiet), "each side: there and back"
        return
    assert quiet == [[]] * 3
    assert bool(coding) == bool(how_read) == any(layer.key for layer in made.layers.values())
    for waits in coding:
        looks = [wait for wait in waits if wait.startswith("a copy from cuda to cpu (layer_store.py")]
        fits = [wait for wait in waits if wait.startswith("_local_scalar_dense (bit_fields.py")]
        assert len(looks) == 1 and len(fits) <= 2
        assert len(waits) == len(looks) + len(fits), waits


@pytest.mark.parametrize(("padded", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_step_waits_for_nothing_and_a_flush_once_a_layer(padded: bool, dtype: torch.dtype) -> None:
    """Also where tokens are kept exact by a rule, and where a batch is padded. Left out is the first step, which lays
    out the codec's tables for the device."""
    with torch.no_grad(), fake_device() as device:
        model = moved(device, "llama", dtype=dtype)
        made = fitted("llama", "karhunen")
        keeping = {i: replace(layer, exceptions=NormBelow("value", 1.0, 0.1)) for i, layer in made.layers.items()}
        made = replace(made, layers=keeping)
        held = CompressedCache(model, made)
        b, page = 2, made.window.group_tokens(1)
        mask = torch.ones(b, N_PROMPT + 2 * page, dtype=torch.int64)
        mask[1, : 9 * padded] = 0
        at = (mask.cumsum(-1) - 1).clamp_min(0).to(device.device)
        mask = mask.to(device.device)
        steps: list[tuple[bool, list[str]]] = []
        for start, stop in [(0, N_PROMPT), *((n, n + 1) for n in range(N_PROMPT, N_PROMPT + 2 * page))]:
            given = {"attention_mask": mask[:, :stop]} if padded else {}
            ids, n_coded = tokens(b, stop - start).to(device.device), held.coded_layers()[0].store.n_coded
            device.waits.clear()
            run(model, ids, held, position_ids=at[:, start:stop], **given)
            steps.append((held.coded_layers()[0].store.n_coded > n_coded, list(device.waits)))
        report = held.report()
        assert all(row.account.exceptions for row in report.layers)
    assert all(row.how_read == "bytes, naive path (forced)" for row in report.layers)
    assert [waits for flushed, waits in steps[2:] if not flushed] == [[]] * (2 * page - 3)
    for waits in [waits for flushed, waits in steps[2:] if flushed]:
        assert len(waits) == len(report.layers) + 1, waits  # a look at each layer's tokens, and where they stand
        assert all(wait.startswith("a copy from cuda to cpu") for wait in waits), waits
