"""Two engines of one process: rows are copied from one's memory into the other's, on the host or device to device."""

import collections

import jax

from glmjax.serving.clock import Clock
from glmjax.serving.transfer.channel import Message
from glmjax.serving.transfer.connector import Job, PullConnector, Settings
from glmjax.serving.transfer.device import DeviceWay
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.interface import Offer, PeerInfo, TransferError
from glmjax.serving.transfer.memory import AnyMemory
from glmjax.serving.transfer.plan import copy, plan_transfer

Hub = dict[str, "LocalConnector"]  # by engine id: where connectors of a process find each other

AHEAD = 2  # pieces that are on their way between devices at a time: what that takes in memory


class LocalConnector(PullConnector):
    """Enters itself into a hub, and leaves it when closed."""

    kind = "local"

    def __init__(self, info: PeerInfo, rows: AnyMemory, clock: Clock, settings: Settings, hub: Hub):
        super().__init__(info, rows, clock, settings)
        self._hub = hub
        hub[info.engine_id] = self

    def meet(self, engine_id: str) -> None:
        """Shakes hands with a producer before it offers anything, and compiles what moves its rows.

        Raises:
          TransferError: it cannot exchange rows with this engine.
        """
        self._peer(Offer(engine_id=engine_id, request_id="", blocks=(), num_tokens=0))

    def _meet(self, info: PeerInfo, hello: Message) -> DeviceWay | None:
        theirs = self._producer(info.engine_id).rows
        if isinstance(theirs, DeviceMemory) and isinstance(self.rows, DeviceMemory):
            return DeviceWay(theirs, self.rows, info.sharding, self.info.sharding)
        if isinstance(theirs, DeviceMemory) or isinstance(self.rows, DeviceMemory):
            raise TransferError(
                f"engines {info.engine_id} and {self.info.engine_id} must have the same kv_buffer_device: one has rows "
                "on their way on its devices, the other on the host"
            )
        return None

    def _read(self, job: Job) -> None:
        producer = self._producer(job.peer.info.engine_id)
        if job.peer.link is None:
            self._copy(job, producer.rows)
        else:
            self._move(job, job.peer.link)

    def _copy(self, job: Job, theirs: AnyMemory) -> None:
        mine = self.rows
        assert not isinstance(mine, DeviceMemory) and not isinstance(theirs, DeviceMemory)  # _meet looked
        for first, last in job.pieces(self.settings.piece_bytes):
            job.guard.check()
            plan = plan_transfer(self.info, job.source, job.target, first, last)
            copy(plan, theirs, mine)
            job.moved(plan)

    def _move(self, job: Job, way: DeviceWay) -> None:
        going: collections.deque[jax.Array] = collections.deque()
        try:
            for first, last in way.pieces(job.first, job.last):
                job.guard.check()
                plan = plan_transfer(self.info, job.source, job.target, first, last)
                going.append(way.move(plan, job.source.first_rank, job.target.first_rank))
                job.moved(plan)
                if len(going) > AHEAD:
                    going.popleft().block_until_ready()
        finally:
            jax.block_until_ready(list(going))

    def _producer(self, engine_id: str) -> "LocalConnector":
        producer = self._hub.get(engine_id)
        if producer is None:
            raise TransferError(f"engine {engine_id} is gone")
        return producer

    def _call(self, engine_id: str, host: str, port: int, message: Message) -> Message:
        producer = self._hub.get(engine_id)
        if producer is None:
            raise TransferError(f"no engine {engine_id} in this process")
        return producer.answer(message)

    def _close(self) -> None:
        self._hub.pop(self.info.engine_id, None)
