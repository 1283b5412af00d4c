"""Drafting under every kind of layout gives what one device drafts, after a prompt and after some drafts were refused.

The trunk's hidden states are made up here: a row for a token at a position, NaN for padding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import NamedSharding
from layouts import BLOCK

from glmjax.batch import TokenBatch
from glmjax.cache import abstract_cache
from glmjax.mtp import draft
from glmjax.params import random_params
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec, param_specs
from glmjax.share import share_of

pytestmark = pytest.mark.slow  # each case compiles one program or two

CONFIG = dataclasses.replace(layouts.CONFIG, num_hidden_layers=1, indexer_types=("full",), num_nextn_predict_layers=1)
DRAFTS, PROMPT = 3, 24
# Of each request: tokens of the prompt; then the next one and as many drafts as the target took, what is left refused.
LENGTHS = np.array([(24, 1, 16, 0, 13, 7), (1, 4, 2, 0, 3, 0)])
REQUESTS = LENGTHS.shape[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, how it computes prompts, and how wide its second step is: PCP splits few tokens by row."""

    degrees: str
    prefill: str = "query_gather"
    width: int = PROMPT

    def __str__(self):
        return f"{self.degrees}-{self.prefill}"


ONE_DEVICE = Case("dp=1", width=DRAFTS + 1)
CASES = [
    Case("tp=8,ep=8"),
    Case("dp=8,ep=8"),
    Case("pcp=8,ep=8", width=DRAFTS + 1),
    Case("pcp=4,tp=2,dcp=4", width=DRAFTS + 1),
    Case("pcp=8,dcp=8,ep=8", "kv_gather"),
]


@functools.cache
def params():
    return random_params(CONFIG)


@functools.cache
def drafting(case):
    """A pass on all devices: (params, cache, tokens, start, length, tables) -> the cache, drafts and their logits."""
    layout = Layout.parse(case.degrees)
    noise = np.random.default_rng(2).standard_normal((97, CONFIG.hidden_size)).astype(np.float32)

    def run(params, cache, tokens, start, length, tables):
        batch = TokenBatch(tokens, start, length, tables, BLOCK)
        share = share_of(batch, layout, prefill=case.prefill)
        rows = jnp.asarray(noise)[(share.tokens + 7 * share.positions) % len(noise)]
        hidden = jnp.where(share.valid[..., None], rows, jnp.nan).reshape(-1, CONFIG.hidden_size)
        return draft(params, CONFIG, cache, hidden, batch, DRAFTS, layout, prefill=case.prefill)

    kv, rows = cache_spec(layout), batch_spec(layout)
    over_mesh = jax.shard_map(
        run,
        mesh=layout.mesh(),
        in_specs=(param_specs(layout, params()), kv, rows, rows, rows, rows),
        out_specs=(kv, rows, rows),
        check_vma=False,
    )
    return jax.jit(over_mesh, donate_argnums=1)


def empty_cache(layout, num_blocks):
    """Pools of NaN."""
    sharding = NamedSharding(layout.mesh(), cache_spec(layout))

    def pool(x):
        shape = (x.shape[0], x.shape[1] * layout.dp * layout.dcp, *x.shape[2:])
        return jnp.full(shape, jnp.nan, x.dtype, device=sharding)

    return jax.tree.map(pool, abstract_cache(CONFIG, num_blocks, BLOCK, "float32", mtp=True))


@functools.cache
def drafted(case):
    """Drafts [2, dp, R, n] and their logits [2, dp, R, n, V] of both steps; each rank has an order of its own."""
    layout = Layout.parse(case.degrees)
    width = layouts.blocks_for(PROMPT + 2 * DRAFTS + 1, layout)
    rng = np.random.default_rng(3)
    tables = np.random.default_rng(4).permutation(REQUESTS * width).reshape(REQUESTS, width)
    orders = np.stack([np.roll(np.arange(REQUESTS), rank) for rank in range(layout.dp)])
    cache, start, results = empty_cache(layout, REQUESTS * width), 0 * LENGTHS[0], []
    for length, columns in zip(LENGTHS, (PROMPT, case.width), strict=True):
        tokens = rng.integers(0, CONFIG.vocab_size, (REQUESTS, PROMPT))[:, :columns]  # padding is no token 0
        rows = [np.concatenate([x[order] for order in orders]).astype(np.int32) for x in (tokens, start, length)]
        every_table = np.tile(tables, (layout.dp, 1)).astype(np.int32)
        cache, drafts, scores = drafting(case)(params(), cache, *rows, every_table)
        back = np.argsort(orders, axis=1)
        drafts, scores = (np.asarray(x).reshape(layout.dp, REQUESTS, *x.shape[1:]) for x in (drafts, scores))
        results.append([np.stack([x[i] for x, i in zip(y, back, strict=True)]) for y in (drafts, scores)])
        start = start + length
    return tuple(np.stack(x) for x in zip(*results, strict=True))


def test_one_device_is_far_from_a_tie():
    best = np.sort(drafted(ONE_DEVICE)[1][:, 0][LENGTHS > 0], axis=-1)
    assert (best[..., -1] - best[..., -2]).min() > 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_and_logits_equal_one_device(case):
    (expected, expected_scores), (found, scores) = drafted(ONE_DEVICE), drafted(case)
    for step in range(2):
        real = LENGTHS[step] > 0
        assert (found[step][:, real] == expected[step][:, real]).all()
        assert np.abs(scores[step][:, real] - expected_scores[step][:, real]).max() < 1e-4
