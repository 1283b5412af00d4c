"""What every connector does the same: leases on one side, fetches on the other, and the messages between them.

A kind of connector adds how rows get here (``_read``) and how engines reach each other. A fetch is a thread: shake
hands once per peer, begin the lease, read, and make sure that the lease lived all the while, for what was read after
its end may be another request's. Rows count as read under the lease if that was done before the lease that the producer
last granted could have run out, on one's own clock from the moment of asking; failing that, the producer is asked.

Messages (maps with a ``verb``): hello, begin, heartbeat, done, failed, and what a kind of connector adds.
"""

import abc
import collections
import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from glmjax.errors import ConfigError
from glmjax.serving.clock import Clock
from glmjax.serving.transfer.channel import ChannelServer, Message, call
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.interface import (
    PROTOCOL,
    Fetch,
    Lease,
    Offer,
    PeerInfo,
    Tables,
    TransferError,
    check_compatible,
)
from glmjax.serving.transfer.job import Guard, Job, Peer, Settings, Unheard
from glmjax.serving.transfer.leases import LeaseBook
from glmjax.serving.transfer.memory import AnyMemory, check_memory
from glmjax.serving.transfer.plan import Side, check_side

log = logging.getLogger(__name__)


class PullConnector(abc.ABC):
    """See ``interface.Connector``, which this is but for ``_read``."""

    kind: str

    def __init__(self, info: PeerInfo, rows: AnyMemory, clock: Clock, settings: Settings):
        if info.connector != self.kind:
            raise ConfigError(f"connector must be {self.kind!r} for this engine, got {info.connector!r}")
        check_memory(info, rows)
        self.info, self.rows, self.clock, self.settings = info, rows, clock, settings
        self.host, self.port = settings.host, settings.port
        self._slots = {name: region.slots for name, region in rows.items()}
        self._lock = threading.Lock()  # guards what follows
        self._book = LeaseBook(settings.lease_seconds)
        self._peers: dict[str, Peer] = {}
        self._meeting: dict[str, threading.Lock] = {}
        self._running: dict[Fetch, threading.Thread | None] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._closed = False

    # What a kind of connector adds.

    @abc.abstractmethod
    def _read(self, job: Job) -> None:
        """Moves a job's rows. When it returns or raises TransferError, nothing is written any more."""

    def _hello(self) -> Message:
        """What a consumer gets to know when hands are shaken."""
        return {}

    def _meet(self, info: PeerInfo, hello: Message) -> Any:
        """The link to a producer."""
        return None

    def _part(self, peer: Peer) -> None:  # noqa: B027
        """The producer is gone."""

    def _answer_other(self, message: Message, lease: Lease) -> Message:
        """Answers a verb that a kind of connector adds, for a lease that lives."""
        raise TransferError(f"unknown verb {message.get('verb')!r}")

    def _lease_ended(self, lease: Lease) -> None:  # noqa: B027
        """Frees what a kind of connector keeps for a lease."""

    def _close(self) -> None:  # noqa: B027
        """Frees what a kind of connector keeps."""

    @abc.abstractmethod
    def _call(self, engine_id: str, host: str, port: int, message: Message) -> Message:
        """Sends a message to an engine and waits for its answer. TransferError if there is none."""

    # Producer.

    def offer(
        self,
        request_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        group: int = 0,
        *,
        prompt: str = "",
        first: int = 0,
    ) -> Offer:
        if not 0 <= group < self.info.dp:
            raise ValueError(f"group must be in [0, {self.info.dp}), got {group}")
        check_side(Side.of(self.info, blocks, group), self._slots, num_tokens)
        with self._lock:
            if self._closed:
                raise ValueError("the connector is closed")
            now = self.clock.monotonic()
            lease = self._book.offer(request_id, blocks, num_tokens, group, now, prompt=prompt, first=first)
        return Offer(
            engine_id=self.info.engine_id,
            request_id=request_id,
            blocks=lease.blocks,
            num_tokens=num_tokens,
            group=group,
            dcp=self.info.dcp,
            host=self.host,
            port=self.port,
            lease_seconds=self.settings.lease_seconds,
            prompt=prompt,
        )

    def withdraw(self, request_id: str) -> bool:
        with self._lock:
            return self._book.withdraw(request_id, self.clock.monotonic())

    def collect(self) -> tuple[Lease, ...]:
        with self._lock:
            ended = self._book.collect(self.clock.monotonic())
        for lease in ended:
            self._lease_ended(lease)
        return ended

    def held(self) -> list[tuple[int, ...]]:
        """Blocks of each lease that is not collected."""
        with self._lock:
            return list(self._book.held())

    def _were_read(self, request_ids: Sequence[str]) -> None:
        """The transport says so, before the consumer does."""
        with self._lock:
            for request_id in request_ids:
                self._book.done(request_id, self.clock.monotonic())

    def answer(self, message: Message) -> Message:
        """What a consumer's message gets. TransferError if it is refused."""
        if message.get("verb") == "hello":
            return self._shake(message)
        if message.get("engine") != self.info.engine_id:
            raise TransferError(f"engine {message.get('engine')} is not here, but {self.info.engine_id}: restarted?")
        request_id = str(message.get("request"))
        book, now = self._book, self.clock.monotonic()
        with self._lock:
            if self._closed:
                raise TransferError(f"engine {self.info.engine_id} is closing")
            match message.get("verb"):
                case "heartbeat":
                    return {"state": book.heartbeat(request_id, now), "seconds": book.seconds}
                case "done":
                    return {"state": book.done(request_id, now)}
                case "failed":
                    log.warning("request %s was given up by its consumer: %s", request_id, message.get("reason"))
                    return {"state": book.fail(request_id, now)}
            lease = book.begin(request_id, now)
        if message.get("verb") == "begin":
            names = ("blocks", "num_tokens", "group", "prompt", "first")
            fields = {name: getattr(lease, name) for name in names}
            return {"seconds": book.seconds, **fields}
        return self._answer_other(message, lease)

    def _shake(self, message: Message) -> Message:
        theirs = _peer_info(message)
        try:
            check_compatible(self.info, theirs)
        except ConfigError as error:
            raise TransferError(str(error)) from None
        return {"info": msgspec.to_builtins(self.info), "slots": self._slots, "link": self._hello()}

    # Consumer.

    def fetch(
        self,
        offer: Offer,
        blocks: Tables,
        *,
        first: int = 0,
        last: int | None = None,
        group: int = 0,
        final: bool = True,
    ) -> Fetch:
        last = offer.num_tokens if last is None else last
        if not 0 <= first <= last <= offer.num_tokens:
            raise ValueError(f"tokens must be within 0 .. {offer.num_tokens}, got {first} .. {last}")
        if not 0 <= group < self.info.dp:
            raise ValueError(f"group must be in [0, {self.info.dp}), got {group}")
        target = Side.of(self.info, blocks, group)
        if last > first:
            check_side(target, self._slots, last)
        fetch = Fetch(offer, last - first)
        work = functools.partial(self._fetch, fetch, target, first, last, final)
        if self.settings.inline:
            work()
            return fetch
        thread = threading.Thread(target=work, name=f"kv-fetch-{offer.request_id}", daemon=True)
        with self._lock:
            if self._closed:
                raise ValueError("the connector is closed")
            self._running[fetch] = thread
        thread.start()
        return fetch

    def done(self, offer: Offer) -> None:
        self._tell_aside(offer, "done")

    def failed(self, offer: Offer, reason: str) -> None:
        self._tell_aside(offer, "failed", reason=reason)

    def heartbeat(self, offer: Offer) -> None:
        self._tell_aside(offer, "heartbeat")

    def _fetch(self, fetch: Fetch, target: Side, first: int, last: int, final: bool) -> None:
        error = None
        try:
            if last > first:
                self._fetch_rows(fetch, target, first, last, final)
        except TransferError as known:
            error = known
        except Exception as unknown:
            log.exception("a fetch of request %s failed", fetch.offer.request_id)
            error = TransferError(f"{type(unknown).__name__}: {unknown}")
            error.__cause__ = unknown
        with self._lock:
            self._running.pop(fetch, None)
            self._counts["fetches_failed" if error else "fetches_done"] += 1
            self._counts["bytes_fetched"] += fetch.bytes_moved
        fetch.end(error)
        # The rows are here, so the request goes on before the producer is told.
        if error is not None:
            self._tell(fetch.offer, "failed", reason=str(error))
        elif final:
            self._tell(fetch.offer, "done")

    def _fetch_rows(self, fetch: Fetch, target: Side, first: int, last: int, final: bool) -> None:
        offer = fetch.offer
        peer = self._peer(offer)
        guard = Guard(fetch, functools.partial(self._extend, offer), self.clock, self.settings)
        guard.check()
        asked = self.clock.monotonic()
        granted = self._ask(offer, "begin")
        guard.extend(asked, granted["seconds"])
        if granted["prompt"] != offer.prompt:
            raise TransferError(f"request {offer.request_id!r} is offered with the KV of another prompt")
        if first < granted["first"]:
            raise TransferError(
                f"request {offer.request_id!r} is offered from token {granted['first']} on, and is wanted from {first}"
            )
        # The offer has passed through other hands: what the producer itself says is what is read.
        offered = (offer.num_tokens, offer.group, offer.dcp, offer.blocks)
        truth = (granted["num_tokens"], granted["group"], peer.info.dcp, tuple(granted["blocks"]))
        if offered != truth:
            raise TransferError(
                f"request {offer.request_id!r} is offered as {truth}, not {offered}: (tokens, group, dcp, blocks)"
            )
        source = Side.of(peer.info, offer.blocks, offer.group)
        try:
            check_side(source, peer.slots, last)
        except ValueError as error:
            raise TransferError(f"the offer of request {offer.request_id!r} cannot be read: {error}") from None
        self._read(Job(fetch, peer, source, target, first, last, final, guard))
        if not guard.valid:
            state = self._ask(offer, "done" if final else "heartbeat")["state"]
            if state not in ("done", "fetching"):
                raise TransferError(f"the lease ended ({state}) before all was read")

    def _peer(self, offer: Offer) -> Peer:
        """The offer's engine, after a handshake if it is the first time."""
        with self._lock:
            meeting = self._meeting.setdefault(offer.engine_id, threading.Lock())
        with meeting:
            peer = self._peers.get(offer.engine_id)
            if peer is None:
                message = {"verb": "hello", "protocol": PROTOCOL, "info": msgspec.to_builtins(self.info)}
                reply = self._call(offer.engine_id, offer.host, offer.port, message)
                theirs = _peer_info({"protocol": PROTOCOL, **reply})
                if theirs.engine_id != offer.engine_id:
                    raise TransferError(
                        f"engine {offer.engine_id} is not at {offer.host}:{offer.port}, but {theirs.engine_id}"
                    )
                try:
                    check_compatible(self.info, theirs)
                except ConfigError as error:
                    raise TransferError(str(error)) from None
                slots = {str(name): int(slots) for name, slots in reply["slots"].items()}
                self._peers[offer.engine_id] = peer = Peer(theirs, slots, self._meet(theirs, reply["link"]))
            return peer

    def _extend(self, offer: Offer) -> float:
        try:
            reply = self._ask(offer, "heartbeat")
        except TransferError as error:
            raise Unheard(str(error)) from error
        if reply["state"] not in ("offered", "fetching"):
            raise TransferError(f"the lease ended ({reply['state']}) while it was read")
        return float(reply["seconds"])

    def _ask(self, offer: Offer, verb: str, **fields: Any) -> Message:
        message = {"verb": verb, "engine": offer.engine_id, "request": offer.request_id, **fields}
        return self._call(offer.engine_id, offer.host, offer.port, message)

    def _tell(self, offer: Offer, verb: str, **fields: Any) -> None:
        """Says something that the other side also finds out without: the lease runs out."""
        try:
            self._ask(offer, verb, **fields)
        except TransferError as error:
            log.info("engine %s was not told that %s is %s: %s", offer.engine_id, offer.request_id, verb, error)
            with self._lock:
                peer = self._peers.pop(offer.engine_id, None)
                self._meeting.pop(offer.engine_id, None)
            if peer is not None:
                self._part(peer)

    def _tell_aside(self, offer: Offer, verb: str, **fields: Any) -> None:
        work = functools.partial(self._tell, offer, verb, **fields)
        if self.settings.inline:
            work()
        else:
            threading.Thread(target=work, name=f"kv-{verb}", daemon=True).start()

    # Both.

    def stats(self) -> dict[str, int]:
        with self._lock:
            leases = {f"leases_{name}": self._book.counts[name] for name in ("offered", "done", "expired", "failed")}
            fetches = {name: self._counts[name] for name in ("fetches_done", "fetches_failed", "bytes_fetched")}
            return {**leases, **fetches, "leases_held": len(self._book), "fetches_running": len(self._running)}

    def check(self) -> None:
        with self._lock:
            self._book.check()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._book.end_all()
            running = dict(self._running)
        for fetch in running:
            fetch.cancel()
        for thread in running.values():
            if thread is not None:
                thread.join(2 * self.settings.call_timeout)
        self._close()
        self._peers.clear()
        if isinstance(self.rows, DeviceMemory):
            self.rows.free()


class RemoteConnector(PullConnector):
    """A connector whose peers are other processes."""

    def __init__(self, info: PeerInfo, rows: AnyMemory, clock: Clock, settings: Settings):
        super().__init__(info, rows, clock, settings)
        self._server = ChannelServer(settings.host, settings.port, self.answer, clock, settings.call_timeout)
        self.port = self._server.port

    def _call(self, engine_id: str, host: str, port: int, message: Message) -> Message:
        return call(host, port, message, self.clock, self.settings.call_timeout)

    def _close(self) -> None:
        self._server.close()


def _peer_info(message: Message) -> PeerInfo:
    """The engine that a message is from. TransferError if it speaks otherwise."""
    if message.get("protocol") != PROTOCOL:
        raise TransferError(f"protocol is {message.get('protocol')!r} there and {PROTOCOL} here")
    try:
        return msgspec.convert(message.get("info"), PeerInfo)
    except msgspec.ValidationError as error:
        raise TransferError(f"the peer does not say who it is: {error}") from None
