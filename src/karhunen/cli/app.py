"""The verbs and their arguments. Nothing heavy is imported before a verb runs, so `--help` answers at once."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from karhunen.cli.options import (
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    DEFAULT_RECIPE,
    DEMO_RECIPE,
    CodecFolder,
    Devices,
    Dtype,
    Json,
    Model,
    OneDevice,
    RecipeText,
    Texts,
    not_negative,
    path,
    positive,
    share,
    word,
)
from karhunen.cli.planning import planning
from karhunen.cli.prefix import StoreAddress, prefix
from karhunen.cli.scoring import scoring

app = typer.Typer(
    name="karhunen",
    help="Make the KV cache of a language model smaller. Calibrate once, then generate with a compressed cache.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(scoring)
app.add_typer(planning)
app.add_typer(prefix, name="prefix")

INTERRUPTED = 130  # what typer makes of Ctrl-C


def parse(arguments: Sequence[str]) -> int:
    """Run one command line. Raises what the verb raises; ValueError with one line for a wrong usage."""
    from typer.exceptions import TyperException

    command = get_command(app)
    try:
        code = command.main(args=list(arguments) or ["--help"], prog_name="karhunen", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except TyperException as error:
        format_message = getattr(error, "format_message", lambda: str(error))
        asked = getattr(getattr(error, "ctx", None), "command_path", "karhunen")
        raise ValueError(f"{format_message()} (`{asked} --help` lists what there is)") from error
    except SystemExit as left:  # of what the command line does for the shell, such as --show-completion
        code = left.code
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def print_version(asked: bool) -> bool:
    """Print the version and leave, if that was asked for."""
    if asked:
        typer.echo(f"karhunen {import_module('karhunen').__version__}")
        raise typer.Exit
    return asked


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Make the KV cache of a language model smaller. Calibrate once, then generate with a compressed cache."""


@app.command()
def calibrate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the codec is written.", parser=path)
    ] = None,
    model: Model = DEFAULT_MODEL,
    recipe: RecipeText = DEFAULT_RECIPE,
    text: Texts = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to read.")] = 16384,
    own_samples: Annotated[
        int | None,
        typer.Option(
            "--own-samples",
            min=0,
            help="Tokens that the model writes itself, beside the text. Default: half of --max-tokens beside the "
            "built-in text, none beside yours.",
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Keep progress in this folder, and continue from it.", parser=path)
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option("--statistics", help="Fit from saved statistics; no model is run.", parser=path)
    ] = None,
    keep_statistics: Annotated[
        bool, typer.Option("--keep-statistics", help="Save the statistics too, in OUTPUT/statistics.")
    ] = False,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    sequence_tokens: Annotated[int, typer.Option("--sequence-tokens", min=64, help="Tokens of a sequence.")] = 2048,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Sequences at a time; default: as memory allows.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory of each device, for the model and all else, such as 24GB.", parser=word),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show how much memory it takes; load nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a model on text and write the codec of a recipe. torchrun starts it in several processes."""
    from karhunen.cli.calibrate import Wanted, run

    run(
        Wanted(
            output=output,
            model_name=model,
            recipe_text=recipe,
            texts=tuple(text or ()),
            max_tokens=max_tokens,
            own_samples=own_samples,
            resume=resume,
            saved=statistics,
            keep_statistics=keep_statistics,
            dtype=dtype,
            device=device,
            sequence_tokens=sequence_tokens,
            batch=batch,
            memory=memory,
            plan=plan,
        ),
        as_json,
    )


@app.command()
def generate(
    codec: Annotated[Path, typer.Option("--codec", help="A codec's folder, as `calibrate` writes it.", parser=path)],
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; stdin is read if none is given.", parser=word)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file that holds the prompt.", parser=path)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to write.")] = 256,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="FLOAT", help="0 takes the most likely token.", parser=not_negative),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", metavar="FLOAT", help="Above 0 and at most 1; 1 keeps all tokens.", parser=share),
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0 keeps all tokens.")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not wrap the prompt in the chat template.")] = False,
    attention: Annotated[
        str,
        typer.Option(
            "--attention", help="karhunen reads the compressed bytes; sdpa or eager read decoded numbers.", parser=word
        ),
    ] = "karhunen",
    session: Annotated[
        Path | None,
        typer.Option("--session", help="Keep the conversation in this folder, and continue it.", parser=path),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show bytes, bits and accuracy while it runs, on stderr; text comes after.")
    ] = False,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a compressed cache. Then say what the cache held."""
    from karhunen.cli.generate import run

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    run(
        codec, model, prompt, prompt_file, max_new_tokens, sampling, raw, attention, dtype, device, as_json,
        session=session, watch=watch,
    )  # fmt: skip


@app.command()
def watch(
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Of karhunen's exporter: http://127.0.0.1:9400/metrics.", parser=word)
    ],
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="Between two looks.", parser=positive)
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Look so often, then leave; default: until Ctrl-C.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What the caches of a running process hold. A dashboard that reads its exporter; lines where it is piped."""
    from karhunen.cli.watch import run

    run(address, every, count, as_json)


@app.command()
def inspect(codec: CodecFolder, as_json: Json = False) -> None:
    """Show what a codec is made of. Choices, bits and bytes."""
    from karhunen.cli.inspect import run

    run(codec, as_json)


@app.command()
def bench(
    codec: Annotated[
        Path | None,
        typer.Option(
            "--codec", help="Time decode steps of this codec's model; default: one synthetic layer.", parser=path
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="KV heads x query heads of each x head size; repeatable.", parser=word),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, help="Tokens in the cache; repeatable.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Sequences at a time; repeatable; default: 1.")
    ] = None,
    bits: Annotated[
        list[float] | None,
        typer.Option(
            "--bits",
            metavar="FLOAT",
            parser=positive,
            help="Bits per element of the synthetic layer; repeatable; default: 2.",
        ),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables", help="Tables of the synthetic layer: free (default), overlapping or additive.", parser=word
        ),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option("--threads", min=1, help="CPU threads; repeatable; default: 1.")
    ] = None,
    device: OneDevice = DEFAULT_DEVICE,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that each contender runs.")] = 7,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for speed.json and speed.png.", parser=path)
    ] = None,
    as_json: Json = False,
) -> None:
    """Time attention from bytes against dense attention. Milliseconds, GB/s, speed-up, error."""
    from karhunen.cli.bench import Wanted, run

    run(
        Wanted(
            codec=codec,
            model=model,
            shapes=tuple(shape or ()),
            tokens=tuple(tokens or ()),
            batches=tuple(batch or ()),
            bits=tuple(bits or ()),
            tables=tuple(tables or ()),
            threads=tuple(threads or ()),
            device=device,
            rounds=rounds,
        ),
        output,
        as_json,
    )


@app.command()
def doctor(
    online: Annotated[bool, typer.Option("--online", help="Also ask the configured package index.")] = False,
    as_json: Json = False,
) -> None:
    """Show what works here. Versions, devices, fast paths, embedded models."""
    from karhunen.cli.doctor import run

    run(online, as_json)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the recipes. Papers, choices, options and bits."""
    from karhunen.cli.recipes import run

    run(as_json)


@app.command()
def demo(
    model: Model = DEFAULT_MODEL,
    recipe: RecipeText = DEMO_RECIPE,
    calibration_tokens: Annotated[
        int, typer.Option("--calibration-tokens", min=1, help="Tokens to calibrate on.")
    ] = 8192,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of the document that the question is about.")
    ] = 4096,
    scored_tokens: Annotated[int, typer.Option("--scored-tokens", min=1, help="Tokens to score.")] = 256,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    as_json: Json = False,
) -> None:
    """Do the whole job on a small model. Calibrate, answer a question on a long document, measure the change."""
    from karhunen.cli.demo import run

    run(model, recipe, calibration_tokens, prompt_tokens, scored_tokens, dtype, device, as_json)


@app.command()
def fold(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the folded model is written.", parser=path)],
    model: Model = DEFAULT_MODEL,
    codec: Annotated[
        Path | None, typer.Option("--codec", help="A codec of `spectra`, whose ranks are used.", parser=path)
    ] = None,
    key_rank: Annotated[int | None, typer.Option("--key-rank", min=1, help="Rank of the keys in every layer.")] = None,
    value_rank: Annotated[
        int | None, typer.Option("--value-rank", min=1, help="Rank of the values in every layer.")
    ] = None,
    correct_output: Annotated[
        bool, typer.Option("--correct-output", help="Also correct the output projection for the codec.")
    ] = False,
    text: Texts = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to read at most.")] = 16384,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    as_json: Json = False,
) -> None:
    """Write a model that makes a smaller cache by itself. It caches latents of keys and values."""
    from karhunen.cli.fold import run

    texts = tuple(text or ())
    run(output, model, codec, key_rank, value_rank, correct_output, texts, max_tokens, dtype, device, as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An embedded name, a local folder, or a model hub's id.", parser=word),
    ],
    codec: Annotated[Path, typer.Option("--codec", help="A codec's folder, as `calibrate` writes it.", parser=path)],
    others: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of vLLM's server.", parser=word)
    ] = None,
    store: StoreAddress = None,
    page_tokens: Annotated[
        int | None, typer.Option("--page-tokens", min=1, help="A multiple of the engine's block; default: one block.")
    ] = None,
    recent_tokens: Annotated[
        int | None,
        typer.Option(
            "--recent-tokens",
            min=0,
            help="Tokens at a prompt's end that are never restored; default: as many as the codec keeps exact.",
        ),
    ] = None,
    max_store_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-store-bytes",
            min=1,
            help="Largest size of a store that is a folder; the least recently used pages go first.",
        ),
    ] = None,
    accuracy_every: Annotated[
        int | None,
        typer.Option("--accuracy-every", min=0, help="Check one page in this many by decoding it; default: none."),
    ] = None,
    role: Annotated[
        str,
        typer.Option("--role", help="prefill only stores pages, decode only loads them, both does both.", parser=word),
    ] = "both",
) -> None:
    """Start vLLM's server with prefixes kept in a store.

    It listens on 127.0.0.1 and speaks OpenAI's protocol. Arguments that are not listed here go to vLLM.
    """
    from karhunen.cli.serve import run

    asked = {
        "codec": str(codec), "store": store, "page_tokens": page_tokens, "recent_tokens": recent_tokens,
        "max_store_bytes": max_store_bytes, "accuracy_every": accuracy_every,
    }  # fmt: skip
    run(model, {name: value for name, value in asked.items() if value is not None}, role, others or ())
