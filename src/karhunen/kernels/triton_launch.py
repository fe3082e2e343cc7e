"""What the Triton kernels share: whether they can run here, how they are tuned, and what they refuse.

`TRITON_INTERPRET=1`, set before Triton is imported, runs them in NumPy on CPU tensors: slowly, for tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction


@triton.jit
def _nothing():
    pass


INTERPRETED = type(_nothing).__name__ != JITFunction.__name__
"""Whether this process's kernels run under Triton's interpreter: settled when they are defined."""


@final
@dataclass(frozen=True)
class Call:
    """One launch of a kernel, put off: has all that it takes to run it, or to compile it for another machine."""

    kernel: Any
    grid: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """Constants of the kernel and options of the compiler, by name."""

    def launch(self) -> None:
        """On the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants)


def available() -> tuple[bool, str]:
    """Whether Triton kernels can run in this process, and what they run on or miss."""
    if INTERPRETED:
        return True, f"Triton {triton.__version__}'s interpreter, for tests"
    if not torch.cuda.is_available():
        return False, f"Triton {triton.__version__} found no GPU"
    return True, f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"


def tuned(kernel: Any, configs: list[triton.Config], key: list[str], prune: Callable[..., Any] | None = None) -> Any:
    """The kernel, timed over `configs` at the first call for each value of `key`; the first of them if interpreted."""
    if INTERPRETED:
        configs = configs[:1]
    prune_configs_by = None if prune is None else {"early_config_prune": prune}
    return triton.autotune(configs, key, prune_configs_by=prune_configs_by)(kernel)


def require_gpu(*tensors: Tensor | None) -> None:
    """ValueError unless all tensors lie on one device that the kernels read; the interpreter reads any."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"tensors lie on {sorted(map(str, devices))}; move them to one device")
    if not INTERPRETED and any(device.type != "cuda" for device in devices):
        raise ValueError(f"tensors lie on {devices.pop()}; path='gpu' reads CUDA memory, path='naive' any")


@cache
def n_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for the interpreter, so that work is split there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
