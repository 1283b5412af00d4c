"""A runner without a model: outputs can be worked out by hand, and the KV it keeps tells on mistakes.

Every computed position leaves a record in the slot that the chunk names.  Before a chunk is computed,
the records of all earlier positions are read back through the block table and must be the request's
own prefix, so a wrong table, an unsafe share, a reused block or a missed recompute raises at once.
The next token depends on the prefix *as read from the records*, as attention would.

As a device does, it remembers by slot which token a request is to go on with.  Drafts are accepted as it
pleases; the records of rejected ones are spoiled.
"""

import dataclasses
from collections.abc import Callable, Sequence

from glmjax.serving.plan import Chunk, Plan, Results, Sampled, TokenLogprobs

NextToken = Callable[[Sequence[int], int], int]
Record = tuple[int, int, int]  # position, token, hash of the prefix up to and with it


def default_next_token(prefix: Sequence[int], vocab_size: int) -> int:
    """3 x last + first + length, modulo the vocabulary."""
    return (3 * prefix[-1] + prefix[0] + len(prefix)) % vocab_size


class FakeRunner:
    """Carries out plans on records.

    Attributes:
      steps: plans carried out.
      fail_at: step (from 0) in which to raise; None: never.
      rank_slots: by rank and slot, all tokens of the request there, the last of which is not computed.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 997,
        *,
        num_drafts: int = 0,
        next_token: NextToken = default_next_token,
        fail_at: int | None = None,
    ):
        self.steps = 0
        self.fail_at = fail_at
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._num_drafts = num_drafts
        self._next_token = next_token
        self._records: dict[int, Record] = {}
        self._known: dict[str, list[int]] = {}
        self.rank_slots: dict[tuple[int, int], list[int]] = {}

    def start(self, plan: Plan) -> dict[str, Sampled]:
        """Does all the work; ``finish`` hands it over."""
        if self.steps == self.fail_at:
            raise RuntimeError("the fake runner was told to fail")
        self.steps += 1
        if len({c.request_id for c in plan.chunks}) != len(plan.chunks):
            raise AssertionError("a request has two chunks in one plan")
        chunks = tuple(self._resolved(c) for c in plan.chunks)
        self._check_writes(chunks)
        prefixes = {c.request_id: self._read(c) for c in chunks}
        for chunk in chunks:
            self._compute(chunk, prefixes[chunk.request_id])
        return {c.request_id: self._sample(c, prefixes[c.request_id]) for c in chunks if c.samples}

    def finish(self, started: dict[str, Sampled]) -> Results:
        return Results(started)

    def _resolved(self, chunk: Chunk) -> Chunk:
        """The chunk with the token that the state has for it."""
        if chunk.token_ids:
            return chunk
        known = self.rank_slots[chunk.rank, chunk.slot]
        if not chunk.start < len(known):
            raise AssertionError(f"{chunk.request_id} goes on at {len(known) - 1}, before {chunk.start}")
        # What is past its limit is computed for nobody: it ended in a step that the host had not seen.
        tokens = tuple(known[-1:]) if len(known) <= chunk.limit else ()
        return dataclasses.replace(chunk, token_ids=tokens, start=len(known) - 1)

    def stats(self) -> dict[str, int]:
        return {"compilations": 0}

    def close(self) -> None:
        self._records.clear()

    def _slot(self, chunk: Chunk, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return (chunk.rank << 40) + chunk.blocks[block] * self._block_size + offset

    def _check_writes(self, chunks: Sequence[Chunk]) -> None:
        """No slot is written twice, or written by one request and read by another."""
        written = [self._slot(c, p) for c in chunks for p in range(c.start, c.end)]
        read = {self._slot(c, p) for c in chunks for p in range(c.start)}
        if len(set(written)) != len(written) or not read.isdisjoint(written):
            raise AssertionError("two requests collide in one slot")

    def _read(self, chunk: Chunk) -> list[int]:
        """The request's prefix from its records; a prefix not seen before came from the cache."""
        prefix: list[int] = []
        digest = 0
        for position in range(chunk.start):
            where, token, found = self._records.get(self._slot(chunk, position), (-1, -1, 0))
            digest = hash((digest, token))
            if where != position or found != digest:
                raise AssertionError(f"{chunk.request_id}: foreign KV at position {position}")
            prefix.append(token)
        known = self._known.get(chunk.request_id, [])
        whole = prefix + list(chunk.token_ids)
        shared = min(len(known), len(whole))
        if known[:shared] != whole[:shared]:
            raise AssertionError(f"{chunk.request_id}: the KV or the tokens are another request's")
        self._known[chunk.request_id] = whole + known[shared:]
        return prefix

    def _compute(self, chunk: Chunk, prefix: list[int]) -> None:
        """Write the chunk's records and append its tokens to ``prefix``."""
        for token in chunk.token_ids:
            self._write(chunk, prefix, token)

    def _write(self, chunk: Chunk, prefix: list[int], token: int) -> None:
        slot = self._slot(chunk, len(prefix))
        digest = 0
        if prefix:
            digest = self._records[self._slot(chunk, len(prefix) - 1)][2]
        self._records[slot] = (len(prefix), token, hash((digest, token)))
        prefix.append(token)

    def _sample(self, chunk: Chunk, prefix: list[int]) -> Sampled:
        """One token, and up to ``num_drafts`` more by position, as far as there are slots."""
        if not chunk.token_ids:
            return Sampled((0,))  # nobody waits for it
        drafts = max(0, min(chunk.most - 1, self._num_drafts, chunk.limit - chunk.end)) if chunk.most else 0
        tokens = [self._choose(chunk, prefix)]
        for _ in range(min(len(prefix) % (self._num_drafts + 1), drafts)):
            self._write(chunk, prefix, tokens[-1])
            tokens.append(self._choose(chunk, prefix))
        self.rank_slots[chunk.rank, chunk.slot] = [*prefix, tokens[-1]]
        # The rejected drafts' KV, and that of the MTP layer's drafts for the next step.
        for position in range(len(prefix), min(chunk.end + drafts + max(0, self._num_drafts - 1), chunk.limit)):
            self._records[self._slot(chunk, position)] = (-1, -1, 0)
        logprobs = tuple(self._logprob(chunk, t) for t in tokens)
        return Sampled(tuple(tokens), logprobs if chunk.sampling.logprobs is not None else (), drafts)

    def _choose(self, chunk: Chunk, prefix: list[int]) -> int:
        token = self._next_token(prefix, self._vocab_size)
        if not chunk.sampling.greedy:
            token = (token + chunk.seed) % self._vocab_size
        while token in chunk.banned_ids and len(prefix) < chunk.ban_end:
            token = (token + 1) % self._vocab_size
        return token

    def _logprob(self, chunk: Chunk, token: int) -> TokenLogprobs:
        count = chunk.sampling.logprobs or 0
        top = tuple(((token + i) % self._vocab_size, -0.5 - i) for i in range(count))
        return TokenLogprobs(-0.5, 1, top)
