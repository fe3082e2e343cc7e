"""A recipe at about 4×, 8× or 12×: the settings that its own file lists in `RATES`, the nearest where it has no such.

A rate is a label of what was asked for. Where a method stands in a plot is decided by the bytes that were measured.
"""

import importlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from karhunen import recipes
from karhunen.recipe import Recipe
from karhunen.windows.sink_recent import SinkRecent

RATES = (4, 8, 12)


@final
@dataclass(frozen=True)
class Rated:
    """A recipe to evaluate: its name, the rate it stands for (None: as the user wrote it), its text and choices."""

    name: str
    rate: int | None
    text: str
    recipe: Recipe


def rated(texts: Sequence[str], rates: Sequence[int] = RATES, window: tuple[int, int] | None = None) -> list[Rated]:
    """Bare names at every rate, each setting once; a name with options as it stands.

    `window` (sinks, recent) is given to every bare name that has these options, so that methods compare at one window;
    where `recent` is not the exact window but the rate itself (StreamingLLM) it stays. ValueError on a rate for which
    no recipe lists settings.
    """
    listed = sorted({rate for name in recipes.names() for rate in settings(name)})
    for rate in set(rates) - set(listed):
        raise ValueError(
            f"rate {rate} is none of those that recipes list settings for, {', '.join(map(str, listed))}; "
            f"use one of them, or a recipe with its own options, such as karhunen:ratio={rate}"
        )
    found: list[Rated] = []
    for text in texts:
        if ":" in text:
            found.append(Rated(text.partition(":")[0].strip(), None, text, recipes.make(text)))
        else:
            found += [at(text.strip(), rate, window) for rate in _nearest(text.strip(), rates)]
    return found


def at(name: str, rate: int | None, window: tuple[int, int] | None = None) -> Rated:
    """One recipe at one of its own rates."""
    known = inspect.signature(recipes.maker(name)).parameters
    options: dict[str, Any] = dict(settings(name).get(rate, {})) if rate is not None else {}
    kind = recipes.make(name, **options).window
    if window is not None and isinstance(kind, SinkRecent) and {"sink", "recent"} <= known.keys():
        options = {"sink": window[0], "recent": window[1], **options}
    shown = {k: v for k, v in options.items() if v != known[k].default}
    text = name + (":" + ",".join(f"{k}={v}" for k, v in sorted(shown.items())) if shown else "")
    return Rated(name, rate, text, recipes.make(name, **options))


def settings(name: str) -> dict[int, dict[str, Any]]:
    """Rate to options, as the recipe's file has them; empty where it lists none."""
    module = importlib.import_module(recipes.maker(name).__module__)
    return dict(getattr(module, "RATES", {}))


def _nearest(name: str, rates: Sequence[int]) -> list[int | None]:
    own = settings(name)
    if not own:
        return [None]
    nearest = [min(own, key=lambda mine: (abs(math.log(mine / rate)), mine)) for rate in rates]
    return list(dict.fromkeys(nearest))
