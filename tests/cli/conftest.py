"""A tiny model with a tokenizer in a folder, as a user has one, and the command line as a function."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hf.tiny import build

CHAT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|answer|>"


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def karhunen(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process."""
    from karhunen.cli import run

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        code = run([str(word) for word in arguments])
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return call


def save_tiny(folder: Path, family: str = "llama", **changes: object) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    fast.save_pretrained(folder)
    build(family, vocab_size=len(vocabulary), bos_token_id=0, eos_token_id=1, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "gpt2", "gpt2")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(f"line {i} of a text that nobody has to read." for i in range(100)))
    return file


@pytest.fixture(scope="session")
def codec_folder(model_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A codec of the tiny model, its statistics beside it."""
    from karhunen.cli import run

    folder = tmp_path_factory.mktemp("codecs") / "spectra"
    arguments = ["calibrate", "--model", model_folder, "--recipe", "spectra:bits=3,group=8,recent=16", "-o", folder]
    code = run([str(word) for word in [*arguments, "--text", text_file, "--max-tokens", 1024, "--keep-statistics"]])
    assert code == 0
    return folder
