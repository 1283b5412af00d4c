"""Transport by ``jax.experimental.transfer``: JAX arrays pulled between processes, no further package needed.

Whole arrays move, and only under an id that the producer has announced. So the consumer asks for a piece of a
request; the producer packs its rows in token order and announces them; the consumer pulls and spreads them out. A
producer keeps one piece of each request at most, until the next is asked for or the lease has ended.

A pull of an id that is never announced, or from a peer that never was, stays pending for ever: it is waited for by
looking, within the limits of the fetch.
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from glmjax.errors import ConfigError
from glmjax.serving.clock import Clock
from glmjax.serving.transfer.channel import Message
from glmjax.serving.transfer.connector import RemoteConnector
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.interface import INDEX, MLA, Lease, PeerInfo, TransferError
from glmjax.serving.transfer.job import Guard, Job, Settings
from glmjax.serving.transfer.memory import AnyMemory, Memory, memory
from glmjax.serving.transfer.plan import Side, check_side, copy, plan_transfer

log = logging.getLogger(__name__)

Packed = tuple[int, list[jax.Array]]  # announced: id, arrays


class JaxConnector(RemoteConnector):
    """Pulls packed rows by JAX's transfer server, through a device of this process (the CPU where there is one)."""

    kind = "jax"

    def __init__(
        self, info: PeerInfo, rows: AnyMemory, clock: Clock, settings: Settings, device: jax.Device | None = None
    ):
        if isinstance(rows, DeviceMemory):
            raise ConfigError("connector 'jax' moves host memory: use kv_buffer_device='host'")
        self._rows = rows
        device = device or jax.local_devices(backend="cpu")[0]
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        address = f"{settings.host}:0"
        self._transfers = transfer.start_transfer_server(device.client, address, [address])
        self._itself = self._transfers.connect(self._transfers.address())
        # Ids of one run must not meet those of a run before at the same address.
        self._ids = itertools.count(secrets.randbits(62))
        self._packed: dict[str, Packed] = {}
        self._packing = threading.Lock()
        super().__init__(info, rows, clock, settings)

    def _hello(self) -> Message:
        return {"address": self._transfers.address()}

    def _meet(self, info: PeerInfo, hello: Message) -> Any:
        return self._transfers.connect(hello["address"])

    # Producer.

    def _answer_other(self, message: Message, lease: Lease) -> Message:
        if message.get("verb") != "pack":
            return super()._answer_other(message, lease)
        first, last = int(message["first"]), int(message["last"])
        if not 0 <= first < last <= lease.num_tokens:
            raise TransferError(f"tokens {first} .. {last} of {lease.num_tokens} were asked for")
        source = Side.of(self.info, lease.blocks, lease.group)
        try:
            check_side(source, self._slots, last)
        except ValueError as error:
            raise TransferError(str(error)) from None
        packed = packed_memory(self.info, last - first)
        copy(plan_transfer(self.info, source, Side.packed(first, last), first, last), self._rows, packed)
        arrays = [jax.device_put(packed[name].ranks[0], self._sharding) for name in (MLA, INDEX)]
        with self._packing:
            number = next(self._ids)
            self._packed[lease.request_id] = number, arrays  # who asks for another piece has the one before
            self._transfers.await_pull(number, arrays)
        return {"id": number, "shapes": [array.shape for array in arrays]}

    def _lease_ended(self, lease: Lease) -> None:
        with self._packing:
            number, arrays = self._packed.pop(lease.request_id, (0, []))
        if arrays and lease.state != "done":
            # JAX has no call to withdraw an announcement, which keeps the arrays: pulled by oneself, they are gone.
            self._pull(self._itself, number, [array.shape for array in arrays])

    # Consumer.

    def _read(self, job: Job) -> None:
        for first, last in job.pieces(self.settings.piece_bytes):
            job.guard.check()
            packed = packed_memory(self.info, 0)
            shapes = [(r.layers, last - first, r.row_bytes) for r in packed.values()]
            answer = self._ask(job.fetch.offer, "pack", first=first, last=last)
            if [tuple(shape) for shape in answer["shapes"]] != shapes:
                raise TransferError(f"rows of shapes {answer['shapes']} are sent and {shapes} were asked for")
            arrays = self._pull(job.peer.link, answer["id"], shapes)
            rows = memory(*([self._arrived(array, job.guard)] for array in arrays))
            plan = plan_transfer(self.info, Side.packed(first, last), job.target, first, last)
            copy(plan, rows, self._rows)
            job.moved(plan)

    def _pull(self, connection: Any, number: int, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        return connection.pull(number, [jax.ShapeDtypeStruct(s, np.uint8, sharding=self._sharding) for s in shapes])

    def _arrived(self, array: Any, guard: Guard) -> np.ndarray:
        while not array.is_ready():
            guard.pause()
        try:
            return np.asarray(array)
        except jax.errors.JaxRuntimeError as error:
            raise TransferError(f"the rows did not arrive: {error}") from error


def packed_memory(info: PeerInfo, tokens: int) -> Memory:
    """Room for rows of so many tokens, one after another."""
    sizes = ((info.layers, info.mla_row_bytes), (info.indexers, info.index_row_bytes))
    return memory(*([np.empty((layers, tokens, row_bytes), np.uint8)] for layers, row_bytes in sizes))
