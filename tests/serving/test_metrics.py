"""Metrics under vLLM's names."""

from glmjax.serving.metrics import Metrics
from glmjax.serving.plan import Sampled
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig


def exposition(num_speculative_tokens):
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=16,
        block_size=4,
        num_blocks=4,
        num_speculative_tokens=num_speculative_tokens,
    )
    scheduler = Scheduler(config)
    for accepted in (0, 0, 0, 1, 1, 2, 2, 2, 2, 2) if num_speculative_tokens else ():
        scheduler.drafts.add(Sampled((1,) * (accepted + 1), num_drafts=2))
    return Metrics(scheduler.gauges, "m").exposition().decode()


def test_drafts_are_counted_under_the_names_of_vllm():
    labels = 'engine="0",model_name="m"'
    lines = exposition(2).splitlines()
    for name, value in (("drafts", 10), ("draft_tokens", 20), ("accepted_tokens", 12)):
        assert f"vllm:spec_decode_num_{name}_total{{{labels}}} {value}.0" in lines
    for position, value in enumerate((7, 5)):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{{labels},position="{position}"}} {value}.0' in lines
    assert not any(line.startswith("glmjax:") for line in lines)


def test_without_drafts_there_is_nothing_to_count():
    assert "spec_decode" not in exposition(0)
