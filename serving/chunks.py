"""The next chunk of a request, and what it counts as computed once it is planned."""

from collections.abc import Collection

from glmjax.serving.plan import Chunk
from glmjax.serving.request import Request, banned_ids


def next_chunk(
    request: Request,
    size: int,
    blocks: tuple[int, ...],
    *,
    room: int,
    horizon: int,
    eos_ids: Collection[int],
    region: tuple[tuple[int, ...], int],
) -> Chunk:
    """Plan a request's next tokens, and count them as computed.

    Args:
      size: tokens at most.
      blocks: that they may be written to, or read before them.
      room: positions that the blocks hold; horizon: positions that can ever need KV.
      region: pages of its hot region, and the lease.
    """
    continues = request.continues
    start = request.num_tokens - 1 + request.in_flight if continues else request.num_computed
    end = request.num_tokens if continues else start + size
    samples = continues or end == request.num_tokens
    request.num_computed = end + request.in_flight if continues else end
    if samples:
        request.continues = True
        request.in_flight += 1
        request.most_in_flight += size if continues else 1
    banned = banned_ids(request, eos_ids) if samples else ()
    pages, lease = region
    return Chunk(
        request_id=request.request_id,
        token_ids=() if continues else tuple(request.token_ids[start:end]),
        start=start,
        blocks=blocks,
        samples=samples,
        sampling=request.sampling,
        most=size if continues else 0,
        limit=min(room, horizon) if samples else end,
        next_token=None if samples else request.token_ids[end],
        slot=request.slot,
        admission=request.admission,
        seed=request.seed,
        banned_ids=banned,
        ban_end=request.num_prompt_tokens + request.sampling.min_tokens if banned else 0,
        region=pages,
        lease=lease,
    )
