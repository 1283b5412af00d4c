"""Engines, memories and rows for tests of KV transfer, and where each row must lie, by a rule of its own."""

import dataclasses

import numpy as np

from glmjax.serving.transfer.interface import INDEX, MLA, PeerInfo
from glmjax.serving.transfer.memory import empty_memory

KINDS = (MLA, INDEX)


def peer(engine_id, *, connector="local", **other):
    """A small engine; its rows are 20 and 12 bytes."""
    values = {
        "glmjax_version": "0.1.0",
        "model": "tiny",
        "kv_cache_dtype": "fp8_ds_mla",
        "speculation": True,
        "layers": 3,
        "indexers": 2,
        "mla_row_bytes": 20,
        "index_row_bytes": 12,
        "block_size": 4,
    }
    return PeerInfo(engine_id=engine_id, connector=connector, **(values | other))


def noise(info, blocks, seed):
    """A memory of so many blocks, full of random bytes."""
    rng = np.random.default_rng(seed)
    rows = empty_memory(info, blocks * info.block_size)
    for region in rows.values():
        for rank in region.ranks:
            rank[:] = rng.integers(0, 256, rank.shape, np.uint8)
    return rows


def place(info, table, token):
    """DCP rank and slot of a token: tokens are dealt out in turns of ``interleave``, and lie in order on their rank."""
    if info.dcp == 1:
        rank, local = 0, token
    else:
        turn, within = divmod(token, info.interleave)
        rank, local = turn % info.dcp, turn // info.dcp * info.interleave + within
    return rank, table[local // info.block_size] * info.block_size + local % info.block_size


def content(info, tokens, seed):
    """Rows of a request by kind: [layers, tokens, row bytes]."""
    rng = np.random.default_rng(seed)
    sizes = {MLA: (info.layers, info.mla_row_bytes), INDEX: (info.indexers, info.index_row_bytes)}
    return {kind: rng.integers(0, 256, (n, tokens, width), np.uint8) for kind, (n, width) in sizes.items()}


def write(info, rows, table, values, tokens, group=0):
    """Puts a request's rows where they belong."""
    for kind in KINDS:
        blocks = table[kind] if isinstance(table, dict) else table
        for token in tokens:
            rank, slot = place(info, blocks, token)
            rows[kind].ranks[group * info.dcp + rank][:, slot] = values[kind][:, token]


def clone(rows):
    return {k: dataclasses.replace(r, ranks=tuple(x.copy() for x in r.ranks)) for k, r in rows.items()}


def same(a, b):
    return all(np.array_equal(x, y) for k in KINDS for x, y in zip(a[k].ranks, b[k].ranks, strict=True))


def table_for(info, tokens, blocks, seed, spare=0):
    """A random block table out of so many blocks for so many tokens."""
    entries = -(-tokens // info.entry_tokens) + spare
    return np.random.default_rng(seed).permutation(blocks)[:entries].tolist()
