"""How many bytes are free on a device now."""

import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from karhunen.calibration.parallel import Channel

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: str) -> int | None:
    """Bytes that could still be allocated; None where the device does not tell."""
    kind = torch.device(device).type
    if kind == "cpu":
        return host_free_bytes()
    if kind == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # by PyTorch, for its next blocks
        return free + kept
    if kind == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    module: Any = getattr(torch, kind, None)
    tell = getattr(module, "mem_get_info", None)
    return None if tell is None else int(tell(device)[0])


def shared_free_bytes(devices: Iterable[str], channel: Channel) -> dict[str, int | None]:
    """This process's part of what is free: processes that use one device of one machine share it evenly."""
    places = {device: (socket.gethostname(), device) for device in devices}
    sharing = Counter(place for theirs in channel.all(list(places.values())) for place in theirs)
    with channel.together():
        free = {device: free_bytes(device) for device in places}
    return {device: None if n is None else n // sharing[places[device]] for device, n in free.items()}


def host_free_bytes() -> int:
    """What processes can still take of the host's memory, within the limit of the container if there is one."""
    import psutil  # comes with accelerate

    available = int(psutil.virtual_memory().available)
    limit = _number(CGROUP / "memory.max")
    if limit is None:
        return available
    return max(0, min(available, limit - (_number(CGROUP / "memory.current") or 0)))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
