"""A model that compiles in seconds and says ASCII, in float32: its programs, engines around them, its checkpoint.

Every user of these functions compiles for the same shapes, so a process compiles once, and the persistent cache serves
the others.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.checkpoint import save_pretrained
from glmjax.config import GLMConfig
from glmjax.params import Params, random_params
from glmjax.programs import Programs, step_shapes
from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.parsers import TAGS
from glmjax.serving.runner import ProgramRunner
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.tokenizer import Tokenizer
from glmjax.step_io import MAX_BANNED

BLOCK, NUM_BLOCKS, MAX_LEN, MAX_SEQS, BUDGET = 8, 16, 128, 4, 32
MAX_SLOTS = 9  # more than a program has rows
# The same for LLM and serve.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": BUDGET,
    "block_size": BLOCK,
    "num_device_blocks": NUM_BLOCKS,
}
SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TOKENIZER = Tokenizer.of_bytes(added=TAGS, special=SPECIAL)
ENDS = tuple(TOKENIZER.special_tokens[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>"))
# Five layers: a dense one, then twice a leader and a follower with experts, which run in a scan.
CONFIG = GLMConfig.tiny(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=4,
    index_head_dim=16,
    indexer_types=("full", "full", "shared", "full", "shared"),
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    intermediate_size=64,
    max_position_embeddings=512,
    num_nextn_predict_layers=0,
    eos_token_ids=ENDS,
    pad_token_id=ENDS[0],
)


@functools.cache
def params() -> Params:
    """Random, with a head that prefers what can be printed, and the end tokens."""
    tree = random_params(CONFIG)
    ids = np.arange(CONFIG.vocab_size)
    likely = ((ids >= 32) & (ids < 127)) | np.isin(ids, ENDS)
    return tree.replace(head=tree.head * jnp.where(likely, 1.0, 0.2)[:, None])


@functools.cache
def programs() -> Programs:
    return Programs(
        CONFIG,
        params(),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        table_width=MAX_LEN // BLOCK,
        cache_dtype="float32",
        shapes=step_shapes(MAX_SEQS, BUDGET),
        num_slots=MAX_SLOTS,
    )


def make_engine(runner: ProgramRunner, **limits: Any) -> Engine:
    """An engine whose scheduler may be held tighter than the programs."""
    config = SchedulerConfig(
        **{
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": BUDGET,
            "max_model_len": MAX_LEN,
            "block_size": BLOCK,
            "num_blocks": NUM_BLOCKS,
            **limits,
        }
    )
    scheduler = Scheduler(config, ENDS)
    return Engine(scheduler, runner, TOKENIZER.raw, Clock(), vocab_size=CONFIG.vocab_size, max_banned_ids=MAX_BANNED)


def finish(engine: Engine) -> None:
    """Steps until nothing is left, with all invariants checked."""
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def write_checkpoint(folder: Path) -> Path:
    """The model in Hugging Face's format, with its tokenizer."""
    save_pretrained(CONFIG, params(), folder)
    TOKENIZER.raw.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS), "temperature": 0.0}))
    return folder


@contextlib.contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Collects what JAX compiles meanwhile, by its own account."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(f"{details} {duration:.3f} s")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
