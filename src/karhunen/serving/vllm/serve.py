"""The command line of vLLM's OpenAI server with karhunen's connector in it."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from karhunen.hf.embedded import MODELS, default_cache_dir, fetch
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm import CONNECTOR

SERVER = "vllm.entrypoints.openai.api_server"
LOOPBACK = "127.0.0.1"
ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}


def default_store() -> str:
    """Beside the embedded models, in the user's cache folder."""
    return str(default_cache_dir().parent / "pages")


def transfer_config(settings: ServingSettings, role: str = "both") -> dict[str, Any]:
    """What `--kv-transfer-config` takes. `role`: prefill stores pages and loads none, decode loads and stores none."""
    if role not in ROLES:
        raise ValueError(f"unknown role {role!r}; known: {', '.join(ROLES)}")
    asked = {name: value for name, value in asdict(settings).items() if value is not None}
    return {
        "kv_connector": CONNECTOR,
        "kv_role": ROLES[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": asked,
    }


def server_command(model: str, settings: ServingSettings, others: Sequence[str] = (), role: str = "both") -> list[str]:
    """The command that serves `model`, an embedded name, a folder or a hub's id; `others` are the engine's arguments.

    ValueError for a missing engine, a codec that is none, a store that cannot be opened, or an argument that is ours.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed; `pip install 'karhunen[vllm]'` brings it")
    for name in ("--kv-transfer-config", "--model"):
        if any(word == name or word.startswith(f"{name}=") for word in others):
            raise ValueError(f"{name} is made by `karhunen serve`; leave it out")
    settings.load_codec()
    settings.open_store()
    command = [sys.executable, "-m", SERVER, "--model", str(fetch(model)) if model in MODELS else model]
    if model in MODELS and not _named("--served-model-name", others):
        command += ["--served-model-name", model]
    if not _named("--host", others):
        command += ["--host", LOOPBACK]
    return [*command, "--kv-transfer-config", json.dumps(transfer_config(settings, role)), *others]


def address(command: Sequence[str]) -> str:
    """Where the server of a command answers."""
    return f"http://{_value('--host', command, LOOPBACK)}:{_value('--port', command, '8000')}"


def _named(name: str, words: Sequence[str]) -> bool:
    return any(word == name or word.startswith(f"{name}=") for word in words)


def _value(name: str, words: Sequence[str], otherwise: str) -> str:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return otherwise
