"""Transport by NIXL: the consumer reads the producer's registered memory, by UCX: TCP, RDMA, NVLink or shared memory.

Either side's may be on the host or on its devices. What is on devices is read from, and written to, behind JAX's back:
a stage stays where it is, and no program reads or writes blocks that are on their way.

``nixl-cu12`` is optional: ``pip install --no-deps nixl-cu12==1.5.1``; torch, which it names as a requirement, it can do
without.

Rows go straight to their places where both shardings keep enough tokens together. Where they do not (an interleave of 1
means a read for each token and layer), each producer rank's rows are read as they lie into a staging buffer and spread
out from there: the same bytes in far fewer reads. Into devices they always go straight: let engines that send to them
have an interleave of a block.
"""

import dataclasses
import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glmjax.errors import ConfigError
from glmjax.serving.clock import Clock
from glmjax.serving.transfer.channel import Message
from glmjax.serving.transfer.connector import RemoteConnector
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.interface import INDEX, MLA, PeerInfo, TransferError
from glmjax.serving.transfer.job import Guard, Job, Peer, Settings
from glmjax.serving.transfer.memory import AnyMemory, Memory, Region
from glmjax.serving.transfer.plan import Part, TransferPlan, copy, plan_transfer

log = logging.getLogger(__name__)

HOST, DEVICE = "DRAM", "VRAM"  # NIXL's types of memory
MOST_READS = 1 << 16  # in one request to NIXL
WORTH_STAGING = 4  # times as many reads without
IDLE, BUSY = 0.02, 0.001  # seconds between looks, without and with leases
GIVE_UP = 10.0  # seconds in which a cancelled read must have ended

Places = dict[str, list[tuple[int, int]]]  # by kind of rows: address of each rank's first row, number of its device


@dataclasses.dataclass(eq=False)
class Link:
    """A producer as NIXL knows it; parted from when nothing is read from it any more."""

    agent: str
    memory: str
    places: Places
    users: int = 0
    gone: bool = False


class NixlConnector(RemoteConnector):
    """Reads rows with a NIXL agent named like the engine."""

    kind = "nixl"

    def __init__(self, info: PeerInfo, rows: AnyMemory, clock: Clock, settings: Settings):
        api = nixl_api()
        # Several threads use it: fetches, answers and its own. NIXL's progress thread would spin: a core for an agent.
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        options = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
        self._agent = api.nixl_agent(info.engine_id, options)
        self._memory, copies = memory_type(rows), places(rows)
        self._places = {name: [each[0] for each in ranks] for name, ranks in copies.items()}
        self._shared = any(len(each) > 1 for ranks in copies.values() for each in ranks)
        sizes = {name: region.layers * region.slots * region.row_bytes for name, region in rows.items()}
        self._registered = [
            self._register(address, sizes[name], device, self._memory)
            for name, ranks in copies.items()
            for each in ranks
            for address, device in each
        ]
        self._links = threading.Lock()
        self._staging_turn = threading.Lock()
        self._staging = np.empty(0, np.uint8)  # registered last
        super().__init__(info, rows, clock, settings)
        self._over = threading.Event()
        self._progress = threading.Thread(target=self._make_progress, name="kv-nixl", daemon=True)
        self._progress.start()

    def _register(self, address: int, size: int, device: int = 0, memory: str = HOST) -> Any:
        return self._agent.register_memory([(address, size, device, "")], memory)

    # Producer.

    def _hello(self) -> Message:
        return {"agent": self._agent.get_agent_metadata(), "memory": self._memory, "places": self._places}

    def _make_progress(self) -> None:
        """Lets NIXL serve readers, whatever the engine does, and takes note of what has been read."""
        while not self._over.is_set():
            if not self.held():
                self._over.wait(IDLE)
                continue
            try:
                notices = self._agent.get_new_notifs()
            except Exception as error:  # a reader that died; the others go on, and leases run out
                log.warning("NIXL: %s", error)
                notices = {}
            self._were_read([text.decode(errors="replace") for texts in notices.values() for text in texts])
            self._over.wait(BUSY)

    # Consumer.

    def _meet(self, info: PeerInfo, hello: Message) -> Link:
        agent = self._agent.add_remote_agent(hello["agent"])
        name = agent.decode() if isinstance(agent, bytes) else agent
        return Link(name, hello["memory"], hello["places"])

    def _part(self, peer: Peer) -> None:
        with self._links:
            peer.link.gone = True
            if peer.link.users == 0:
                self._forget(peer.link)

    def _forget(self, link: Link) -> None:
        try:
            self._agent.remove_remote_agent(link.agent)
        except Exception as error:
            log.info("NIXL agent %s could not be removed: %s", link.agent, error)

    def _read(self, job: Job) -> None:
        if self._shared:
            raise TransferError("several devices have the same KV here, and NIXL would write to one of them")
        link = job.peer.link
        with self._links:
            if link.gone:
                raise TransferError(f"engine {link.agent} is gone")
            link.users += 1
        try:
            plan = plan_transfer(self.info, job.source, job.target, job.first, job.last)
            as_they_lie = plan_transfer(
                self.info, job.source, job.source.entries(job.first, job.last), job.first, job.last
            )
            mine = self.rows
            if isinstance(mine, DeviceMemory) or plan.num_copies <= WORTH_STAGING * as_they_lie.num_copies:
                self._transfer(job, plan, self._places, self._slots, job.final)
                job.moved(plan)
            else:
                self._read_staged(job, mine)
        finally:
            with self._links:
                link.users -= 1
                if link.gone and link.users == 0:
                    self._forget(link)

    def _read_staged(self, job: Job, mine: Memory) -> None:
        while not self._staging_turn.acquire(timeout=0.001):
            job.guard.check()
        try:
            for first, last in job.pieces(self.settings.piece_bytes):
                staged = job.source.entries(first, last)
                tokens = job.peer.info.entry_tokens
                rows = self._stage(job.peer.info, -(-last // tokens) - first // tokens)
                slots = {name: region.slots for name, region in rows.items()}
                inward = plan_transfer(self.info, job.source, staged, first, last)
                final = job.final and last == job.last
                staging = {name: [(rank.ctypes.data, 0) for rank in region.ranks] for name, region in rows.items()}
                self._transfer(job, inward, staging, slots, final, HOST)
                copy(plan_transfer(self.info, staged, job.target, first, last), rows, mine)
                job.moved(inward)
        finally:
            self._staging_turn.release()

    def _stage(self, source: PeerInfo, entries: int) -> Memory:
        """Registered room for so many entries of a block table of the source, on each of its DCP ranks."""
        slots = entries * source.block_size
        needed = slots * source.dcp * source.token_bytes
        if self._staging.nbytes < needed:
            if self._staging.nbytes:
                self._agent.deregister_memory(self._registered.pop())
            self._staging = np.empty(max(needed, self.settings.piece_bytes), np.uint8)
            self._registered.append(self._register(self._staging.ctypes.data, self._staging.nbytes))
        rows, start = {}, 0
        for name, layers, width in (
            (MLA, source.layers, source.mla_row_bytes),
            (INDEX, source.indexers, source.index_row_bytes),
        ):
            size = layers * slots * width
            ends = range(start, start + source.dcp * size, size)
            start += source.dcp * size
            rows[name] = Region(name, tuple(self._staging[at : at + size].reshape(layers, slots, width) for at in ends))
        return rows

    def _transfer(
        self,
        job: Job,
        plan: TransferPlan,
        local: Places,
        local_slots: Mapping[str, int],
        final: bool,
        memory: str | None = None,
    ) -> None:
        """Carries out the reads of a plan into one's own memory, or another type; the last of a final one tells the
        producer."""
        memory = memory or self._memory
        here, there = reads(plan, job.peer, local, local_slots)
        for start in range(0, len(here), MOST_READS):
            part = slice(start, start + MOST_READS)
            notice = job.fetch.offer.request_id.encode() if final and start + MOST_READS >= len(here) else b""
            self._read_once(job.peer.link, memory, here[part], there[part], notice, job.guard)

    def _read_once(
        self, link: Link, memory: str, here: np.ndarray, there: np.ndarray, notice: bytes, guard: Guard
    ) -> None:
        nixl, agent, handle = self._agent, link.agent, None
        guard.check()
        try:
            local, remote = nixl.get_xfer_descs(here, memory), nixl.get_xfer_descs(there, link.memory)
            handle = nixl.initialize_xfer("READ", local, remote, agent, notice)
            state = nixl.transfer(handle)
            while state == "PROC":
                guard.pause()
                state = nixl.check_xfer_state(handle)
        except TransferError:
            raise
        except Exception as error:  # NIXL's own exceptions have no common base
            raise TransferError(f"NIXL could not read from engine {agent}: {type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                self._release(handle, agent)
        if state != "DONE":
            raise TransferError(f"NIXL failed to read from engine {agent}")

    def _release(self, handle: Any, agent: str) -> None:
        """Lets go of a read that is over or is to be cancelled, and returns when nothing is written any more."""
        end = self.clock.monotonic() + GIVE_UP
        while True:
            try:
                return self._agent.release_xfer_handle(handle)
            except Exception as error:
                if self.clock.monotonic() >= end:
                    log.error("a read from engine %s does not end: %s", agent, error)
                    return None
            threading.Event().wait(0.005)

    def _close(self) -> None:
        super()._close()
        self._over.set()
        self._progress.join()
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except Exception as error:
                log.info("memory could not be deregistered: %s", error)


def nixl_api() -> Any:
    """The Python API of NIXL, its log joined to everybody's: by itself it goes to standard output.

    Raises:
      ConfigError: NIXL is not installed.
    """
    try:
        api = importlib.import_module("nixl_cu12._api")
    except ImportError as error:
        raise ConfigError(f"connector 'nixl' needs NIXL ({error}): pip install --no-deps nixl-cu12==1.5.1") from None
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return api


def places(rows: AnyMemory) -> dict[str, list[list[tuple[int, int]]]]:
    """By kind, for each rank: address and number of the device, of every copy of its rows."""
    if isinstance(rows, DeviceMemory):
        return {name: rows.places(name) for name in rows}
    return {name: [[(rank.ctypes.data, 0)] for rank in region.ranks] for name, region in rows.items()}


def memory_type(rows: AnyMemory) -> str:
    """As NIXL calls it. JAX's devices of a CPU are host memory."""
    return DEVICE if isinstance(rows, DeviceMemory) and rows.platform != "cpu" else HOST


def reads(
    plan: TransferPlan, peer: Peer, local: Places, local_slots: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """What NIXL is asked to read: (address, bytes, device) [reads, 3] uint64 here and there, layer by layer."""
    here: list[np.ndarray] = []
    there: list[np.ndarray] = []
    for part in plan.parts:
        runs, remote = part.runs, peer.link.places[part.name]
        here.append(_descriptors(part, local[part.name], local_slots[part.name], runs.target_rank, runs.target_slot))
        there.append(_descriptors(part, remote, peer.slots[part.name], runs.source_rank, runs.source_slot))
    return np.concatenate(here), np.concatenate(there)


def _descriptors(
    part: Part, bases: Sequence[tuple[int, int]], slots: int, rank: np.ndarray, slot: np.ndarray
) -> np.ndarray:
    starts, devices = np.asarray(bases, np.uint64).T
    row = np.arange(part.layers)[:, None] * slots + slot  # [layers, runs]
    found = np.zeros((*row.shape, 3), np.uint64)
    found[..., 0] = starts[rank] + (row * part.row_bytes).astype(np.uint64)
    found[..., 1], found[..., 2] = part.runs.count * part.row_bytes, devices[rank]
    return found.reshape(-1, 3)
