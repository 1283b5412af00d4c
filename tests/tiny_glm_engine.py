"""The reference checkpoint in compiled programs with drafts."""

import dataclasses

import numpy as np
from reference import REFERENCE

from glmjax.checkpoint import load_checkpoint
from glmjax.programs import Programs
from glmjax.serving.plan import Chunk, Plan
from glmjax.serving.runner import ProgramRunner
from glmjax.speculation import Speculation
from glmjax.step_io import StepShape
from glmjax.types import SamplingParams

PROMPT = 48


def first_drafts(num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafts [2, n] in the device's state after both recorded prompts, and the recorded ones [2, 3]."""
    folder = REFERENCE / "tiny_glm"
    config, params = load_checkpoint(folder)
    with np.load(folder / "ref.npz") as file:
        texts, recorded = file["greedy_ids"], file["mtp.draft_tokens"]
    runner = ProgramRunner(
        Programs(
            dataclasses.replace(config, mla_norm_eps=1e-6),
            params,
            num_blocks=16,
            block_size=8,
            table_width=8,
            cache_dtype="float32",
            shapes=(StepShape(2, 1 + num_drafts, decode=True), StepShape(1, PROMPT)),
            speculation=Speculation(num_drafts=num_drafts),
        )
    )
    chunks = [
        Chunk(str(r), tuple(text[:PROMPT].tolist()), 0, tuple(range(8 * r, 8 * r + 8)), True, GREEDY, slot=r)
        for r, text in enumerate(texts)
    ]
    sampled = runner.finish(runner.start(Plan(tuple(chunks)))).sampled
    assert [sampled[str(r)].token_ids[0] for r in range(2)] == texts[:, PROMPT].tolist()
    return np.asarray(runner._state.drafts)[:2], recorded


GREEDY = SamplingParams(temperature=0)
