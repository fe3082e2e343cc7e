"""No code assumes where tensors lie: what is made names its device, no device is a word, and what is brought to the
host is brought there for a reason.

Read from the source, whatever a name of torch is called there (`from torch import zeros`, `import torch as t`). Left
out: compiled CPU kernels, which read the host's memory by address. Every other exception is a function, with a reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "karhunen"

FACTORIES = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided",
    "eye", "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip
"""Functions of torch that make a tensor on the default device unless told otherwise. `frombuffer` and `from_numpy` are
views of the host's memory and take no device."""
ALWAYS_ON_THE_HOST = {
    f"{kind}Tensor" for kind in ("", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
}
"""Types of torch that make a tensor there when they are called."""
POSITIONAL = {"Generator"}
"""Those whose device comes first."""
MOVERS = {"cuda", "xpu", "hpu", "npu", "ipu"}
"""Methods of a tensor or a module that name a device by their name."""
DEVICE_WORDS = ("cpu", "cuda", "mps", "xpu", "hip")

EXCEPTIONS = {
    "names the host for all others; kernels import nothing of the rest": [
        "device.py:HOST", "kernels/host.py:HOST",
    ],
    "says which devices there are, or what is so of one kind": [
        "calibration/free_memory.py:free_bytes", "device.py:named", "device.py:present", "device.py:uploaded",
        "kernels/triton_launch.py:n_multiprocessors", "kernels/triton_launch.py:require_gpu",
        "monitoring/environment.py:_devices",
    ],
    "reads or writes devices as a user, accelerate or a process group names them": [
        "calibration/parallel.py:Processes.connected", "calibration/placement.py:_accelerates",
        "calibration/placement.py:_numbered", "calibration/placement.py:accelerators",
        "cli/options.py:DEFAULT_DEVICE", "hf/sizes.py:_spelled",
    ],
    "`cpu` is the name of a path, or the device that a path is for": [
        "attention/fused.py:WITH_LAYERS", "kernels/exact_attention/__init__.py:PATHS", "kernels/paths.py:LIBRARY",
        "kernels/paths.py:NATIVE", "kernels/paths.py:PATHS", "kernels/scan_attention/__init__.py:PATHS",
        "kernels/step_attention/__init__.py:PATHS",
    ],
    "decides on the host what is read how: asked once for many numbers, never in a step that codes nothing": [
        "device.py:answers", "evaluation/results/composition.py:coefficient_bits",
        "hf/cache.py:CompressedCache.reorder_cache", "hf/cache.py:CompressedLayer._select", "pages/exact.py:shortest",
        "pages/layer_pages.py:_kept", "pages/plan.py:PagePlan.checked", "store/exceptions.py:Exceptions.to",
        "store/layer_store.py:LayerStore._heat", "store/layer_store.py:LayerStore.select",
        "store/refinements.py:Refinements.bytes_by_line", "windows/small_norm.py:NormBelow.exact",
    ],
    "the device has no float64": [
        "calibration/host.py:with_float64", "windows/small_norm.py:token_norms",
    ],
    "sums of a layer leave its device, which then has room for the next layer's": [
        "calibration/gathering.py:_where_sums_can_be_made", "calibration/host.py:on_host",
        "evaluation/scores/leads.py:leads", "hf/input_maps.py:linear_map",
    ],
    "fitting and finding out, once for a model, in float64 and NumPy": [
        "adaptation/adapter.py:_Side.add", "adaptation/adapter.py:bits_of", "allocation/units.py:distortion_bound",
        "hf/rotary.py:_candidates", "hf/rotary.py:_error", "serving/vllm/paged.py:PagedLayer._find_order",
    ],
    "random numbers, or an order of a sum, that are to be the same for every device": [
        "calibration/output_correction.py:_pairs", "hf/drawing.py:_Chooser.__call__", "hf/drawing.py:continued",
        "hf/gradients.py:_backward", "kernels/byte_tables.py:ByteTables.half_norms",
    ],
    "tables laid out once for a device, and moved there as a whole": [
        "kernels/entry_quads.py:_cut", "kernels/entry_quads.py:_digit_words", "kernels/entry_quads.py:_float16_words",
        "kernels/scan_attention/gpu_frames.py:BoundFrames._made", "kernels/scan_attention/gpu_frames.py:_bias",
    ],
    "bytes for a file, a store, an entropy coder or a fingerprint": [
        "evaluation/scores/on_disk.py:on_disk", "folder.py:write_folder", "hf/describe.py:_glance",
        "hf/describe.py:sample_digest", "hf/fingerprint.py:_sums", "hf/session.py:save_session",
        "hf/states.py:state_page", "packing/deflate.py:DeflatedPages.shrink",
        "pages/refined_pages.py:RefinedPages._section", "pages/sides.py:SideLayout._by_part",
        "pages/sides.py:_array", "serving/vllm/saving.py:Saver._read", "serving/vllm/saving.py:Saver._window",
        "statistics/rotary.py:Rotary._key", "store/pages.py:PageBuffer._read", "values.py:fingerprint",
    ],
}  # fmt: skip
"""Reason → places: `file:function` (`Class.method`), or `file:NAME` of what a module defines."""
PLACES = {place for places in EXCEPTIONS.values() for place in places}


def test_every_tensor_names_its_device_and_comes_to_the_host_for_a_reason() -> None:
    breaches = [f"{place}, line {line}: {what}" for place, line, what in _found() if place not in PLACES]
    assert not breaches, "\n".join(breaches)


def test_every_exception_is_needed_and_said_once() -> None:
    listed = [place for places in EXCEPTIONS.values() for place in places]
    assert sorted({place for place, _, _ in _found()} & PLACES) == sorted(listed)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\ntorch.zeros(3)", "torch.zeros without a device"),
        ("import torch as t\nt.arange(3)", "torch.arange without a device"),
        ("from torch import zeros\nzeros(3)", "torch.zeros without a device"),
        ("from torch import zeros as z\nz(3, device=x.device)", None),
        ("from numpy import zeros\nzeros(3)", None),
        ("from torch import Tensor\nTensor([1.0])", "torch.Tensor, which lies on the host"),
        ("import torch\ntorch.LongTensor([1])", "torch.LongTensor, which lies on the host"),
        ("import torch\ntorch.Generator()", "torch.Generator without a device"),
        ("import torch\ntorch.Generator(x.device)", None),
        ("x.cpu().numpy()", "x.cpu()"),
        ("x.to(HOST)", "x.to(HOST)"),
        ("x.to(device=HOST)", "x.to(HOST)"),
        ("x.to(device)", None),
        ("model.cuda()", "x.cuda()"),
        ("torch.cuda.is_available()", None),
        ("x.to('cuda:1')", "the word 'cuda:1'"),
        ("say('cuda is fast')", None),
    ],
)  # fmt: skip
def test_the_law_sees(source: str, what: str | None) -> None:
    assert [found for _, _, found in _breaches(ast.parse(source))] == ([] if what is None else [what])


def _found() -> Iterator[tuple[str, int, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if name.startswith("kernels/scan/") or (name.startswith("kernels/") and file.name.startswith("cpu")):
            continue
        for scope, line, what in _breaches(ast.parse(file.read_text(encoding="utf-8"), filename=name)):
            yield f"{name}:{scope}", line, what


def _breaches(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Where, in which line, and what."""
    torch_names, functions = _names_of_torch(tree)
    for scope, node in _scoped(tree, ""):
        if (what := _breach(node, torch_names, functions)) is not None:
            yield scope, node.lineno, what  # type: ignore[attr-defined]


def _names_of_torch(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """What the module torch is called in a file, and what its functions are."""
    modules, functions = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "torch"}
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            functions |= {alias.asname or alias.name: alias.name for alias in node.names}
    return modules, functions


def _scoped(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node below with the function it is in; outside of all, with the name that a statement gives a value."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        elif not scope and isinstance(child, ast.Assign | ast.AnnAssign):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            inner = target.id if isinstance(target, ast.Name) else ""
        yield inner, child
        yield from _scoped(child, inner)


def _breach(node: ast.AST, torch_names: set[str], functions: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        word = node.value.split(":")[0]
        return f"the word {node.value!r}" if word in DEVICE_WORDS and len(node.value) <= len(word) + 3 else None
    if not isinstance(node, ast.Call):
        return None
    of_torch = None
    if isinstance(node.func, ast.Name):
        of_torch = functions.get(node.func.id)
    elif isinstance(node.func, ast.Attribute):
        if isinstance(node.func.value, ast.Name) and node.func.value.id in torch_names:
            of_torch = node.func.attr
        else:
            return _moved(node, node.func.attr)
    return None if of_torch is None else _made(node, of_torch)


def _made(node: ast.Call, name: str) -> str | None:
    if name in ALWAYS_ON_THE_HOST:
        return f"torch.{name}, which lies on the host"
    named = any(keyword.arg == "device" for keyword in node.keywords)
    if name in FACTORIES or name in POSITIONAL:
        return None if named or (name in POSITIONAL and node.args) else f"torch.{name} without a device"
    return None


def _moved(node: ast.Call, method: str) -> str | None:
    if method == "cpu" or method in MOVERS:
        return f"x.{method}()"
    given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
    to_host = any(isinstance(x, ast.Name) and x.id == "HOST" for x in given)
    return "x.to(HOST)" if method == "to" and to_host else None
