"""Owner of the KV cache's blocks on the host: who holds which, what is cached, what goes next.

A block is a run of ``block_size`` token positions of the device pool, known here by its number only.
Each block is in exactly one state:

    free      no holder, content worthless        first to be handed out
    cached    no holder, content has a digest     handed out in LRU order, a chain's tail before its head
    leased    one or more holders                 may have a digest too, and so be shared by later requests

The scheduler is the only caller.  Law, restated by ``check``: free + cached + leased = all, every
count of holders equals the holders there are, digest and block name each other one to one.
A digest is given to a block only once all its KV is computed, and a shared block is never written.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def root_digest(salt: str | None = None) -> bytes:
    """Start of a chain.  Requests with different salts share nothing."""
    return hashlib.sha256(b"glmjax kv chain\0" + (salt or "").encode()).digest()


def next_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full block: its tokens and, through ``parent``, everything before them."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def extend_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int, salt: str | None = None) -> None:
    """Append to ``digests`` those of the full blocks of ``token_ids`` that it does not cover yet."""
    for index in range(len(digests), len(token_ids) // block_size):
        parent = digests[-1] if digests else root_digest(salt)
        block = token_ids[index * block_size : (index + 1) * block_size]
        digests.append(next_digest(parent, block))


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Name of a whole prompt, in hexadecimal."""
    return next_digest(root_digest(), token_ids).hex()


class BlockPool:
    """Leases blocks, counts their holders and finds cached ones by digest."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._holders = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks without a holder, cached ones included: as many as ``allocate`` can give."""
        return len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Blocks that a new request could share, held or not."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain.  Takes no lease: ``share`` does."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` have no holder, so that sharing them takes them from the free ones."""
        return sum(self._holders[b] == 0 for b in blocks)

    def allocate(self, n: int) -> list[int]:
        """Lease ``n`` blocks; cached content in them is forgotten, least recently used first."""
        if n > len(self._idle):
            raise RuntimeError(f"asked for {n} blocks with {len(self._idle)} free")
        blocks = [self._idle.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self._forget(block)
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of ``blocks``."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def publish(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Make computed full blocks findable.  Content that is cached already stays where it is."""
        if not self.enable_prefix_caching:
            return
        for block, digest in zip(blocks, digests, strict=True):
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """End one holder's lease of a request's blocks, given in order of position."""
        for block in reversed(blocks):
            if self._holders[block] < 1:
                raise RuntimeError(f"block {block} released without a holder")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._idle[block] = None
                if block not in self._digest_of:
                    self._idle.move_to_end(block, last=False)

    def reset(self) -> None:
        """Forget every cached content.  Leases stay."""
        self._digest_of.clear()
        self._block_of.clear()

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raise unless the law holds; with ``holders``, unless leases are exactly theirs."""
        leased = {b for b, n in enumerate(self._holders) if n > 0}
        _require(min(self._holders, default=0) >= 0, "a negative number of holders")
        _require(leased.isdisjoint(self._idle), "a block is both free and leased")
        _require(len(leased) + len(self._idle) == self.num_blocks, "a block is lost")
        pairs = {(b, d) for d, b in self._block_of.items()}
        _require(pairs == set(self._digest_of.items()), "digests and blocks disagree")
        if holders is not None:
            counts = Counter(b for blocks in holders for b in blocks)
            wrong = [b for b, n in enumerate(self._holders) if n != counts[b]]
            _require(not wrong, f"holders miscounted for blocks {wrong}")

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]


def _require(ok: bool, fault: str) -> None:
    if not ok:
        raise AssertionError(f"block pool: {fault}")
