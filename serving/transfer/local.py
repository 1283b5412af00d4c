"""Two engines of one process: rows are copied from the producer's memory into the consumer's."""

from glmjax.serving.clock import Clock
from glmjax.serving.transfer.channel import Message
from glmjax.serving.transfer.connector import Job, PullConnector, Settings
from glmjax.serving.transfer.interface import PeerInfo, TransferError
from glmjax.serving.transfer.memory import Memory
from glmjax.serving.transfer.plan import copy, plan_transfer

Hub = dict[str, "LocalConnector"]  # by engine id: where connectors of a process find each other


class LocalConnector(PullConnector):
    """Enters itself into a hub, and leaves it when closed."""

    kind = "local"

    def __init__(self, info: PeerInfo, rows: Memory, clock: Clock, settings: Settings, hub: Hub):
        super().__init__(info, rows, clock, settings)
        self._hub = hub
        hub[info.engine_id] = self

    def _read(self, job: Job) -> None:
        producer = self._hub.get(job.peer.info.engine_id)
        if producer is None:
            raise TransferError(f"engine {job.peer.info.engine_id} is gone")
        for first, last in job.pieces(self.settings.piece_bytes):
            job.guard.check()
            plan = plan_transfer(self.info, job.source, job.target, first, last)
            copy(plan, producer.rows, self.rows)
            job.moved(plan)

    def _call(self, engine_id: str, host: str, port: int, message: Message) -> Message:
        producer = self._hub.get(engine_id)
        if producer is None:
            raise TransferError(f"no engine {engine_id} in this process")
        return producer.answer(message)

    def _close(self) -> None:
        self._hub.pop(self.info.engine_id, None)
