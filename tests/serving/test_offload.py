"""Offload on the scheduler's side, with a runner that refuses to read rows where a device could not."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import SPECS, check_any_schedule, sized

CONFIGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(2, 5),
        "max_num_batched_tokens": st.integers(1, 10),
        "block_size": st.integers(1, 3),
        "num_blocks": st.integers(30, 60),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_prefill_chunk": st.none() | st.integers(1, 5),
        "num_speculative_tokens": st.sampled_from([0, 0, 1, 3]),
        "max_model_len": st.integers(30, 60),
        "region_pages": st.integers(0, 3),
        "num_pages": st.integers(0, 8),
    }
).map(sized)
LONG = SPECS.flatmap(lambda spec: st.integers(0, 16).map(lambda blocks: spec | {"blocks": blocks}))
SEEN: collections.Counter[str] = collections.Counter()


@settings(max_examples=400, deadline=None)
@given(CONFIGS, st.lists(LONG, min_size=1, max_size=9), st.integers(0, 2))
def test_any_schedule_gives_what_each_request_gives_alone(config, specs, ahead):
    check_any_schedule(config, specs, ahead)
