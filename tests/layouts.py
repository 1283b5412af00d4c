"""One small model under any layout: its programs and what they generate, to compare with one device.

The vocabulary is no larger than the top log-probabilities that a step returns, so that these are a whole distribution.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from glmjax.cache import CacheDtype, KVCache
from glmjax.config import GLMConfig
from glmjax.params import Params, random_params
from glmjax.programs import Programs, StepInputs, StepOutputs, StepShape
from glmjax.share import Combine, KVSource
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import param_specs

TOP_K, BLOCK, CHUNK, NEW_TOKENS = 12, 8, 24, 6
# Around the edges of 2, 4 or 8 ranks W: W and the 2 W parts of a split prompt, a block, W blocks, top-k, a chunk.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 63, 64, 65)
REQUESTS = len(LENGTHS)
PREFILL, DECODE = StepShape(REQUESTS, CHUNK), StepShape(REQUESTS, 1)
# Every kind of layer: dense, then twice a leader and a follower with experts, which run in a scan.
CONFIG = GLMConfig.tiny(
    vocab_size=16,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=8,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=TOP_K,
    indexer_types=("full", "full", "shared", "full", "shared"),
    n_routed_experts=16,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    intermediate_size=64,
    num_nextn_predict_layers=0,
)

Pieces = Mapping[int, tuple[int, Sequence[int]]]  # request -> (position of the first token, tokens)


def on_devices(layout: Layout, params: Params) -> Params:
    """The parameters where a layout wants them."""
    if layout.num_devices == 1:
        return params
    mesh = layout.mesh()
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, param_specs(layout, params))


def blocks_for(tokens: int, layout: Layout) -> int:
    """Blocks of a request, each of which holds ``BLOCK`` tokens on every DCP rank."""
    return -(-tokens // (BLOCK * layout.dcp))


@functools.cache
def programs(
    text: str,
    cache_dtype: CacheDtype = "float32",
    prefill: KVSource = "query_gather",
    combine: Combine = "ag_rs",
) -> Programs:
    """Programs of a layout, one for chunks and, where that is another path through the model, one for single tokens."""
    layout = Layout.parse(text)
    width = blocks_for(max(LENGTHS) + NEW_TOKENS, layout)
    by_row = cache_dtype == "float32" and prefill == "query_gather" and (layout.pcp > 1 or layout.num_devices == 1)
    return Programs(
        CONFIG,
        on_devices(layout, random_params(CONFIG)),
        num_blocks=REQUESTS * width,
        block_size=BLOCK,
        table_width=width,
        cache_dtype=cache_dtype,
        shapes=(PREFILL, DECODE) if by_row else (PREFILL,),
        layout=layout,
        prefill=prefill,
        combine=combine,
    )


@dataclasses.dataclass(frozen=True)
class Generated:
    """What every data-parallel rank gave the requests, in the order of ``LENGTHS``.

    Attributes:
      tokens: [dp, R, n] greedy choices.
      logprobs: [dp, R, n, V] by token id.
      cache: the pools after the last step.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    cache: KVCache


def row_orders(dp: int) -> np.ndarray:
    """[dp, R]: the request in each row.  All ranks have the same requests, every rank in an order of its own."""
    return np.stack([np.roll(np.arange(REQUESTS), rank) for rank in range(dp)])


def row_tables(program: Programs) -> np.ndarray:
    """[R, B] int32: blocks for each row, from all over the pool."""
    order = np.random.default_rng(1).permutation(program.num_blocks)
    return order.reshape(REQUESTS, program.table_width).astype(np.int32)


def step_inputs(program: Programs, shape: StepShape, pieces: Pieces) -> list[StepInputs]:
    """Each rank's inputs; a row's table has as many blocks as its request needs and then names block 0."""
    inputs = []
    for order in row_orders(program.layout.dp):
        rank = StepInputs.empty(shape, program.table_width)
        rank.wants_logprobs[:] = 1
        for row, request in enumerate(order):
            start, tokens = pieces.get(request, (0, ()))
            rank.start[row], rank.length[row] = start, len(tokens)
            rank.tokens[row, : len(tokens)] = tokens
            used = blocks_for(LENGTHS[request] + NEW_TOKENS, program.layout)
            rank.block_tables[row, :used] = row_tables(program)[row, :used]
        inputs.append(rank)
    return inputs


def rubbish_cache(program: Programs) -> KVCache:
    """Pools in which no row may be read before it is written: of NaN, which as bytes of fp8 is 0x7F."""
    return jax.tree.map(
        lambda x: jnp.full_like(x, 0x7F if x.dtype == jnp.uint8 else jnp.nan, device=x.sharding), program.make_cache()
    )


@functools.cache
def generate(*how: str) -> Generated:
    """Prompts in chunks, odd requests a chunk later than even ones; then single tokens, of all requests and of each alone.

    Args:
      how: arguments of ``programs``.
    """
    program = programs(*how)
    dp, cache = program.layout.dp, rubbish_cache(program)
    to_requests = np.argsort(row_orders(dp), axis=1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    tokens: list[list[np.ndarray]] = [[] for _ in texts]
    logprobs: list[list[np.ndarray]] = [[] for _ in texts]

    def step(length: int, pieces: Pieces) -> None:
        nonlocal cache
        shape = program.smallest(REQUESTS, length)
        cache, packed = program.run(shape, cache, step_inputs(program, shape, pieces))
        by_row = np.asarray(packed).reshape(dp, REQUESTS, -1)
        by_request = np.take_along_axis(by_row, to_requests[:, :, None], axis=1)
        for request, (start, piece) in pieces.items():
            if start + len(piece) == len(texts[request]):
                out = StepOutputs.unpack(by_request[:, request])
                tokens[request].append(out.token)
                logprobs[request].append(np.take_along_axis(out.top_logprobs, np.argsort(out.top_ids), axis=1))
                texts[request].append(int(out.token[0]))

    for turn in range(1 + -(-max(LENGTHS) // CHUNK)):
        starts = {r: CHUNK * (turn - r % 2) for r in range(REQUESTS)}
        pieces = {r: (s, texts[r][s : min(s + CHUNK, LENGTHS[r])]) for r, s in starts.items() if 0 <= s < LENGTHS[r]}
        step(CHUNK, pieces)
    for _ in range(NEW_TOKENS - 2):
        step(1, {request: (len(text) - 1, text[-1:]) for request, text in enumerate(texts)})
    for request, text in enumerate(texts):
        step(1, {request: (len(text) - 1, text[-1:])})
    return Generated(np.array(tokens).transpose(2, 0, 1), np.array(logprobs).transpose(2, 0, 1, 3), cache)


def assert_equals_one_device(*how: str) -> None:
    """Same tokens on every rank, log-probabilities within 1e-4."""
    expected, found = generate("dp=1"), generate(*how)
    assert (found.tokens == expected.tokens).all()
    assert np.abs(found.logprobs - expected.logprobs).max() < 1e-4
