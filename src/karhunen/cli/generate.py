"""`karhunen generate`: text as it comes, then what the cache held."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from karhunen.cli.loading import load_model, placed
from karhunen.cli.screen import Screen, rounded

ATTENTIONS = ("karhunen", "sdpa", "eager")


def run(
    codec_folder: Path,
    model_name: str,
    prompt: str | None,
    prompt_file: Path | None,
    max_new_tokens: int,
    sampling_options: dict[str, Any],
    raw: bool,
    attention: str,
    dtype: str,
    device: str,
    as_json: bool,
    session: Path | None = None,
    watch: bool = False,
) -> None:
    """Continue the prompt with the codec's cache, or the conversation that `session` holds."""
    if attention not in ATTENTIONS:
        raise ValueError(f"unknown attention {attention!r}; known: {', '.join(ATTENTIONS)}")
    text = read_prompt(prompt, prompt_file)
    from karhunen.calibration.placement import chosen
    from karhunen.codec import Codec

    devices = chosen(device)
    codec = Codec.from_pretrained(codec_folder)
    from karhunen.cli.account import account_table
    from karhunen.cli.dashboard import Dashboard
    from karhunen.folder import check_target
    from karhunen.hf.attention import register
    from karhunen.hf.conversation import Resumed, converse
    from karhunen.hf.generation import Sampling, generate, prompt_tokens
    from karhunen.hf.session import FORMAT

    if session is not None:
        check_target(session, FORMAT)

    sampling = Sampling(**sampling_options)
    with Screen(as_json).open() as screen:
        model, tokenizer = load_model(screen, model_name, dtype, placed(screen, model_name, dtype, devices))
        register()
        model.set_attn_implementation(attention)
        if codec.card is None:
            screen.log("this codec has no report card: `karhunen verify` makes one")
        elif codec.card.passed:  # of one that is not good enough, loading has warned
            screen.log(codec.card.line)
        dashboard = Dashboard(screen) if watch else None
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "on_text": screen.stream if dashboard is None else dashboard.text,
            "on_cache": None if dashboard is None else dashboard.watch,
        }
        chat, resumed = False if raw else None, Resumed()
        with nullcontext() if dashboard is None else dashboard.running():
            if session is None:
                result = generate(model, tokenizer, prompt_tokens(tokenizer, text, chat=chat), codec, **settings)
            else:
                result, resumed = converse(model, tokenizer, text, codec, session, chat=chat, **settings)
        if dashboard is not None:
            screen.stream(result.text)
        report = result.report
        assert report is not None, "a codec makes a compressed cache"
        screen.say("\n")
        screen.table(account_table(report))
        if codec.layers and not any(layer.n_coded for layer in report.layers):
            screen.say(
                "nothing was coded: the codec's window keeps all of so short a text exact; a longer one is coded"
            )
        if how := sorted({layer.how_read for layer in report.layers if layer.how_read}):
            screen.say(f"coded tokens were read from {'; '.join(how)}")
        screen.say(
            f"{result.n_prompt_tokens - resumed.n_tokens:,} prompt tokens in {result.prefill_seconds:.2f} s; "
            f"{result.n_new_tokens:,} new "
            f"ones at {result.tokens_per_second:.2f} tokens/s"
        )
        if session is not None:
            screen.say(
                f"{resumed.n_tokens:,} tokens were restored from {session} in {resumed.restore_seconds:.2f} s; reading "
                f"them takes about {resumed.reading_seconds:.2g} s: about {resumed.seconds_saved:.2g} s saved"
                if resumed.n_tokens
                else f"the conversation is kept in {session}"
            )
        screen.document(
            rounded(
                {
                    "text": result.text,
                    "prompt_tokens": result.n_prompt_tokens,
                    "new_tokens": result.n_new_tokens,
                    "prefill_seconds": result.prefill_seconds,
                    "tokens_per_second": result.tokens_per_second,
                    "dtype": dtype,
                    "device": ",".join(devices),
                    "attention": attention,
                    "restored_tokens": resumed.n_tokens,
                    "restore_seconds": resumed.restore_seconds,
                    "reading_seconds": resumed.reading_seconds,
                    "seconds_saved": resumed.seconds_saved,
                    "cache": report.to_dict(),
                    **({} if dashboard is None else {"watched": dashboard.summary(report)}),
                }
            )
        )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """From the one place that was named, or stdin; ValueError if there is none, or nothing in it."""
    if prompt is not None and prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt, --prompt-file, or text on stdin")
    text = prompt
    if text is None:
        text = sys.stdin.read() if prompt_file is None else _text_of(prompt_file)
    if not text.strip():
        raise ValueError("the prompt is empty; give some text")
    return text


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
