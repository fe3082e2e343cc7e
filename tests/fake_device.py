"""A device that is none: tensors that say they lie on it, compute on the CPU, and refuse to meet others.

    with fake_device() as device:
        x = y.to(device.device)         # a copy, which y never meets again
        device.waits                    # what karhunen made the host wait for, and where

What torch refuses on a real device is refused here: two devices in one operation (a number without dimensions may come
from the host), NumPy's view of memory, float64 where the device has none. What makes the host wait for a real device is
written down by name. What it does not show: how fast anything is, and what kernels of that device compute.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from karhunen.device import computes_float64
from karhunen.kernels import paths, triton_launch

HOST = torch.device("cpu")
MEMORY_BYTES = 24 << 30
"""What the device says it has free: plans are made for it, nothing is taken of it."""
ASKED: dict[str, Any] = {  # of torch.cuda, and what it is to say
    "_lazy_init": lambda: None,
    "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
    "device_count": lambda: 1,
    "get_device_name": lambda device=None: "fake",
}
ANSWERS = {  # the shape or the value of the result depends on numbers
    "_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "masked_select", "equal", "is_nonzero", "allclose", "histc",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
MOVES = {"_to_copy", "copy_"}
SOURCE = "/src/karhunen/"
BETWEEN = ("/torch/", "/jaxtyping/", "<@beartype", "fake_device.py", "device.py")
"""Files that a wait passes through on its way from whoever asked."""


class FakeTensor(Tensor):
    """`inner` on the CPU, said to be elsewhere."""

    inner: Tensor
    home: "FakeDevice"

    @staticmethod
    def __new__(cls, inner: Tensor, home: "FakeDevice") -> "FakeTensor":
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=HOST, requires_grad=False,
        )  # fmt: skip
        made.inner, made.home = inner, home
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FakeTensor({self.inner!r}, {self.device})"

    @property
    def device(self) -> torch.device:
        return self.home.device

    @property
    def is_cuda(self) -> bool:
        return True

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def quantile(self, *args: Any, **kwargs: Any) -> "FakeTensor":
        """Whole: torch makes it of parts that look for the device themselves."""
        return self.home.take(self.inner.quantile(*_plain(args), **_plain(kwargs)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch would do without an operation, since it takes the numbers for the host's."""
        kwargs = kwargs or {}
        if func is Tensor.numpy or func is Tensor.data_ptr:
            raise TypeError(f"{func.__name__} of a tensor on {args[0].device}")
        if func is Tensor.tolist:
            return args[0].to(HOST).tolist()
        if func is Tensor.cpu:
            return args[0].to(HOST)
        if func is Tensor.to and isinstance(args[0], FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                return _moved(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        home = next(x.home for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))
        return home.run(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """A CUDA device as far as anybody can see; `waits` names what karhunen made the host wait for, and
    the line; `widest` counts the bytes of the largest tensor in float32 or float64 that was made, `n_synchronized` how
    often somebody waited for all that was queued."""

    def __init__(self, float64: bool = True) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.float64 = float64
        self.waits: list[str] = []
        self.widest = 0
        self.n_synchronized = 0

    def synchronize(self, device: Any) -> None:
        """As `torch.accelerator.synchronize`."""
        assert torch.device(device) == self.device
        self.n_synchronized += 1

    def take(self, x: Tensor) -> FakeTensor:
        """`x` there, without a copy."""
        return FakeTensor(x, self)

    def model(self, model: nn.Module) -> nn.Module:
        """The weights and buffers of `model` moved there, in place."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(self.take(weight.detach()), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.take(buffer)
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    setattr(module, name, self.take(value))
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation."""
        name = func._schema.name.split("::")[1]
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        wanted = kwargs.get("device")
        if not tensors and _in_backward():
            wanted = self.device
        if not fakes and (wanted is None or torch.device(wanted).type != self.device.type):
            return func(*args, **kwargs)
        if name not in MOVES:
            self._refuse_mixing(name, tensors)
        self._note(name, args, kwargs, bool(fakes))
        if wanted is not None:
            kwargs = {**kwargs, "device": HOST}
        made = func(*_plain(args), **_plain(kwargs))
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        stays = torch.device(wanted).type == self.device.type if wanted is not None else bool(fakes)
        return pytree.tree_map(self._taken, made) if stays else made

    def _taken(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.dtype == torch.float64 and not self.float64:
            raise TypeError(f"{self.device.type} has no float64")
        if x.dtype in (torch.float32, torch.float64):
            self.widest = max(self.widest, x.untyped_storage().nbytes())
        return FakeTensor(x, self)

    def _refuse_mixing(self, name: str, tensors: list[Tensor]) -> None:
        others = [x for x in tensors if not isinstance(x, FakeTensor) and x.ndim]
        if others and len(others) < len(tensors):
            raise RuntimeError(f"{name}: tensors on {self.device} and {others[0].device}, {tuple(others[0].shape)}")

    def _wait(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and any(part in frame.f_code.co_filename for part in BETWEEN):
            frame = frame.f_back
        if SOURCE in frame.f_code.co_filename:
            self.waits.append(f"{what} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], on_device: bool) -> None:
        if name in ANSWERS and on_device:
            self._wait(name)
        if name in INDEXING and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            self._wait(f"{name} by a mask")
        if name == "repeat_interleave" and isinstance(args[-1], Tensor):
            self._wait(name)
        if name == "_to_copy":
            to = kwargs.get("device")
            crosses = to is not None and torch.device(to).type != args[0].device.type
            if crosses and not kwargs.get("non_blocking"):
                self._wait(f"a copy from {args[0].device.type} to {torch.device(to).type}")
        if name == "copy_" and args[0].device.type != args[1].device.type and not (args[2:] and args[2]):
            self._wait(f"a copy from {args[1].device.type} to {args[0].device.type}")


@contextmanager
def fake_device(float64: bool = True, triton: bool = False) -> Iterator[FakeDevice]:
    """A fake device for the duration; its kernels are the definitions unless `triton`, whose interpreter brings every
    argument to the host and back."""
    own, interpreted = {name: getattr(torch.cuda, name) for name in ASKED}, triton_launch.INTERPRETED
    synchronize = torch.accelerator.synchronize
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) makes its numbers on the host first
    for name, answer in ASKED.items():
        setattr(torch.cuda, name, answer)
    triton_launch.INTERPRETED = interpreted and triton
    _forget()
    try:
        with FakeDevice(float64) as device:
            torch.accelerator.synchronize = device.synchronize
            yield device
    finally:
        for name, answer in own.items():
            setattr(torch.cuda, name, answer)
        torch.accelerator.synchronize, triton_launch.INTERPRETED = synchronize, interpreted
        torch._C._set_only_lift_cpu_tensors(False)
        _forget()


def _in_backward() -> bool:
    """Whether the gradient of an operation asks, which fills with zeros what it takes to lie on the host."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in ("/torch/", "fake_device.py")):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def _moved(x: FakeTensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` of a tensor that torch takes for the host's."""
    to = [args[0].device, args[0].dtype] if args and isinstance(args[0], Tensor) else [*args, kwargs.get("device")]
    device = next((torch.device(a) for a in to if isinstance(a, torch.device | str)), x.device)
    dtype = next((a for a in (*to, kwargs.get("dtype")) if isinstance(a, torch.dtype)), x.dtype)
    if device.type == x.device.type and dtype == x.dtype and not kwargs.get("copy"):
        return x
    waits = {"non_blocking": kwargs.get("non_blocking", False)}
    return torch.ops.aten._to_copy(x, dtype=dtype, device=device, **waits)


def _forget() -> None:
    computes_float64.cache_clear()
    paths.available.cache_clear()


def _plain(values: Any) -> Any:
    return pytree.tree_map(lambda x: x.inner if isinstance(x, FakeTensor) else x, values)
