"""A model whose MTP layer often guesses right, and engines that draft with it.

The trunk hardly changes the embedding of its last token, so the next token follows from that one in most contexts; the
MTP layer is given the same map: it passes on the embedding of the token it is told. Random layers would never agree.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from glmjax.config import GLMConfig
from glmjax.params import Params, random_params
from glmjax.programs import Programs
from glmjax.serving.clock import Clock
from glmjax.serving.data_parallel import DataParallelScheduler
from glmjax.serving.engine import Engine
from glmjax.serving.runner import ProgramRunner
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import param_specs
from glmjax.speculation import Speculation
from glmjax.step_io import StepShape

BLOCK, ROWS, BUDGET, MAX_LEN = 4, 16, 96, 96
CHUNK = 32
CONFIG = GLMConfig.tiny(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=8,
    indexer_types=("full", "full", "shared"),
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    intermediate_size=32,
    num_nextn_predict_layers=1,
    eos_token_ids=(0,),
)
CHANGE = 0.2  # how much of what the layers add is kept


@functools.cache
def params() -> Params:
    tree = random_params(CONFIG, seed=3)
    assert tree.mtp is not None and tree.moe is not None and tree.dense is not None
    eye = jnp.eye(CONFIG.hidden_size)
    return tree.replace(
        attention=tree.attention.replace(output=CHANGE * tree.attention.output),
        dense=tree.dense.replace(down=CHANGE * tree.dense.down),
        moe=tree.moe.replace(down=CHANGE * tree.moe.down, shared_down=CHANGE * tree.moe.shared_down),
        mtp=tree.mtp.replace(projection=jnp.concatenate([eye, 0 * eye], axis=1)),
    )


def make_programs(
    num_drafts: int, layout: str = "dp=1", rates: tuple[float, ...] | None = None, **changes: Any
) -> Programs:
    """Two programs: a column of rows that decode, and chunks."""
    where = Layout.parse(layout)
    placed, mesh = params(), None
    if where.num_devices > 1:
        mesh = where.mesh()
        specs = param_specs(where, placed)
        placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), placed, specs)
    rows, length = changes.pop("rows", ROWS), changes.pop("max_len", MAX_LEN)
    width = -(-length // (BLOCK * where.dcp))
    return Programs(
        CONFIG,
        placed,
        num_blocks=rows * width,
        block_size=BLOCK,
        table_width=width,
        cache_dtype="float32",
        shapes=(StepShape(rows, 1 + num_drafts, decode=True), StepShape(1, CHUNK)),
        layout=where,
        mesh=mesh,
        speculation=Speculation(num_drafts=num_drafts, rates=rates),
        **changes,
    )


def make_engine(runner: Any, programs: Programs, **limits: Any) -> Engine:
    layout, offload = programs.layout, programs.offload
    if offload is not None:
        limits = {"num_pages": offload.num_pages, "region_pages": offload.region_pages, **limits}
    config = SchedulerConfig(
        **{
            "max_num_seqs": programs.num_slots,
            "max_num_batched_tokens": BUDGET,
            "max_prefill_chunk": CHUNK,
            "max_model_len": programs.table_width * BLOCK * layout.dcp,
            "block_size": BLOCK * layout.dcp,
            "num_blocks": programs.num_blocks,
            "num_speculative_tokens": programs.speculation.num_drafts,
            **limits,
        }
    )
    scheduler = Scheduler(config, (0,)) if layout.dp == 1 else DataParallelScheduler(config, layout.dp, (0,))
    return Engine(scheduler, runner, None, Clock(), vocab_size=CONFIG.vocab_size)


def engine(num_drafts: int, layout: str = "dp=1", **changes: Any) -> Engine:
    programs = make_programs(num_drafts, layout, **changes)
    return make_engine(ProgramRunner(programs), programs)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, CONFIG.vocab_size, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def answers(engine: Engine, prompts: list[list[int]], *how: Any) -> list[tuple[int, ...]]:
    """Outputs of all prompts at once; ``how`` is one set of sampling parameters for all, or one for each."""
    each = how * len(prompts) if len(how) == 1 else how
    handles = [engine.submit(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    return [tuple(handle.result(timeout=0).outputs[0].token_ids) for handle in handles]
