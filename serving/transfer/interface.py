"""What engines see of KV transfer: who they are, what is offered, how it is fetched, and the verbs of a connector.

The producer (prefill) offers blocks under a lease and reads nothing into them until the lease has ended; the consumer
(decode) pulls the rows that it lacks. Every failure of the other side is a ``TransferError``.
"""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError, GlmjaxError
from glmjax.sharding.relayout import KVSharding

PROTOCOL = 2  # of the messages between connectors; raised with any change of them

MLA, INDEX = "mla", "index"  # the two kinds of rows

FetchState = Literal["running", "done", "failed"]
LeaseState = Literal["offered", "fetching", "done", "expired", "failed"]
Tables = Sequence[int] | Mapping[str, Sequence[int]]  # block ids of a request, for all rows or by kind

# Neither the rows' content nor their shape depends on these.
_NOT_IN_ROWS = frozenset({"eos_token_ids", "pad_token_id", "bos_token_id", "max_position_embeddings"})


class TransferError(GlmjaxError):
    """KV could not be moved: the peer is gone, refused, or no longer holds it, or time ran out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """An engine, as far as another one must know it to exchange KV rows.

    Attributes:
      engine_id: unique to a run of an engine: a restarted one has another.
      connector: kind of its connector.
      protocol: of the messages.
      model: ``fingerprint`` of what it serves.
      kv_cache_dtype: format of the rows.
      speculation: whether the MTP layer's rows are among them.
      layers, indexers: rows of either kind that a token has, the MTP layer's included.
      mla_row_bytes, index_row_bytes: bytes of one of them.
      block_size: tokens of a block on one rank.
      dcp: ranks that the tokens of a request are dealt out to.
      interleave: tokens in a row that go to one rank.
      dp: data-parallel ranks, each with ``dcp`` ranks and block ids of its own.
    """

    engine_id: str
    connector: str
    glmjax_version: str
    protocol: int = PROTOCOL
    model: str
    kv_cache_dtype: str
    speculation: bool
    layers: int
    indexers: int
    mla_row_bytes: int
    index_row_bytes: int
    block_size: int
    dcp: int = 1
    interleave: int = 1
    dp: int = 1

    @property
    def sharding(self) -> KVSharding:
        """How a request's tokens lie. ConfigError if the three values do not go together."""
        return KVSharding(self.dcp, self.interleave, self.block_size)

    @property
    def entry_tokens(self) -> int:
        """Tokens that an entry of a block table stands for."""
        return self.block_size * self.dcp

    @property
    def token_bytes(self) -> int:
        """Bytes of all rows of a token."""
        return self.layers * self.mla_row_bytes + self.indexers * self.index_row_bytes


# Block size, DCP degree, interleave and data parallelism may differ: that is what re-layout is for. Versions come
# first, so that engines of different ones are told so and not what follows from it.
MUST_MATCH = (
    "protocol",
    "glmjax_version",
    "connector",
    "model",
    "kv_cache_dtype",
    "speculation",
    "layers",
    "indexers",
    "mla_row_bytes",
    "index_row_bytes",
)


def check_compatible(mine: PeerInfo, theirs: PeerInfo) -> None:
    """Refuses a peer whose rows would mean something else here.

    Raises:
      ConfigError: names the first field that differs, and both values.
    """
    for field in MUST_MATCH:
        own, other = getattr(mine, field), getattr(theirs, field)
        if own != other:
            raise ConfigError(
                f"engine {theirs.engine_id} cannot exchange KV with {mine.engine_id}: {field} is {other!r} "
                f"at {theirs.engine_id} and {own!r} at {mine.engine_id}"
            )
    _ = theirs.sharding


def fingerprint(config: GLMConfig, checkpoint: str = "") -> str:
    """A name for what makes KV rows mean the same: the model's shape and constants, and the weights by name.

    Args:
      checkpoint: tells apart weights of one shape.
    """
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_IN_ROWS}
    text = json.dumps([values, checkpoint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """KV of a request that another engine may fetch.

    Attributes:
      engine_id, host, port: the producer, and where it answers.
      request_id: the producer's name for the request, never used twice by it.
      blocks: its block table; an entry is the same block on each of the ``dcp`` ranks.
      num_tokens: tokens, from the first on, whose KV is there.
      group: the data-parallel rank that has them.
      lease_seconds: for how long, from the offer on, unless extended. A duration: clocks of two engines do not compare.
      prompt: ``prompt_digest`` of the tokens that the KV is of: as the producer has it, and in the consumer's hands as
        the consumer wants it.
    """

    engine_id: str
    request_id: str
    blocks: tuple[int, ...]
    num_tokens: int
    group: int = 0
    dcp: int = 1
    host: str = ""
    port: int = 0
    lease_seconds: float = 30.0
    prompt: str = ""


@dataclasses.dataclass(frozen=True)
class Lease:
    """Blocks that a producer keeps for a consumer, as they stood when asked for.

    Attributes:
      deadline: on the producer's monotonic clock, in seconds.
      prompt: see ``Offer``.
      first: tokens before this one are not there to be read.
    """

    request_id: str
    blocks: tuple[int, ...]
    num_tokens: int
    group: int
    state: LeaseState
    deadline: float
    prompt: str = ""
    first: int = 0


class Fetch:
    """A fetch under way. While it is ``running`` its target blocks may be written to: they are not to be given away.

    Attributes:
      num_tokens: tokens that it moves.
      bytes_moved: so far.
      error: why it failed.
    """

    def __init__(self, offer: Offer, num_tokens: int):
        self.offer = offer
        self.num_tokens = num_tokens
        self.bytes_moved = 0
        self.error: TransferError | None = None
        self.cancelled = False
        self._over = threading.Event()

    def poll(self) -> FetchState:
        """Where it stands; never waits."""
        if not self._over.is_set():
            return "running"
        return "done" if self.error is None else "failed"

    def wait(self, seconds: float) -> FetchState:
        """``poll`` at its end, or after so long."""
        self._over.wait(seconds)
        return self.poll()

    def cancel(self) -> None:
        """Asks it to end; it has when ``poll`` says so."""
        self.cancelled = True

    def end(self, error: TransferError | None = None) -> None:
        """For connectors: nothing is written any more."""
        self.error = error
        self._over.set()


class Connector(Protocol):
    """Both roles of an engine in moving KV. Calls return at once; ``fetch`` alone raises, and only for its arguments.

    Any thread may call, but ``collect`` and what follows from it belong to the one that owns the blocks.
    """

    info: PeerInfo

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
        """Leases computed blocks to whoever fetches them. They stay as they are until ``collect`` returns the lease.

        Tokens before ``first`` are not among them: their entries of ``blocks`` may be any.
        """
        ...

    def withdraw(self, request_id: str) -> bool:
        """Ends a lease that nobody has begun to read; False if it is being read or has ended: ``collect`` tells."""
        ...

    def collect(self) -> tuple[Lease, ...]:
        """Leases that ended since the last call (done, failed, or expired by now), each once: free their blocks.

        To be called at every step, and now and then while there are leases and no steps.
        """
        ...

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
        """Starts to bring tokens ``first .. last - 1`` into one's own blocks.

        Args:
          blocks: block table of the request here, from its first token on, or one by kind of rows.
          first: tokens that are here already; all of them moves nothing, and ends the lease if ``final``.
          last: all that is offered, if None.
          group: data-parallel rank of the blocks.
          final: the lease ends with this fetch.

        Raises:
          ValueError: the range is not within offer or blocks, or a block is not in memory.
        """
        ...

    def done(self, offer: Offer) -> None:
        """Tells the producer that nothing more is fetched."""
        ...

    def failed(self, offer: Offer, reason: str) -> None:
        """Tells the producer that the request is given up."""
        ...

    def heartbeat(self, offer: Offer) -> None:
        """Extends a lease while its request waits to be fetched; a running fetch does so itself."""
        ...

    # Both.

    def stats(self) -> dict[str, int]: ...

    def check(self) -> None:
        """AssertionError unless every lease is accounted for."""
        ...

    def close(self) -> None:
        """Ends fetches and leases: ``collect`` returns the latter one last time."""
        ...
