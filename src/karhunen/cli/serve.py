"""`karhunen serve`: vLLM's OpenAI server, configured, in place of this process."""

import os
import sys
from collections.abc import Sequence
from typing import Any


def run(model: str, settings: dict[str, Any], role: str, others: Sequence[str]) -> None:
    """Say in one line what was configured, and become the server."""
    from karhunen.serving.settings import ServingSettings
    from karhunen.serving.vllm.serve import address, default_store, server_command

    asked = ServingSettings.from_dict({"store": default_store(), **settings})
    command = server_command(model, asked, others, role)
    size = "the engine's blocks" if asked.page_tokens is None else f"{asked.page_tokens} tokens"
    sys.stderr.write(
        f"karhunen serve: {model} at {address(command)}, codec {asked.codec}, pages of {size} in {asked.store}, "
        f"role {role}\n"
    )
    sys.stderr.flush()
    os.execv(command[0], command)
