"""Metrics under vLLM's names."""

import re

from handoff_engines import StillClock, make_engine

from glmjax.serving.disaggregated import DisaggregatedEngine
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


def helps(stats):
    """The HELP of every metric by its name."""
    return dict(re.findall(r"^# HELP (\S+) (.*)$", Metrics(lambda: stats, "m").exposition().decode(), re.MULTILINE))


def test_every_number_of_two_engines_says_what_it_counts():
    hub, clock = {}, StillClock()
    prefill = make_engine(hub, clock, num_speculative_tokens=2)
    decode = make_engine(hub, clock, num_blocks=40, num_pages=12, region_pages=2)
    stats = DisaggregatedEngine(prefill, decode, 1).stats()
    own = {name: text for name, text in helps(stats | {"program_runs": 1}).items() if name.startswith("glmjax:")}
    generic = helps({"something_new": 1})["glmjax:something_new"]
    assert len(own) > 30 and generic not in {text.removeprefix("Prefill engine: ") for text in own.values()}
    assert all(text.startswith("Prefill engine: ") == name.startswith("glmjax:prefill_") for name, text in own.items())
    transfers = {name: text for name, text in own.items() if "kv_transfer_" in name}
    assert len(transfers) == 22 and len(set(transfers.values())) == 22
    for name, text in transfers.items():
        unit = {"bytes_fetched": "Bytes", "stage_free": "KV blocks"}.get(name.partition("kv_transfer_")[2], "prompts")
        assert unit.lower() in text.lower()
