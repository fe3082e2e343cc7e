"""`generate --session`: what was read is not read again, and the answer is that of one long conversation."""

import json
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Command
from tests.cli.test_usage import assert_refused

LONG = "a long document that is read once and asked about on another day, " * 3


def test_a_second_run_reads_only_what_is_new(
    karhunen: Command, codec_folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    from karhunen.codec import Codec
    from karhunen.hf.embedded import load
    from karhunen.hf.generation import generate
    from karhunen.hf.session import load_session

    session = tmp_path / "talk"
    common = ["--codec", codec_folder, "--model", model_folder, "--max-new-tokens", 6, "--raw", "--session", session]
    first = karhunen("generate", *common, "-p", LONG, "--json", "--attention", "sdpa")
    assert first.code == 0, first.err
    said = json.loads(first.out)
    assert said["restored_tokens"] == 0
    second = karhunen("generate", *common, "-p", " And then?", "--json", "--attention", "sdpa")
    assert second.code == 0, second.err
    again = json.loads(second.out)
    assert again["restored_tokens"] == said["prompt_tokens"] + said["new_tokens"] - 1
    assert again["restore_seconds"] > 0

    model, tokenizer = load(model_folder)
    model.set_attn_implementation("sdpa")
    codec = Codec.from_pretrained(codec_folder)
    ids = tokenizer(LONG, return_tensors="pt")["input_ids"]
    one = generate(model, tokenizer, ids, codec, max_new_tokens=6)
    whole = torch.cat(
        [ids, torch.tensor([one.new_tokens]), tokenizer(" And then?", return_tensors="pt")["input_ids"]], 1
    )
    assert said["text"] == one.text
    assert again["prompt_tokens"] == whole.shape[1]
    cache, state = load_session(model, session)
    assert state.tokens is not None
    assert torch.equal(state.tokens[:, : whole.shape[1]], whole)
    assert cache.get_seq_length() == state.tokens.shape[1] - 1

    shown = karhunen("generate", *common, "-p", "And?")
    assert "tokens were restored from" in shown.out
    assert "saved" in shown.out


def test_a_chat_goes_on_with_the_template_of_a_second_message(model_folder: Path) -> None:
    from karhunen.hf.conversation import next_tokens
    from karhunen.hf.embedded import load

    _, tokenizer = load(model_folder)
    ids = next_tokens(tokenizer, "hello")
    assert tokenizer.decode(ids[0]) == "<|user|>hello<|answer|>"
    assert tokenizer.decode(next_tokens(tokenizer, "hello", chat=False)[0]) == "hello"


ENDING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>!{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(("so_far", "added"), [("An answer that was c", "</s>!"), ("One.</s>", "!"), ("One.</s>!", "")])
def test_a_cut_answer_is_closed_before_the_next_message(so_far: str, added: str, model_folder: Path) -> None:
    from karhunen.hf.conversation import next_tokens
    from karhunen.hf.embedded import load

    _, tokenizer = load(model_folder)
    tokenizer.chat_template = ENDING
    before = tokenizer(so_far, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(next_tokens(tokenizer, "hello", before=before)[0]) == f"{added}<user>hello</s>!<assistant>"


def test_a_session_of_another_codec_or_model_or_no_session_is_refused(
    karhunen: Command, codec_folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    session = tmp_path / "talk"
    common = ["generate", "--codec", codec_folder, "--model", model_folder, "--max-new-tokens", 2, "-p", "hello"]
    assert karhunen(*common, "--session", session).code == 0
    other = tmp_path / "int8"
    statistics = codec_folder / "statistics"
    assert karhunen("calibrate", "--statistics", statistics, "--recipe", "int8", "-o", other).code == 0
    assert_refused(
        karhunen("generate", "--codec", other, "--model", model_folder, "-p", "x", "--session", session), "codec"
    )
    assert_refused(karhunen(*common, "--session", codec_folder), "karhunen-session")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("not an artifact")
    assert_refused(karhunen(*common, "--session", tmp_path / "notes"), "holds mine.txt")
    tensors = session / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert_refused(karhunen(*common, "--session", session), "truncated or altered")
