"""The engines that the offline tests look at, all run in one process of `driver.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.serving.engine.models import tokens

from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.serve import transfer_config

DRIVER = Path(__file__).parent / "driver.py"
N_LONG, BLOCK = 700, 128


def run(engines: list[dict[str, Any]], seconds: float, log: Path) -> dict[str, dict[str, Any]]:
    """Their answers by name; what the engines say goes to `log`."""
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, str(DRIVER)], input=json.dumps(engines), stdout=subprocess.PIPE, stderr=stream, text=True,
            timeout=seconds, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(engines), f"{len(lines)} of {len(engines)} engines answered; see {log}"
    return {line["name"]: line for line in lines}


def transfer(codec: Path, store: Path | str, **settings: Any) -> dict[str, Any]:
    return transfer_config(ServingSettings(str(codec), str(store), recent_tokens=0, **settings))


def asked(
    name: str, model: Path, steps: list[list[list[int]]], given: dict[str, Any] | None = None, max_tokens: int = 16
) -> dict[str, Any]:
    made = [{"prompts": prompts, "max_tokens": max_tokens} for prompts in steps]
    return {"name": name, "model": str(model), "transfer": given, "steps": made}


def twice() -> list[list[list[int]]]:
    """One long prompt, twice."""
    return [[tokens(N_LONG, 1)], [tokens(N_LONG, 1)]]


def users() -> list[list[list[int]]]:
    """One user of a long system prompt, then nine others of it at once."""
    system = tokens(5 * BLOCK, 2)
    return [[[*system, *tokens(30, 100)]], [[*system, *tokens(30, 101 + i)] for i in range(9)]]
