"""Who a model is, read from its files: for engines that hold its weights under other names than transformers does.

    config.json                ─▶ architecture, config hash            as `describe` makes them of a loaded model
    headers of *.safetensors   ─▶ 16 numbers of each tensor ─▶ weights hash
    all bytes of *.safetensors ─▶ fingerprint of every weight

Nothing is loaded. The fingerprint is of the files, so it differs from `weights_fingerprint` of the same model loaded:
pages of an engine and pages of transformers are not exchanged.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download

from karhunen.hf.describe import config_hash, sample_digest, sampled_at

READ_BYTES = 1 << 24
PLAIN = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HEAD_PREFIXES = ("lm_head.", "embed_out.", "score.")


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """The folder of a model that an engine has loaded: `name` itself, or the hub's snapshot on this disk."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else Path(snapshot_download(name, revision=revision, local_files_only=True))


def checkpoint_fingerprint(folder: Path) -> str:
    """32 hex digits of every byte of the weights' files; ValueError if there are none.

    A file that the hub's cache names by its hash is not read again.
    """
    files = _weight_files(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_file_digest, files))
    lines = [f"{file.name} {digest}" for file, digest in zip(files, digests, strict=True)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def checkpoint_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The configuration of its text decoder."""
    config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return config.get_text_config(decoder=True)


def checkpoint_identity(folder: Path, trust_remote_code: bool = False) -> tuple[str, str, str]:
    """(architecture, config hash, weights hash) as `describe` makes them; the last is empty where the file's tensors
    are not the parameters of transformers' model one for one, or no plain numbers."""
    config = checkpoint_config(folder, trust_remote_code)
    return str(config.model_type), config_hash(config), _weights_hash(folder, config, trust_remote_code)


def _weights_hash(folder: Path, config: Any, trust_remote_code: bool) -> str:
    digests: list[bytes] = []
    shapes: list[tuple[int, ...]] = []
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
            for name, entry in header.items():
                if name == "__metadata__" or name.startswith(HEAD_PREFIXES):
                    continue
                if entry["dtype"] not in PLAIN:
                    return ""
                shapes.append(tuple(entry["shape"]))
                sample = _sample(stream, 8 + length + entry["data_offsets"][0], entry)
                digests.append(sample_digest(shapes[-1], sample))
    if not digests or sorted(shapes) != _parameter_shapes(config, trust_remote_code):
        return ""
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


def _sample(stream: Any, start: int, entry: dict[str, Any]) -> torch.Tensor:
    dtype, count = PLAIN[entry["dtype"]], 1
    for size in entry["shape"]:
        count *= size
    numbers: list[torch.Tensor] = []
    for index in sampled_at(count).tolist():
        stream.seek(start + index * dtype.itemsize)
        numbers.append(torch.frombuffer(bytearray(stream.read(dtype.itemsize)), dtype=dtype))
    return torch.cat(numbers)


def _parameter_shapes(config: Any, trust_remote_code: bool) -> list[tuple[int, ...]]:
    """Of transformers' model without its head, sorted; nothing is allocated."""
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    body: Any = getattr(model, "base_model", model)
    return sorted(tuple(parameter.shape) for parameter in body.parameters())


def _weight_files(folder: Path) -> list[Path]:
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"{folder} holds no weights (safetensors, bin, pt or gguf), so pages cannot say whose they are")


def _file_digest(file: Path) -> str:
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs" and len(target.name) in (40, 64):
        return target.name
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
