"""Statistics as a folder: what calibration leaves behind and `fit` starts from."""

from pathlib import Path
from typing import Any

from torch import Tensor

from karhunen.folder import read_folder, write_folder
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS, Need, Slot, Statistic
from karhunen.statistics.projection import Projection
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples
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
    _check(Path(folder), made)
    return made


def _check(folder: Path, made: Statistics) -> None:
    """ValueError unless the layers are some of the model's, and rotations and sums are of their sizes."""
    shapes = made.model.layers
    if foreign := sorted(made.layers.keys() - set(range(len(shapes)))):
        raise ValueError(f"{folder} holds layers {foreign} of a model of {len(shapes)}")
    for index, layer in made.layers.items():
        try:
            for slot in SLOTS:
                _check_turn(layer.rotary(slot), shapes[index], slot)
            for need, statistic in layer.measured.items():
                _check_size(need, statistic, shapes[index])
        except ValueError as error:
            raise ValueError(f"{folder}: layer {index}: {error}") from error


def _check_turn(turn: Rotary | None, shape: LayerShape, slot: Slot) -> None:
    dim = shape.key_dim if slot == "key" else shape.value_dim
    if turn is None:
        return
    if not 0 <= turn.offset <= dim - turn.n_rotated:
        raise ValueError(f"{turn.n_rotated} coordinates from {turn.offset} on turn, and its {slot}s have {dim}")
    if not bool(turn.inv_freq.isfinite().all()):
        raise ValueError(f"its {slot}s turn by NaN or infinity")


def _check_size(need: Need, statistic: Statistic, shape: LayerShape) -> None:
    """Of hidden states any size will do, but one."""
    kind: type = {"samples": Samples, "projection": Projection}.get(need.kind, Moments)
    if type(statistic) is not kind:
        raise ValueError(f"its {need} are kept as {type(statistic).__name__}, not as {kind.__name__}")
    if isinstance(statistic, Projection):
        held, fits = tuple(statistic.weight.shape), statistic.bias.shape == statistic.weight.shape[1:]
    elif isinstance(statistic, Samples):
        held, fits = _groups(statistic.vectors), statistic.positions.shape == statistic.vectors.shape[1:2]
    else:
        g, d = held = _groups(statistic.outer)
        fits = (statistic.count.shape, statistic.sum.shape, statistic.outer.shape) == ((g,), (g, d), (g, d, d))
    if need.kind not in ("activations", "projection"):
        h, dim = shape.n_kv_heads, shape.key_dim if need.slot == "key" else shape.value_dim
        fits = fits and held == ((1, h * dim) if need.joined else (h, dim))
    if not fits:
        raise ValueError(f"its {need} are of sizes that do not fit each other or the layer")


def _groups(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[-1]
