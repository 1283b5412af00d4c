"""Random lives of requests in a scheduler whose runner reads the KV back: any schedule gives what each gives alone."""

import collections

from hypothesis import strategies as st

from glmjax.serving.fake import FakeRunner, default_next_token
from glmjax.serving.fake_offload import FakeOffloadRunner
from glmjax.serving.request import Request, Status
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.types import SamplingParams

VOCAB = 31
EOS = (7,)


def make(eos=(), **changes):
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 32,
        **changes,
    }
    scheduler = Scheduler(SchedulerConfig(**config), eos)
    runner = FakeRunner if scheduler.offload is None else FakeOffloadRunner
    return scheduler, runner(config["block_size"], VOCAB, num_drafts=config.get("num_speculative_tokens", 0))


def request(name, prompt, max_tokens=4, priority=0, cache_salt=None, seed=0, **sampling):
    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **sampling})
    return Request(name, list(prompt), params, max_tokens, seed=seed, priority=priority, cache_salt=cache_salt)


def alone(of, eos=()):
    """The output of a request by itself, worked out without an engine."""
    tokens, params = list(of.prompt_ids), of.sampling
    for count in range(1, of.max_tokens + 1):
        token = default_next_token(tokens, VOCAB)
        if not params.greedy:
            token = (token + of.seed) % VOCAB
        banned = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        while count <= params.min_tokens and token in banned:
            token = (token + 1) % VOCAB
        tokens.append(token)
        if token in banned:
            break
    return tokens[len(of.prompt_ids) :]


def sized(config):
    """The budget holds the drafts; ``num_pages`` is how many more than one request needs."""
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["num_speculative_tokens"] + 1)
    if config["num_pages"] is None:
        return config | {"region_pages": 0}
    least = SchedulerConfig(**config | {"num_pages": None}).least_pages
    return config | {"num_pages": least + config["num_pages"]}


SPECS = st.fixed_dictionaries(
    {
        "arrives": st.integers(0, 12),
        "blocks": st.integers(0, 3),
        "edge": st.integers(-1, 1),
        "shared": st.integers(0, 12),
        "family": st.integers(0, 1),
        "max_tokens": st.integers(1, 12),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, "salt"]),
        "seed": st.integers(0, 3),
        "temperature": st.integers(0, 1),
        "min_tokens": st.sampled_from([0, 0, 1, 3]),
        "aborted": st.none() | st.tuples(st.integers(0, 30), st.booleans()),  # step; while the device works
    }
)


def made_from(spec, name, config):
    """A request whose prompt shares a prefix with others and often ends at the edge of a block."""
    room = min(Scheduler(SchedulerConfig(**config)).max_sequence_tokens, config["max_model_len"]) - 1
    length = max(1, min(spec["blocks"] * config["block_size"] + spec["edge"], room))
    prompt = [(spec["family"] + i + (i >= spec["shared"]) * spec["seed"] * 5) % VOCAB for i in range(length)]
    max_tokens = max(1, min(spec["max_tokens"], room - length))
    return request(
        name,
        prompt,
        max_tokens,
        priority=spec["priority"],
        cache_salt=spec["salt"],
        seed=spec["seed"],
        temperature=spec["temperature"],
        min_tokens=min(spec["min_tokens"], max_tokens),
    )


def check_any_schedule(config, specs, ahead):
    """Lets the requests live, and compares.

    Args:
      ahead: plans started before the results of one are entered.

    Returns:
      the scheduler and the runner.
    """
    scheduler, runner = make(EOS, **config)
    in_flight = collections.deque()
    known = {f"r{i}": made_from(spec, f"r{i}", config) for i, spec in enumerate(specs)}
    arrives = {name: spec["arrives"] for name, spec in zip(known, specs, strict=True)}
    aborts = {name: spec["aborted"] for name, spec in zip(known, specs, strict=True)}
    outputs: dict[str, list[int]] = {}
    aborted = set()

    def abort(moment):
        for name in [n for n, when in aborts.items() if when == moment]:
            if scheduler.abort(name):
                aborted.add(name)
            scheduler.check()

    for number in range(800):
        for name in [n for n, when in arrives.items() if when == number]:
            scheduler.add(known[name])
        abort((number, False))
        plan = scheduler.schedule()
        scheduler.check()
        assert not plan.is_empty or in_flight or not scheduler.has_work
        in_flight.append((plan, runner.start(plan)))
        abort((number, True))
        if len(in_flight) > ahead:
            plan, started = in_flight.popleft()
            for update in scheduler.commit(plan, runner.finish(started)):
                outputs.setdefault(update.request.request_id, []).extend(update.token_ids)
            scheduler.check()
        if number > 12 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    assert scheduler.pool.free_blocks == config["num_blocks"]
    if scheduler.offload is not None:
        assert scheduler.offload.residency.free_pages == config["num_pages"]
    for name, one in known.items():
        assert one.status is Status.FINISHED and not one.blocks
        got, expected = outputs.get(name, []), alone(one, EOS)
        assert got == (expected[: len(got)] if name in aborted else expected)
    return scheduler, runner
