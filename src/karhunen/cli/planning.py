"""The verb that plans. Nothing heavy is imported before it runs."""

from pathlib import Path
from typing import Annotated

import typer

from karhunen.cli.options import DEFAULT_DEVICE, Devices, Json, path, positive, word

planning = typer.Typer()


@planning.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name of the built-in table, a folder or config.json, or a model hub's id.",
            parser=word,
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory of each device: 24GiB, 80GB (GB are 10^9 bytes).", parser=word),
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Number of devices, all alike.")] = 1,
    reserve: Annotated[
        str,
        typer.Option("--reserve", help="Memory of each device left free: 5%, or a size such as 1.2GB.", parser=word),
    ] = "5%",
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", help="Memory bandwidth of each device: 3.35TB/s.", parser=word)
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="Number format of the weights, or their size such as 16GB; default: as published.",
            parser=word,
        ),
    ] = None,
    cache_dtype: Annotated[
        str, typer.Option("--cache-dtype", help="Number format of the uncompressed cache.", parser=word)
    ] = "bfloat16",
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of a sequence; default: 32,768 or the model's most.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at a time.")] = 1,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="A recipe, at all its rates, or with options as written; repeatable; default: karhunen.",
            parser=word,
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            metavar="FLOAT",
            parser=positive,
            help="Also plan a cache this many times smaller than 16 bits, without an exact window; repeatable.",
        ),
    ] = None,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Also plan the memory of calibration; takes seconds.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="A codec's folder: run the model and compare it with the plan.", parser=path),
    ] = None,
    check_tokens: Annotated[
        int, typer.Option("--check-tokens", min=64, help="Tokens in the cache that --check makes.")
    ] = 2048,
    device: Devices = DEFAULT_DEVICE,
    max_step: Annotated[
        float,
        typer.Option(
            "--max-step",
            metavar="FLOAT",
            parser=positive,
            help="Longest step that --check accepts, in times the fastest dense step.",
        ),
    ] = 1.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture of memory against context, PNG or SVG.", parser=path)
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what fits in memory. Cache bytes, longest context, largest batch, fastest possible step, advice."""
    from karhunen.cli.plan import Wanted, run

    return run(
        Wanted(
            model=model,
            memory=memory,
            devices=devices,
            reserve=reserve,
            bandwidth=bandwidth,
            weights=weights,
            cache_dtype=cache_dtype,
            context=context,
            batch=batch,
            recipes=tuple(recipe or ()),
            ratios=tuple(ratio or ()),
            calibration=calibration,
            check=check,
            check_tokens=check_tokens,
            device=device,
            max_step=max_step,
            plot=plot,
        ),
        as_json,
    )
