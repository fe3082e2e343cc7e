"""Statistics as a folder: what calibration leaves behind and `fit` starts from."""

from pathlib import Path
from typing import Any

from torch import Tensor

from karhunen.folder import read_folder, write_folder
from karhunen.statistics.gathered import Statistics
from karhunen.values import assemble, dismantle, kinds_in

FORMAT, VERSION = "karhunen-statistics", 1


def save_statistics(statistics: Statistics, folder: Path | str) -> None:
    """Write statistics, all of them or nothing; ValueError if the folder holds something else."""
    tensors: dict[str, Tensor] = {}
    body = {"statistics": dismantle(statistics, tensors)}
    # layers share the tensors of one rotation, which safetensors does not store twice
    write_folder(Path(folder), FORMAT, VERSION, body, {name: tensor.clone() for name, tensor in tensors.items()})


def load_statistics(folder: Path | str) -> Statistics:
    """Read statistics; ValueError if they are missing, damaged, of another format or version."""
    config, tensors = read_folder(Path(folder), FORMAT, VERSION)
    made: Any = assemble(config.get("statistics"), kinds_in("karhunen.statistics"), tensors)
    if not isinstance(made, Statistics):
        raise ValueError(f"{folder} holds a {type(made).__name__}, not statistics")
    return made
