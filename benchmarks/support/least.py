"""What a decode step cannot do without: bytes that it reads, and how fast this machine reads."""

import math
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from glmjax.config import GLMConfig
from glmjax.params import Params

READ_MB, READS = 256, 5


def least_bytes(config: GLMConfig, params: Params, batch: int, context: int) -> dict[str, float]:
    """Bytes that a decode step reads once, by what they are.

    Index keys are not needed while all positions are chosen. Of the routed experts those count that some token chooses,
    on average if each is as likely for every token.

    Args:
      params: of the trunk, float32.
      batch: sequences, one token each.
      context: tokens that each sequence holds.
    """
    every_step = params.attention, params.indexer, params.dense, params.final_norm, params.head
    found = {"weights": float(sum(x.nbytes for x in jax.tree.leaves(every_step)))}
    if params.moe is not None:
        chosen = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
        routed = params.moe.gate_up, params.moe.down
        routed_bytes = sum(x.nbytes for x in jax.tree.leaves(routed))
        found["weights"] += sum(x.nbytes for x in jax.tree.leaves(params.moe)) - routed_bytes
        found["experts"] = chosen * routed_bytes
    item, rows = params.head.dtype.itemsize, min(context, config.index_topk)
    scored = context if context > config.index_topk else 0
    found["index keys"] = float(batch * scored * config.num_full_indexers * config.index_head_dim * item)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    found["KV rows"] = float(batch * rows * config.num_hidden_layers * width * item)
    return found


def read_bandwidth(cores: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second that so many cores read from memory together; the best of a few times."""
    arrays = [np.ones(READ_MB << 17, np.int64) for _ in range(cores)]
    best = math.inf
    for _ in range(READS):
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(x,)) for x in arrays]
        start = clock()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, clock() - start)
    return sum(x.nbytes for x in arrays) / best
