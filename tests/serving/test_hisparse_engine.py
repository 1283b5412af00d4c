"""The golden property of HiSparse, on real programs: the same tokens with rows in two tiers, however small one is."""

import dataclasses

import drafting_model
import hisparse_engine
import jax
import numpy as np
import pytest
from drafting_model import answers
from hisparse_engine import PAGE, PAGES, K, check_returned, engine, greedy, least_pages, prompt, region_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import glmjax.tiers
from glmjax.params import random_params
from glmjax.programs import Programs
from glmjax.serving.handle import EngineError
from glmjax.step_io import StepShape

pytestmark = pytest.mark.slow  # real programs

NEW = 14


@pytest.fixture(scope="module")
def expected():
    return hisparse_engine.Expected()


def edges(num_drafts):
    """Lengths around a page, a selection, the buffer, and the longest."""
    buffer = region_pages(num_drafts) * PAGE
    return sorted({n + d for n in (PAGE, K, 2 * K, buffer, buffer + NEW, 60) for d in (-1, 0, 1)} | {1, 80})


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_tokens_are_the_same_at_every_edge(num_drafts, room, expected):
    prompts = [prompt(n) for n in edges(num_drafts)]
    pages = PAGES if room == "roomy" else least_pages(num_drafts)
    tiered = engine(num_drafts, num_pages=pages, enable_prefix_caching=False)
    assert answers(tiered, prompts, greedy(NEW)) == expected(prompts, [NEW] * len(prompts))
    stats = tiered.stats()
    assert (stats["hisparse_cache_misses"] > 0) == (room == "tight")
    check_returned(tiered)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_request_longer_than_the_device_pool_completes(num_drafts, expected):
    pages = least_pages(num_drafts)
    long = prompt(82)
    assert (len(long) + NEW) // PAGE > pages
    tiered = engine(num_drafts, num_pages=pages)
    assert answers(tiered, [long], greedy(NEW)) == expected([long], [NEW])
    assert tiered.stats()["hisparse_host_to_device_bytes"] > 0


def test_requests_that_share_a_prefix_read_it_from_the_host(expected):
    first, other = prompt(70), prompt(30, seed=1)
    second = first[:60] + prompt(12, seed=2)
    tiered = engine(0, num_pages=least_pages(0))
    assert answers(tiered, [first, other], greedy(NEW)) == expected([first, other], [NEW] * 2)
    handle = tiered.submit(second, greedy(NEW))
    while tiered.has_work:
        tiered.step()
        tiered.scheduler.check()
    out = handle.result(timeout=0)
    assert out.num_cached_tokens == 60 // PAGE * PAGE
    assert [tuple(out.outputs[0].token_ids)] == expected([second], [NEW])
    check_returned(tiered)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_preemption_of_requests_on_the_host_changes_nothing(num_drafts, expected):
    prompts = [prompt(n, seed=3) for n in (40, 44, 47, 50)]
    tiered = engine(num_drafts, num_pages=least_pages(num_drafts) + 14, num_blocks=27)
    assert answers(tiered, prompts, greedy(NEW)) == expected(prompts, [NEW] * 4)
    assert tiered.stats()["num_preemptions"] > 0
    check_returned(tiered)


def test_an_abort_with_copies_in_flight_leaves_nothing_behind(expected):
    tiered = engine(0, num_pages=least_pages(0))
    doomed, fine = tiered.submit(prompt(70, seed=4), greedy(NEW)), tiered.submit(prompt(33, seed=4), greedy(NEW))
    while not tiered.scheduler.offload._copying:
        tiered.step()
    tiered.abort(doomed.request_id)
    while tiered.has_work:
        tiered.step()
        tiered.scheduler.check()
    assert doomed.result(timeout=0).outputs[0].finish_reason == "abort"
    assert [tuple(fine.result(timeout=0).outputs[0].token_ids)] == expected([prompt(33, seed=4)], [NEW])
    check_returned(tiered)


LIVES = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 80),
            "shared": st.integers(0, 40),
            "max_tokens": st.integers(1, 12),
            "arrives": st.integers(0, 10),
            "aborted": st.none() | st.integers(0, 20),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([0, 3]), LIVES, st.integers(0, 20), st.integers(0, 40), st.booleans())
def test_any_schedule_gives_the_tokens_of_an_engine_without_tiers(
    expected, num_drafts, lives, more_pages, fewer_blocks, caching
):
    pages = min(PAGES, least_pages(num_drafts) + more_pages)
    tiered = engine(num_drafts, num_pages=pages, num_blocks=96 - fewer_blocks, enable_prefix_caching=caching)
    family = prompt(80, seed=5)
    prompts = [family[: one["shared"]][: one["length"]] for one in lives]
    prompts = [p + prompt(one["length"] - len(p), seed=6) for p, one in zip(prompts, lives, strict=True)]
    wanted = expected(prompts, [one["max_tokens"] for one in lives])
    handles = {}
    for step in range(400):
        for i, one in enumerate(lives):
            if one["arrives"] == step:
                handles[i] = tiered.submit(prompts[i], greedy(one["max_tokens"]))
            if one["aborted"] == step and i in handles:
                tiered.abort(handles[i].request_id)
        tiered.step()
        tiered.scheduler.check()
        if step > 10 and not tiered.has_work:
            break
    for i, one in enumerate(lives):
        got = tuple(handles[i].result(timeout=0).outputs[0].token_ids)
        assert got == (wanted[i] if one["aborted"] is None else wanted[i][: len(got)])
    check_returned(tiered)


class Broken:
    """What came of a program that failed."""

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: the copy failed")


def test_a_copy_that_fails_ends_its_request_alone(expected):
    tiered = engine(0, num_pages=least_pages(0) + 30)
    doomed, fine = tiered.submit(prompt(60, seed=11), greedy(NEW)), tiered.submit(prompt(41, seed=11), greedy(NEW))
    write_back = tiered.runner._write_back

    def failing(moves):
        mine = set(doomed.requests[0].blocks)
        return [(m, Broken() if mine & {move.block for move in m} else done) for m, done in write_back(moves)]

    tiered.runner._write_back = failing
    while tiered.has_work:
        tiered.step()
        tiered.scheduler.check()
    with pytest.raises(EngineError, match="a copy of its KV rows to the host failed"):
        doomed.result(timeout=0)
    if fine.error is None:  # it may have shared a batch of copies
        assert [tuple(fine.result(timeout=0).outputs[0].token_ids)] == expected([prompt(41, seed=11)], [NEW])
    assert tiered.healthy
    check_returned(tiered)
    after = prompt(30, seed=12)
    tiered.runner._write_back = write_back
    assert answers(tiered, [after], greedy(NEW)) == expected([after], [NEW])


def test_plain_offload_brings_blocks_of_the_prefix_back(expected):
    first, second = prompt(60, seed=7), prompt(64, seed=8)
    plain = engine(0, regions=False, num_pages=20)
    for each in (first, second, first):
        assert answers(plain, [each], greedy(NEW)) == expected([each], [NEW])
    stats = plain.stats()
    assert stats["prefix_cache_hits"] > 0 and stats["hisparse_cache_misses"] == 0
    loaded = stats["hisparse_host_to_device_bytes"]
    assert loaded > 0 and loaded % (PAGE * plain.runner._host.shape[0] * plain.runner._host.shape[2]) == 0
    check_returned(plain)


@pytest.mark.parametrize(("layout", "num_drafts"), [("pcp=2,dcp=2", 3), ("dp=2,ep=2", 3)])
def test_tokens_are_the_same_under_layouts(layout, num_drafts, expected):
    prompts = [prompt(n, seed=9) for n in (5, 17, 33, 58, 70, 80, 41, 64)]
    tiered = engine(num_drafts, layout, num_pages=least_pages(num_drafts, layout))
    assert answers(tiered, prompts, greedy(NEW)) == expected(prompts, [NEW] * len(prompts))
    assert tiered.stats()["hisparse_cache_misses"] > 0
    check_returned(tiered)


def test_bytes_counted_are_the_rows_that_were_copied(monkeypatch):
    """Another count, made where rows leave the host's pool, for programs of their own."""
    copied = []
    real = glmjax.tiers.host_rows

    def counting(pool, layer, count, slots, **how):
        jax.debug.callback(lambda slots: copied.append(count * int((np.asarray(slots) >= 0).sum())), slots)
        return real(pool, layer, count, slots, **how)

    monkeypatch.setattr(glmjax.tiers, "host_rows", counting)
    made = hisparse_engine.programs(0)
    # With groups of three layers in a scan, which looks ahead for staged chunks.
    kinds = ("full", *("full", "shared", "shared") * 3)
    config = dataclasses.replace(made.config, num_hidden_layers=10, indexer_types=kinds, num_nextn_predict_layers=0)
    own = Programs(
        config,
        random_params(config, seed=1),
        num_blocks=made.num_blocks,
        block_size=PAGE,
        table_width=made.table_width,
        cache_dtype="float32",
        shapes=(StepShape(2, 1, decode=True), StepShape(1, drafting_model.CHUNK)),
        offload=made.offload,
    )
    tiered = drafting_model.make_engine(hisparse_engine.LitteredRunner(own), own, num_pages=least_pages(0))
    answers(tiered, [prompt(70, seed=10), prompt(50, seed=10)], greedy(NEW))
    jax.effects_barrier()
    stats = tiered.stats()
    assert stats["hisparse_cache_misses"] > 0
    assert stats["hisparse_host_to_device_bytes"] == sum(copied) * tiered.runner._host.shape[2]


def test_no_step_copies_the_pool():
    """On a CPU: such a copy is in no temporary, and takes half a second where the pool is large."""
    own = Programs(
        drafting_model.CONFIG,
        drafting_model.params(),
        num_blocks=96,
        block_size=PAGE,
        table_width=24,
        cache_dtype="fp8_ds_mla",
        shapes=(StepShape(1, 1, decode=True), StepShape(1, 16)),
        offload=hisparse_engine.programs(0).offload,
    )
    pool = f"u8[{','.join(map(str, own.abstract_cache().latent.shape))}]"
    for shape, program in own._steps.items():
        lines = [line for line in program.as_text().splitlines() if pool in line]
        assert lines and not [line for line in lines if " copy(" in line], shape
