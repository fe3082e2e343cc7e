"""What a new user may pass wrong in Python, as a script of its own: the tests' type checks would answer instead.

Prints, as JSON, for each case: the kind of the error, what it says, and whether karhunen raised it.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import karhunen
from karhunen.codec import Codec
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument
from karhunen.recipes import make


def ids(n: int, b: int = 1) -> Any:
    return torch.randint(3, 99, (b, n), generator=torch.Generator().manual_seed(0))


def x(*shape: int) -> Any:
    return torch.ones(shape)


def cases(folder: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    from tests.hf.tiny import build

    model, other, recipe = build("llama"), build("qwen3"), make("int4", recent=8)
    statistics = karhunen.calibrate(model, ids(300, 2), recipe.needs())
    codec = karhunen.fit(recipe, statistics)
    file = folder / "file"
    file.write_text("x")

    def held(b: int = 1, n: int = 40) -> Any:
        cache = CompressedCache(model, codec)
        forward(model, cache, ids(n, b))
        return cache

    def forward(which: Any, cache: Any, tokens: Any) -> Any:
        return which(input_ids=tokens, use_cache=True, **{cache_argument(which): cache})

    def opened(*given: Any) -> Any:
        return karhunen.compressed(*given).__enter__()

    wrong: Any = {
        "recipe of a number": (lambda: make(3), "recipe is a int, not a str; name it"),
        "recipe of nothing": (lambda: make(None), "recipe is a NoneType"),
        "option of a fraction": (lambda: make("int4", group=2.5), "not of type int"),
        "option of a switch": (lambda: make("kivi", bits=True), "not of type int"),
        "option of text": (lambda: make("karhunen", bits="2"), "not of type float"),
        "option twice": (lambda: make("karhunen:bits=2", bits=3), "given twice"),
        "fit the wrong way round": (lambda: karhunen.fit(statistics, recipe), "recipe is a Statistics, not a Recipe"),
        "fit a name": (lambda: karhunen.fit("int4", statistics), "recipe is a str, not a Recipe"),
        "fit nothing": (lambda: karhunen.fit(recipe, None), "statistics is a NoneType"),
        "needs of a recipe": (lambda: karhunen.calibrate(model, ids(300), recipe), "give recipe.needs()"),
        "needs of a name": (lambda: karhunen.calibrate(model, ids(300), "int4"), "give recipe.needs()"),
        "needs not called": (lambda: karhunen.calibrate(model, ids(300), recipe.needs), "give recipe.needs()"),
        "calibrate nothing": (lambda: karhunen.calibrate(None, ids(300), recipe.needs()), "not a transformers model"),
        "calibrate a name": (lambda: karhunen.calibrate("x", ids(300), recipe.needs()), "not a transformers model"),
        "codec of a number": (lambda: Codec.from_pretrained(3), "folder is a int"),
        "codec of nothing": (lambda: Codec.from_pretrained(None), "folder is a NoneType"),
        "codec of no path": (lambda: Codec.from_pretrained(""), "the path is empty"),
        "save to a number": (lambda: codec.save_pretrained(3), "folder is a int"),
        "save to no path": (lambda: codec.save_pretrained(""), "the path is empty"),
        "save to a file": (lambda: codec.save_pretrained(file), "is a file"),
        "compress with a recipe": (lambda: opened(model, recipe), "codec is a Recipe, not a Codec; fit one"),
        "compress with a name": (lambda: opened(model, "int4"), "codec is a str, not a Codec"),
        "compress the wrong way round": (lambda: opened(codec, model), "model is a Codec, not a Module"),
        "cache of no codec": (lambda: CompressedCache(model, None), "codec is a NoneType"),
        "cache of a name": (lambda: CompressedCache("smollm2", codec), "model is a str, not a Module; load it"),
        "exact tokens of whole numbers": (lambda: CompressedCache(model, codec, torch.int8), "holds no vectors"),
        "exact tokens of a word": (lambda: CompressedCache(model, codec, "bfloat16"), "holds no vectors"),
        "another model": (lambda: CompressedCache(other, codec), "this model is a qwen3"),
        "enable a name": (lambda: karhunen.enable("smollm2"), "cannot be exchanged"),
        "load a number": (lambda: karhunen.load(3), "model is a int"),
        "load from nowhere": (lambda: karhunen.load("./nowhere"), "is not a folder"),
        "crop more than there is": (lambda: held().crop(-41), "a cache of 40 tokens is not cropped by -41"),
        "crop a fraction": (lambda: held().crop(2.5), "give a whole number"),
        "a row that is not there": (lambda: held().batch_select_indices(torch.tensor([5])), "among the 1 rows"),
        "a fraction of a row": (lambda: held().batch_select_indices(torch.tensor([0.5])), "among the 1 rows"),
        "beams that are not there": (lambda: held(2).reorder_cache(torch.tensor([0, 2])), "among the 2 rows"),
        "beams below zero": (lambda: held(2).reorder_cache(torch.tensor([0, -3])), "among the 2 rows"),
        "no repeats": (lambda: held().batch_repeat_interleave(0), "use 1 or more"),
        "a mask of other rows": (lambda: held(2).batch_select_indices(x(3).bool()), "is not one of a cache of 2 rows"),
        "read by another model": (lambda: forward(other, held(), ids(3)), "use a cache with the model"),
        "other rows": (lambda: forward(model, held(), ids(3, 2)), "use a cache with the model and the rows"),
        "heads that are not there": (
            lambda: held().update(x(1, 3, 3, 12), x(1, 3, 3, 12), 0),
            "takes keys of (1, 2, 3",
        ),
        "other heads at first": (
            lambda: CompressedCache(model, codec).update(x(1, 3, 3, 12), x(1, 3, 3, 12), 0),
            "(1, 2",
        ),
        "shorter heads": (lambda: held().update(x(1, 2, 3, 8), x(1, 2, 3, 8), 0), "takes keys of (1, 2, 3, 12)"),
        "more values than keys": (lambda: held().update(x(1, 2, 3, 12), x(1, 2, 4, 12), 0), "values of (1, 2, 3, 12)"),
        "keys of whole numbers": (lambda: held().update(*(x(1, 2, 3, 12).long(),) * 2, 0), "in floating point"),
        "keys of three axes": (lambda: held().update(x(2, 3, 12), x(2, 3, 12), 0), "takes keys of"),
        "a layer that is not there": (lambda: held().update(x(1, 2, 3, 12), x(1, 2, 3, 12), 9), "there is no layer 9"),
        "a layer below zero": (lambda: held().update(x(1, 2, 3, 12), x(1, 2, 3, 12), -1), "there is no layer -1"),
        "a session in a file": (lambda: held().save(file), "is a file"),
        "a session of fewer tokens": (lambda: held().save(folder / "s", ids(3)), "has read 40"),
        "a report of nothing": (lambda: opened(model, codec).report(), "nothing was generated"),
    }
    return wrong


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    found = {}
    for name, (call, words) in cases(Path(sys.argv[1])).items():
        try:
            call()
            found[name] = ["nothing", "", words, False]
        except Exception as error:  # noqa: BLE001  # which one is the question
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            kinds = [kind.__name__ for kind in type(error).__mro__]
            found[name] = [kinds, str(error), words, "/karhunen/" in where]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
