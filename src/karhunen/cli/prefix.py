"""`karhunen prefix`: what a store of pages holds, what goes, and what is put in beforehand."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from karhunen.cli.options import Json, Model, path, word

prefix = typer.Typer(help="Manage a store of pages.", add_completion=False, rich_markup_mode=None)

StoreAddress = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="A folder, redis://host:6379/0, or an address of fsspec; default: ~/.cache/karhunen/pages.",
        parser=word,
    ),
]


@prefix.command()
def ls(store: StoreAddress = None, as_json: Json = False) -> None:
    """List pages by model and codec."""
    from rich.filesize import decimal

    from karhunen.cli.screen import Screen
    from karhunen.serving.inventory import inventory

    with Screen(as_json).open() as screen:
        found = inventory(_opened(store))
        if as_json:
            screen.document(asdict(found))
            return
        for held in found.holdings:
            screen.say(
                f"model {held.model[:12]}  weights {held.weights[:12]}  codec {held.codec[:12]}  {held.dtype}: "
                f"{held.pages} pages of {held.tokens:,} tokens, {held.state} states, {decimal(held.n_bytes)}"
            )
        screen.say(f"{decimal(found.n_bytes)} in all, {found.damaged} damaged")


@prefix.command()
def rm(
    fingerprint: Annotated[
        str, typer.Argument(help="Fingerprint of a model, weights or a codec, as `ls` shows it.")
    ] = "",
    store: StoreAddress = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Remove pages that cannot be read.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Remove all pages.")] = False,
    as_json: Json = False,
) -> None:
    """Remove pages."""
    from rich.filesize import decimal

    from karhunen.cli.screen import Screen
    from karhunen.serving.inventory import remove

    with Screen(as_json).open() as screen:
        n_pages, n_bytes = remove(_opened(store), fingerprint, damaged, everything)
        if as_json:
            screen.document({"pages": n_pages, "bytes": n_bytes})
        screen.say(f"removed {n_pages} pages, {decimal(n_bytes)}")


@prefix.command()
def warm(
    files: Annotated[list[Path], typer.Argument(help="Text files; each is a prompt.", parser=path)],
    codec: Annotated[Path, typer.Option("--codec", help="A codec's folder, as `calibrate` writes it.", parser=path)],
    model: Model,
    store: StoreAddress = None,
    chat: Annotated[bool, typer.Option("--system", help="Take each text as a system message of a chat.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="The engine's.", parser=word)] = "auto",
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="The engine's longest sequence.")] = None,
    as_json: Json = False,
) -> None:
    """Read prompts with vLLM, to fill the store beforehand."""
    from karhunen.cli.screen import Screen
    from karhunen.serving.settings import ServingSettings
    from karhunen.serving.vllm.serve import default_store
    from karhunen.serving.vllm.warm import warm as warmed

    settings = ServingSettings.from_dict({"codec": str(codec), "store": store or default_store()})
    settings.load_codec()
    prompts = [file.read_text(encoding="utf-8") for file in files]
    with Screen(as_json).open() as screen:
        asked: dict[str, Any] = {"dtype": dtype, "distributed_executor_backend": "uni"}  # a process less to start
        if max_model_len is not None:
            asked["max_model_len"] = max_model_len
        with _children_on_stderr():
            n_pages = warmed(model, settings, prompts, chat, **asked)
        if as_json:
            screen.document({"prompts": len(prompts), "pages": n_pages})
        screen.say(f"{len(prompts)} prompts read, {n_pages} pages stored")


@contextmanager
def _children_on_stderr() -> Iterator[None]:
    """Processes started inside say what they say on stderr: the engine's log to stdout, which holds the answer."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)


def _opened(address: str | None) -> Any:
    from karhunen.serving.vllm.serve import default_store
    from karhunen.stores import open_store

    return open_store(address or default_store())
