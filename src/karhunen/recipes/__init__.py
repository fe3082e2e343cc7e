"""One method, one file, no arithmetic. A file `recipes/name.py` with a function `name(...) -> Recipe` is a recipe;
no list is edited."""

import ast
import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from karhunen.recipe import Recipe
from karhunen.values import refuse_unless_a, refuse_unless_one_of


def names() -> list[str]:
    """Every recipe there is."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))


def maker(name: str) -> Callable[..., Recipe]:
    """The function that makes the recipe; ValueError on an unknown name, with those nearest to it."""
    if name not in names():
        near = difflib.get_close_matches(name.lower().replace("-", "_"), names())
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown recipe {name!r}; {meant}`karhunen recipes` lists the {len(names())} there are")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def make(text: str, **options: Any) -> Recipe:
    """A recipe by name, with options in Python or in the text: `kivi:bits=4,group=64`.

    ValueError on an unknown recipe or option, with what there is, and on a value that does not fit; TypeError if it is
    no text.
    """
    refuse_unless_a("recipe", text, str, would="name it, as in make('karhunen:bits=2')")
    name, _, given = text.partition(":")
    function = maker(name.strip())
    hints = get_type_hints(function)
    for pair in filter(None, given.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"option {pair!r} of recipe {name} has no value; write {pair}=...")
        if key.strip() in options:
            raise ValueError(f"option {key.strip()!r} of recipe {name} was given twice; give it once")
        options[key.strip()] = _literal(value.strip(), hints.get(key.strip()))
    known = inspect.signature(function).parameters
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(f"recipe {name} has no option {unknown}; known: {sorted(known) or 'none'}")
    for option, value in options.items():
        _check(f"{name}:{option}", value, hints[option])
    return function(**options)


def _check(option: str, value: Any, hint: Any) -> None:
    """An int will do for a float; ValueError for what is of another type or not one of the words it may be."""
    if get_origin(hint) is Literal:
        refuse_unless_one_of(option, value, get_args(hint))
        return
    kinds = get_args(hint) or (hint,)
    allowed = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not allowed or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"option {option}={value!r} is not of type {names}")


def _literal(text: str, hint: Any) -> Any:
    """What the text says; a word that the option knows is that word, `none` among them."""
    if get_origin(hint) is Literal and text in get_args(hint):
        return text
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text
