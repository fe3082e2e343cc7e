"""Mutated files of every kind that karhunen reads, with their checksums made right again.

A case is a target, a subject and a seed: the same three make the same bytes. What was found once is kept by name in
`tests/fuzzing_found.json` and tried again by `tests/test_fuzzing.py`; `benchmarks/fuzz.py` looks for more.

    mutated bytes ─▶ read ─▶ ValueError, in one line         refused
                          ─▶ what was read is used as usual  finite numbers, or ValueError in one line
"""

import copy
import json
import random
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.evaluation.test_report import made_up
from tests.pages.test_page_codec import given, pages_of
from tests.synthetic import SMALL, cached, codec, quick, statistics
from torch import Tensor

from karhunen import folder as folders
from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.codec import Codec
from karhunen.evaluation.results.compare import compare
from karhunen.evaluation.results.report import page as report_page
from karhunen.evaluation.results.result import fingerprint_of, read_result, write_result
from karhunen.evaluation.results.rows import rows_of
from karhunen.fitting import fit
from karhunen.folder import CONFIG, TENSORS
from karhunen.pages.frame import HEADER, read, seal
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics, save_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.store.layer_store import LayerStore

FOUND = Path(__file__).parent / "fuzzing_found.json"
SECONDS = 20.0
"""Of one case: more is a fault, too."""
RECIPES = ("int4", "karhunen", "nova_kv", "kivi", "spectra", "kvquant", "turboquant", "kvtc", "commvq", "kitty", "fp8")
NUMBERS = (
    -1, 0, 1, 2, 7, 63, 64, 255, 256, 65536, 10**9, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e30, -1e-30, 5e-324,
)  # fmt: skip
OTHERS = (None, True, False, "", "none", "float32", "../x", "\0", [], {}, [1, 2], [[]], {"map": []}, {"class": "KLT"})


def _single(error: BaseException) -> bool:
    return type(error) is ValueError and "\n" not in str(error) and bool(str(error))


class Found(Exception):
    """A case that was neither refused in one line nor used."""


def run_case(target: str, subject: str, seed: int, folder: Path) -> str:
    """`refused` or `used`; Found with what went wrong otherwise."""
    try:
        with _limited():
            return TARGETS[target](subject, random.Random(f"{target} {subject} {seed}"), folder)
    except Found:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Found(f"{type(error).__name__}: {error}") from error


@contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError after so many seconds of the processor."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {SECONDS:g} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _tried(read_it: Callable[[], Any], use: Callable[[Any], None]) -> str:
    """What is read may be refused; what was read is used, and may be refused then only where `use` allows it."""
    try:
        made = read_it()
    except ValueError as error:
        if not _single(error):
            raise Found(f"{type(error).__name__} in place of one line: {error}") from error
        return "refused"
    use(made)
    return "used"


# codecs and statistics: a description and tensors


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data[:40]) if isinstance(data, list) else ()
    return [path, *(place for key, value in pairs for place in _places(value, (*path, key)))]


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def mutate_json(rng: random.Random, data: Any) -> None:
    """Change, drop, double or exchange something, in place."""
    places = _places(data)[1:]
    path = rng.choice(places)
    at, key = _at(data, path[:-1]), path[-1]
    kind = rng.random()
    if kind < 0.12:
        del at[key]
    elif kind < 0.2 and isinstance(at, list):
        at.insert(key, copy.deepcopy(at[key]))
    elif kind < 0.2:
        at[rng.choice(["x", "", "class", "map", *map(str, at)])] = copy.deepcopy(at[key])
    elif kind < 0.45:  # of another place: the right kind more often than not
        like = [place for place in places if type(_at(data, place)) is type(at[key])]
        at[key] = copy.deepcopy(_at(data, rng.choice(like)))
    elif kind < 0.7 and isinstance(at[key], int | float) and not isinstance(at[key], bool):
        at[key] = rng.choice([at[key] + 1, at[key] - 1, at[key] * 2, -at[key], float(at[key]), rng.choice(NUMBERS)])
    else:
        at[key] = copy.deepcopy(rng.choice([*NUMBERS, *OTHERS]))


def _one(x: Tensor, rng: random.Random, value: float) -> Tensor:
    made = x.clone(memory_format=torch.contiguous_format)
    if made.numel():
        made.view(-1)[rng.randrange(made.numel())] = value if made.is_floating_point() else int(max(-9, min(value, 99)))
    return made


def _flipped(x: Tensor) -> Tensor:
    """float8 has no flip of its own."""
    return x.view(torch.uint8).flip(-1).view(x.dtype) if x.element_size() == 1 else x.flip(-1)


TENSOR_CHANGES: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda x, _: x[:0], lambda x, _: x[:-1], lambda x, _: x[..., :-1], lambda x, _: x.flatten(), lambda x, _: x[None],
    lambda x, _: x.mT if x.ndim > 1 else x, lambda x, _: torch.cat([x, x]), lambda x, _: x[..., :1],
    lambda x, _: -x.float(), lambda x, _: x.double(), lambda x, _: x.half(), lambda x, _: x.int(),
    lambda x, _: (x.float() * 3).to(x.dtype), lambda x, _: (x.float() * 1e30).to(x.dtype),
    lambda x, _: torch.zeros_like(x), lambda x, _: torch.ones_like(x),
    lambda x, _: _flipped(x), lambda x, rng: _one(x, rng, float("nan")), lambda x, rng: _one(x, rng, 1e38),
    lambda x, rng: _one(x, rng, -1e5), lambda x, rng: _one(x, rng, 1e-42), lambda x, rng: _one(x, rng, float("inf")),
)  # fmt: skip


def mutate_tensors(rng: random.Random, tensors: dict[str, Tensor]) -> None:
    """Change, drop or exchange one, in place."""
    name, other = (rng.choice(sorted(tensors)) for _ in range(2))
    kind = rng.random()
    if kind < 0.06:
        del tensors[name]
    elif kind < 0.2:
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif tensors[name].ndim:
        tensors[name] = rng.choice(TENSOR_CHANGES)(tensors[name], rng)


def mutate_folder(rng: random.Random, body: str, whole: Callable[[], Path], folder: Path) -> None:
    """A copy of `whole()` in `folder` with one to three changes, its checksums right."""
    config, tensors = json.loads((whole() / CONFIG).read_text()), load_file(whole() / TENSORS)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if tensors and rng.random() < 0.4:
            mutate_tensors(rng, tensors)
        else:
            mutate_json(rng, config[body])
    folder.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS)
    config["tensors_sha256"] = folders._sha256(folder / TENSORS)  # pyright: ignore[reportPrivateUsage]
    said = {k: v for k, v in config.items() if k not in ("format", "version", "tensors_sha256", "body_sha256")}
    config["body_sha256"] = folders._body_sha256(said)  # pyright: ignore[reportPrivateUsage]
    (folder / CONFIG).write_text(json.dumps(config))


@cache
def _whole_codec(name: str, root: Path) -> Path:
    codec(name).save_pretrained(root / f"whole-{name}")
    return root / f"whole-{name}"


@cache
def _whole_statistics(name: str, root: Path) -> Path:
    save_statistics(statistics(quick(make(name)), SMALL), root / f"statistics-{name}")
    return root / f"statistics-{name}"


QUERY = torch.randn(1, SMALL.n_query_heads, 1, SMALL.key_dim, generator=torch.Generator().manual_seed(3))


def _use_codec(made: Codec) -> None:
    """As a cache does: code more tokens than the window holds, decode them, attend to them. One that says it is of
    another model is refused by any cache of this one."""
    if made.model.layers != (SMALL,):
        return
    key, value = cached(SMALL, 1, 96)
    for layer in made.layers.values():
        store = LayerStore(layer, made.window)
        store.append(key, value)
        if not all(bool(x.isfinite().all()) for x in store.read()):
            raise Found("decodes finite vectors to NaN or infinity")
        held = store.snapshot()
        if held.n_coded:
            reader = reader_of(layer, held)
            if reader.mode != "decoded":
                out = fused.attend(reader, held, QUERY, scale=SMALL.key_dim**-0.5)
                if not bool(out.isfinite().all()):
                    raise Found("attends to NaN or infinity")


def _artifact(subject: str, rng: random.Random, folder: Path) -> str:
    mutate_folder(rng, "codec", lambda: _whole_codec(subject, folder.parent), folder)
    return _tried(lambda: Codec.from_pretrained(folder), _use_codec)


def _statistics(subject: str, rng: random.Random, folder: Path) -> str:
    mutate_folder(rng, "statistics", lambda: _whole_statistics(subject, folder.parent), folder)
    recipe = quick(make(subject))

    return _tried(lambda: load_statistics(folder), lambda made: _fitted(recipe, made))


def _fitted(recipe: Recipe, made: Statistics) -> None:
    """What can be read can be fitted, or is refused in one line."""
    _tried(lambda: fit(recipe, made), _use_codec)


# pages


@cache
def _whole_page(name: str) -> bytes:
    return pages_of(name).encode({0: given(64)}, torch.arange(64))


def _page(subject: str, rng: random.Random, folder: Path) -> str:
    whole = _whole_page(subject)
    made = bytearray(whole)
    end = HEADER.size + 40 if rng.random() < 0.5 else len(whole)
    for _ in range(rng.randrange(1, 5)):
        at, kind = rng.randrange(8, end), rng.random()
        if kind < 0.6:
            made[at % len(made)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind < 0.75:
            made[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 64, 65, 1 << 16, (1 << 31) - 1, (1 << 32) - 1]))
        elif kind < 0.85:
            del made[at : at + rng.randrange(1, 9)]
        elif kind < 0.95:
            made[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            del made[max(at, 100) :]
    if rng.random() < 0.7:
        made[16:24] = struct.pack("<Q", len(made))
    page = seal(bytes(made)) if rng.random() < 0.95 else bytes(made)

    def use(got: dict[int, tuple[Tensor, Tensor]]) -> None:
        n = read(page).n_tokens
        if any(x.shape[1] != n for pair in got.values() for x in pair):
            raise Found(f"a page of {n} tokens decodes to {[x.shape for pair in got.values() for x in pair]}")

    return _tried(lambda: pages_of(subject).decode(page), use)


# results


def _result(subject: str, rng: random.Random, folder: Path) -> str:
    given_result = made_up(subject, 2.0, 0.1)
    configuration = given_result.pop("configuration")
    given_result.pop("fingerprint")
    folder.mkdir(exist_ok=True)
    file = write_result(folder, configuration, given_result)
    text = file.read_text()
    if rng.random() < 0.85:
        data = json.loads(text)
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate_json(rng, data)
        if isinstance(data.get("configuration"), dict) and "fingerprint" in data:
            data["fingerprint"] = fingerprint_of(data["configuration"])
        file.write_text(json.dumps(data))
    else:
        raw = bytearray(text.encode())
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        file.write_bytes(bytes(raw))

    def use(result: Any) -> None:
        rows_of([result])
        report_page([result], [])
        try:
            compare([result], [made_up("int4", 4.0, 0.2)])
        except ValueError as error:
            if not _single(error):
                raise

    return _tried(lambda: read_result(file), use)


TARGETS: dict[str, Callable[[str, random.Random, Path], str]] = {
    "artifact": _artifact, "page": _page, "statistics": _statistics, "results": _result,
}  # fmt: skip
SUBJECTS: dict[str, tuple[str, ...]] = {
    "artifact": RECIPES,
    "page": ("int4", "karhunen", "kvtc", "kitty", "kvquant", "full", "spectra", "kivi", "nova_kv"),
    "statistics": ("karhunen", "nova_kv", "spectra", "kvquant", "kvtc"),
    "results": ("spectra", "karhunen"),
}
