"""No code assumes where tensors lie: every tensor that is made names its device, and no device is written as a word.

Left out: compiled CPU kernels, which read the host's memory by address. The other exceptions are below, with reasons.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "karhunen"

FACTORIES = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided",
    "eye", "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip
"""Functions of torch that make a tensor on the default device unless told otherwise. `frombuffer` and `from_numpy` are
views of the host's memory and take no device."""
POSITIONAL = {"Generator"}
"""Those whose device comes first."""

DEVICE_WORDS = ("cpu", "cuda", "mps", "xpu", "hip")

EXCEPTIONS = {
    "device.py": "names the host once, for all others",
    "kernels/paths.py": "names the compiled paths, and which device type each is for",
    "kernels/triton_launch.py": "says which tensors the GPU kernels read",
    "kernels/entry_quads.py": "cuts tables on the host, once, and moves them as a whole",
    "kernels/scan_attention/gpu_frames.py": "lays maps out on the host, once, and moves them as a whole",
    "kernels/byte_encode/gpu.py": "lays lists out on the host, once, and moves them as a whole",
    "kernels/quads.py": "arrays of the CPU kernels",
    "kernels/scan_attention/__init__.py": "`cpu` is the name of a path",
    "kernels/exact_attention/__init__.py": "`cpu` is the name of a path",
    "kernels/step_attention/__init__.py": "`cpu` is the name of a path",
    "calibration/free_memory.py": "asks each kind of device for its memory",
    "calibration/parallel.py": "asks a process group which devices it sends from",
    "calibration/placement.py": "reads the devices that a user names",
    "cli/options.py": "the default of an option",
    "hf/sizes.py": "reads the devices of a device map",
    "monitoring/environment.py": "names the devices it found",
}


def test_every_tensor_that_is_made_names_its_device() -> None:
    breaches = [f"{file}:{line}: {what}" for file, line, what in _found() if file not in EXCEPTIONS]
    assert not breaches, "\n".join(breaches)


def test_every_exception_is_needed() -> None:
    assert sorted({file for file, _, _ in _found()} & EXCEPTIONS.keys()) == sorted(EXCEPTIONS)


def _found() -> Iterator[tuple[str, int, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if name.startswith("kernels/scan/") or (name.startswith("kernels/") and file.name.startswith("cpu")):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=name)
        for node in ast.walk(tree):
            if (what := _breach(node)) is not None:
                yield name, node.lineno, what  # type: ignore[attr-defined]


def _breach(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        word = node.value.split(":")[0]
        return f"the word {node.value!r}" if word in DEVICE_WORDS and len(node.value) <= len(word) + 3 else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
        return None
    named = any(keyword.arg == "device" for keyword in node.keywords)
    if node.func.attr in POSITIONAL:
        return None if named or node.args else f"torch.{node.func.attr} without a device"
    return f"torch.{node.func.attr} without a device" if node.func.attr in FACTORIES and not named else None
