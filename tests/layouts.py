"""One small model under any layout: its programs and what they generate, to compare with one device.

The vocabulary is no larger than the top log-probabilities that a step returns, so that these are a whole distribution.
Pools start full of NaN: no row may be read before it is written.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glmjax.cache import CacheDtype, KVCache
from glmjax.config import GLMConfig
from glmjax.kernels import index_topk
from glmjax.params import Params, random_params
from glmjax.programs import Programs
from glmjax.sharding.cp import local_slots
from glmjax.sharding.layout import MESH_AXES, Layout
from glmjax.sharding.partition import param_specs
from glmjax.share import Combine, KVSource
from glmjax.step_io import StepInputs, StepOutputs, StepShape, num_logprobs

TOP_K, BLOCK, CHUNK, NEW_TOKENS = 12, 8, 24, 6
# Around the edges of 2, 4 and 8 ranks: the ranks, two parts each of a prompt, a block, a block each, top-k, a chunk.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 63, 64, 65)
REQUESTS = len(LENGTHS)
ALONE = [[request] for request in range(0, REQUESTS, 4)]  # also take a step without the others
CHUNKS, SINGLES = StepShape(REQUESTS, CHUNK), StepShape(REQUESTS, 1, decode=True)
# Every kind of layer and loop: dense, then twice a leader and two followers with experts.
CONFIG = GLMConfig.tiny(
    vocab_size=16,
    hidden_size=64,
    num_hidden_layers=7,
    num_attention_heads=8,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=TOP_K,
    indexer_types=("full", "full", "shared", "shared", "full", "shared", "shared"),
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
    mesh, specs = layout.mesh(), param_specs(layout, params)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)


def each_device(layout: Layout, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``compute`` on every device, all with the same arguments: results get a first axis of devices."""
    run = jax.shard_map(
        lambda *args: jax.tree.map(lambda x: x[None], compute(*args)),
        mesh=layout.mesh(),
        in_specs=P(),
        out_specs=P(MESH_AXES),
        check_vma=False,
    )
    return jax.jit(run)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and how it computes.

    Attributes:
      singles: single tokens have a program of their own, which PCP splits by row; else they run as short chunks.
    """

    layout: str
    cache_dtype: CacheDtype = "float32"
    prefill: KVSource = "query_gather"
    combine: Combine = "ag_rs"
    singles: bool = False

    def __str__(self) -> str:
        return f"{self.layout}-{self.prefill}-{self.combine}-{self.cache_dtype}"


def blocks_for(tokens: int, layout: Layout) -> int:
    """Blocks of a request, each of which holds ``BLOCK`` tokens on every DCP rank."""
    return -(-tokens // (BLOCK * layout.dcp))


@functools.cache
def programs(case: Case) -> Programs:
    layout = Layout.parse(case.layout)
    width = blocks_for(max(LENGTHS) + NEW_TOKENS, layout)
    with pytest.MonkeyPatch.context() as patch:
        # So that these short contexts are several chunks, and several runs of them, and nothing else is compiled.
        patch.setattr(index_topk, "CONTEXT_CHUNK", 2 * BLOCK)
        patch.setattr(index_topk, "PIECES", 2)
        patch.setattr(index_topk, "FIRST", ())
        patch.setattr(index_topk, "RUN", 2)
        return Programs(
            CONFIG,
            on_devices(layout, random_params(CONFIG)),
            num_blocks=REQUESTS * width,
            block_size=BLOCK,
            table_width=width,
            cache_dtype=case.cache_dtype,
            shapes=(CHUNKS, SINGLES) if case.singles else (CHUNKS,),
            layout=layout,
            prefill=case.prefill,
            combine=case.combine,
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


def nan_like(x: jax.Array) -> jax.Array:
    return jnp.full_like(x, 0x7F if x.dtype == jnp.uint8 else jnp.nan, device=x.sharding)  # fp8's NaN is 0x7F


@functools.cache
def generate(case: Case) -> Generated:
    """Prompts in chunks, odd requests a chunk later than even ones; then single tokens, of all, of one, of the rest."""
    program = programs(case)
    dp, cache, state = program.layout.dp, jax.tree.map(nan_like, program.make_cache()), program.make_state()
    by_request = np.argsort(row_orders(dp), axis=1)[:, :, None]
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    tokens: list[list[np.ndarray]] = [[] for _ in texts]
    logprobs: list[list[np.ndarray]] = [[] for _ in texts]

    def step(length: int, pieces: Pieces) -> None:
        nonlocal cache, state
        shape = program.smallest(REQUESTS, length, decode=length == 1 and SINGLES in program.shapes)
        cache, state, packed = program.run(shape, cache, state, step_inputs(program, shape, pieces))
        rows = np.take_along_axis(np.asarray(packed).reshape(dp, REQUESTS, -1), by_request, axis=1)
        for request, (start, piece) in pieces.items():
            if start + len(piece) == len(texts[request]):
                out = StepOutputs.unpack(rows[:, request], num_logprobs(CONFIG))
                tokens[request].append(out.token[:, 0])
                by_id = np.take_along_axis(out.top_logprobs[:, 0], np.argsort(out.top_ids[:, 0]), axis=1)
                logprobs[request].append(by_id)
                texts[request].append(int(out.token[0, 0]))

    for turn in range(1 + -(-max(LENGTHS) // CHUNK)):
        starts = {r: CHUNK * (turn - r % 2) for r in range(REQUESTS)}
        step(
            CHUNK, {r: (s, texts[r][s : min(s + CHUNK, LENGTHS[r])]) for r, s in starts.items() if 0 <= s < LENGTHS[r]}
        )
    for _ in range(NEW_TOKENS - 2):
        step(1, {request: (len(text) - 1, text[-1:]) for request, text in enumerate(texts)})
    for some in (*ALONE, [request for request in range(REQUESTS) if [request] not in ALONE]):
        step(1, {request: (len(texts[request]) - 1, texts[request][-1:]) for request in some})
    return Generated(np.array(tokens).transpose(2, 0, 1), np.array(logprobs).transpose(2, 0, 1, 3), cache)


def cached_rows(case: Case, data_rank: int, request: int) -> dict[str, np.ndarray]:
    """What the pools of a data-parallel rank hold of a request after ``generate``: field -> [stack, tokens, ...].

    All tokens but the last were computed.
    """
    program, cache = programs(case), generate(case).cache
    layout = program.layout
    row = int(np.argsort(row_orders(layout.dp)[data_rank])[request])
    table, positions = row_tables(program)[row : row + 1], np.arange(LENGTHS[request] + NEW_TOKENS - 1)[None]
    ranks = np.arange(layout.dcp)
    slots = np.stack([local_slots(table, positions, BLOCK, layout.dcp, r, layout.interleave)[0] for r in ranks])
    owner = slots.argmax(axis=0)
    slots = slots.max(axis=0)
    found = {}
    for field in dataclasses.fields(cache):
        if (pools := getattr(cache, field.name)) is not None:
            pools = np.asarray(pools).reshape(pools.shape[0], layout.dp, layout.dcp, -1, *pools.shape[2:])
            found[field.name] = pools[:, data_rank, owner, slots]
    return found


def assert_equals_one_device(case: Case) -> None:
    """Every rank chooses the tokens of one device, with log-probabilities within 1e-4."""
    expected, found = generate(Case("dp=1", singles=True)), generate(case)
    assert (found.tokens == expected.tokens).all()
    assert np.abs(found.logprobs - expected.logprobs).max() < 1e-4
