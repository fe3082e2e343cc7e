"""Several processes calibrate together: each runs its share of the text, the first adds up in the order of the text.

    step j ─▶ process j mod n ─▶ its sums ─▶ process 0:  ((step 0 + step 1) + step 2) + …

The additions are those of one process, in the same order, so the statistics are the same bits for every n; reducing
each process's own total would round differently. What travels is the sums of one step and layer, in the host's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Processes:
    """Who calibrates: this process, of so many. `group` is one of torch.distributed, None for the default one."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def alone(cls) -> "Processes":
        """This process by itself, whatever groups there are."""
        return cls()

    @classmethod
    def of(cls, group: Any = None) -> "Processes":
        """The processes of a group. ValueError if torch.distributed is not initialised or this process is no member."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("there is no process group; call torch.distributed.init_process_group first")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process does not belong to the group that calibrates")
        return cls(rank, dist.get_world_size(group), group)

    @classmethod
    def found(cls) -> "Processes":
        """Those of the default group, if one is initialised; this process alone otherwise."""
        return cls.of() if dist.is_available() and dist.is_initialized() else cls.alone()

    @classmethod
    @contextmanager
    def launched(cls) -> Iterator["Processes"]:
        """Those that torchrun (or accelerate, which uses it) started together with this one; else this one alone."""
        if not dist.is_available() or not dist.is_torchelastic_launched() or dist.is_initialized():
            yield cls.found()
            return
        dist.init_process_group("gloo")
        try:
            yield cls.of()
        finally:
            dist.destroy_process_group()

    @contextmanager
    def connected(self) -> Iterator["Channel"]:
        """A way to the others for the duration: their group if it carries the host's memory, else one beside it.

        ValueError for a part of the processes whose group carries no host memory (NCCL alone).
        """
        if self.size == 1:
            yield Channel(self, None)
        elif "cpu:" in dist.get_backend_config(self.group):
            yield Channel(self, dist.group.WORLD if self.group is None else self.group)
        elif self.size < dist.get_world_size():
            raise ValueError(
                "the group is for accelerators alone, and sums travel in the host's memory; make it with "
                "torch.distributed.new_group(ranks, backend='cpu:gloo,cuda:nccl')"
            )
        else:
            beside: Any = dist.new_group(backend="gloo")
            try:
                yield Channel(self, beside)
            finally:
                dist.destroy_process_group(beside)


@final
@dataclass(frozen=True)
class Channel:
    """What processes say to each other while they calibrate. Every method is called by all of them, in one order."""

    processes: Processes
    group: Any

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the sums."""
        return self.processes.rank == 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.processes.size

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Which one this is on its machine, where torchrun says so."""
        return dist.get_node_local_rank(fallback_rank=0) if self.size > 1 else 0

    def all(self, value: T) -> list[T]:
        """The values of all processes, in order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _naming_the_lost():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: T) -> T:
        """The first process's value, everywhere."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        with _naming_the_lost():
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]

    def sent(self, value: T, sender: int) -> T | None:
        """On the first process what `sender` sends; on the others nothing. Only these two take part."""
        box: list[Any] = [value]
        with _naming_the_lost():
            if self.rank == sender:
                dist.send_object_list(box, dst=dist.get_global_rank(self.group, 0), group=self.group)
            elif self.is_first:
                dist.recv_object_list(box, src=dist.get_global_rank(self.group, sender), group=self.group)
        return box[0] if self.is_first else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where one process fails inside, all end: it with its own error, the others with ValueError that names it.

        KeyboardInterrupt counts too. No other method may be called inside: the others would wait for its answer.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, ConnectionError):
                self.all(f"{error}" or type(error).__name__)
            raise
        failed = [(rank, message) for rank, message in enumerate(self.all("")) if message]
        if failed:
            rank, message = failed[0]
            raise ValueError(f"process {rank} of {self.size} (counted from 0): {message}")


@contextmanager
def _naming_the_lost() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, torch.distributed.DistBackendError) as error:
        raise ConnectionError(
            "another process of this calibration ended or does not answer, so it cannot be finished; its own message "
            "says why, and with --resume what was done is kept"
        ) from error
