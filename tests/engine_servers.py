"""Servers of engines without a model, whose answers can be worked out, for prefill and decode; and a front before them.

``engine_servers.py JOB`` is such an engine in a process of its own, as ``glmjax.engine_process`` is one with a model.
"""

import contextlib
import json
import sys
import threading
import time

from glmjax.serving.clock import Clock
from glmjax.serving.engine import Engine
from glmjax.serving.fake import default_next_token
from glmjax.serving.fake_handoff import FakeHandoffRunner
from glmjax.serving.front import FrontOptions, Pair, build_front, one_pair
from glmjax.serving.handoff import Collector, Handoff
from glmjax.serving.http import HttpOptions, build_app
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.server import Server
from glmjax.serving.tokenizer import Tokenizer
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.job import Settings

TOKENIZER = Tokenizer.of_bytes()
VOCAB = TOKENIZER.vocab_size
MAX_LEN = 512


class SlowRunner(FakeHandoffRunner):
    """Takes its time for every step."""

    delay = 0.0

    def start(self, plan):
        time.sleep(self.delay)
        return super().start(plan)


def make_engine(
    name, role, *, connector="local", hub=None, block_size=4, num_blocks=400, stage_blocks=300, delay=0.0,
    on_failure="recompute", version="test", settings=None,
):  # fmt: skip
    """An engine that hands over, with its records as KV."""
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_LEN, block_size=block_size, num_blocks=num_blocks
    )
    runner = SlowRunner(block_size, VOCAB, stage_blocks=stage_blocks)
    runner.delay = delay
    info = runner.describe(name, connector=connector, glmjax_version=version)
    limits = Settings(**{"lease_seconds": 5.0, "call_timeout": 2.0, "timeout": 10.0, **(settings or {})})
    handoff = Handoff(
        Collector(make_connector(info, runner.memory, Clock(), limits, hub)), stage_blocks, block_size, 0, on_failure
    )
    return Engine(Scheduler(config, (), handoff), runner, TOKENIZER.raw, Clock(), vocab_size=VOCAB)


def start_server(engine, role=None, api_keys=(), grace_s=5):
    """Its HTTP server, which closes it."""
    engine.start()
    options = HttpOptions(model_names=("fake",), role=role, api_keys=api_keys)
    return Server(build_app(engine, TOKENIZER, options), port=0, on_close=engine.close, grace_s=grace_s)


@contextlib.contextmanager
def front_of(prefill_url, decode_url, **options):
    """A front before two servers."""
    pair = Pair(prefill_url, decode_url)
    with Server(build_front(one_pair(pair), FrontOptions(**options)), port=0, grace_s=1) as server:
        yield server


def expected(prompt_ids, max_tokens):
    """Greedy output of a prompt, worked out without an engine."""
    tokens = list(prompt_ids)
    for _ in range(max_tokens):
        tokens.append(default_next_token(tokens, VOCAB))
    return tokens[len(prompt_ids) :]


def main():
    job = json.loads(sys.argv[1])
    told_port = job.pop("told_port", None)
    engine = make_engine(**job)
    connector = engine.scheduler.handoff.connector
    said = {"connector_port": connector.port}
    if told_port is not None:
        connector.port = told_port  # offers name something that stands before it
    server = start_server(engine, job["role"])
    sys.stdout.write(json.dumps(said | {"url": server.url}) + "\n")
    sys.stdout.flush()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    over.wait()
    server.close()


if __name__ == "__main__":
    main()
