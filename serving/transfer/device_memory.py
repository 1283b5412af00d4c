"""Device memory that KV rows are moved from and into: the stage of an engine, as connectors see it."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from glmjax.serving.transfer.interface import INDEX, MLA, TransferError
from glmjax.stage import Stage, num_ranks

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DeviceRegion:
    """Rows of one kind; ranks count through all data-parallel groups, as in ``memory.Region``.

    Attributes:
      layers: or indexers.
      slots: of each rank.
    """

    name: str
    num_ranks: int
    layers: int
    slots: int
    row_bytes: int


class DeviceMemory(dict[str, DeviceRegion]):
    """The stage's arrays, which programs of several threads write to: each is given them and leaves new ones.

    They stay where they are in memory, or ``replace`` says so: others may know the addresses. A program that fails may
    have taken them with it: then, and once they are freed, every use is a TransferError.
    """

    def __init__(self, stage: Stage):
        self._stage: Stage | tuple[()] = stage
        self._lock = threading.Lock()
        for name, rows in zip((MLA, INDEX), stage, strict=True):
            ranks, (layers, slots, row_bytes) = num_ranks(rows), rows.shape
            self[name] = DeviceRegion(name, ranks, layers, slots // ranks, row_bytes)
        self._addresses = addresses(stage)
        self._platform = stage[0].addressable_shards[0].device.platform

    @property
    def like(self) -> Stage:
        """The arrays as shapes, with where they are."""
        with self._held() as stage:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), stage)

    def read(self, use: Callable[[Stage], T]) -> T:
        """What a program makes of the arrays; it is started before anybody writes again."""
        with self._held() as stage:
            return use(stage)

    def replace(self, write: Callable[[Stage], tuple[Stage, T]]) -> T:
        """Lets a program write, in place: it is given the arrays, which it consumes, and returns them."""
        with self._held() as stage:
            self._stage, more = write(stage)
            if addresses(self._stage) != self._addresses:
                raise RuntimeError("a program copied the stage instead of writing to it")
            return more

    def free(self) -> None:
        """Gives the devices' memory back."""
        with self._lock:
            self._stage = ()

    @contextlib.contextmanager
    def _held(self) -> Iterator[Stage]:
        with self._lock:
            if not self._stage or any(x.is_deleted() for x in self._stage):
                raise TransferError("the stage on the devices is gone: " + ("lost" if self._stage else "freed"))
            yield self._stage

    def places(self, name: str) -> list[list[tuple[int, int]]]:
        """For each rank (address, number of the device) of its rows, on every device that has them."""
        region, ranks = self[name], [list[tuple[int, int]]() for _ in range(self[name].num_ranks)]
        for start, address, device in self._addresses[(MLA, INDEX).index(name)]:
            ranks[start // region.slots].append((address, device))
        return ranks

    @property
    def platform(self) -> str:
        """Of the devices: "cpu" or "gpu"."""
        return self._platform


def addresses(stage: Stage) -> list[list[tuple[int, int, int]]]:
    """(first slot, address, number of the device) of each device's part of either array."""
    return [
        [
            (shard.index[1].start or 0, shard.data.unsafe_buffer_pointer(), local_number(shard.device))
            for shard in rows.addressable_shards
        ]
        for rows in stage
    ]


def local_number(device: Any) -> int:
    """What CUDA calls the device within this process; 0 on a CPU."""
    return 0 if device.platform == "cpu" else int(device.local_hardware_id)
