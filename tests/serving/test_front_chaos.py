"""Engines in processes of their own that are killed, stopped and started again, clients that hang up, a new front.

Whatever happens, an answer is right or a clear error, and comes in bounded time; in the end nothing is held.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engine_servers
import httpx
import pytest
from engine_servers import expected

from glmjax.serving.front import FrontOptions, Pair, build_front
from glmjax.serving.server import Server
from glmjax.serving.transfer.factory import between_processes

CALLS, CLIENTS = 200, 6
STAGE = 300
SLOWEST = 30.0  # seconds: of a call, whatever happens
BASE = {
    "connector": between_processes(),
    "delay": 0.01,
    "stage_blocks": STAGE,
    "settings": {"lease_seconds": 2.0, "call_timeout": 1.0, "timeout": 4.0},
}


class Process:
    """An engine of a role, with a new name each time that it is started."""

    def __init__(self, role, **options):
        self.role, self.starts = role, 0
        self.job = BASE | {"role": role} | options
        self.start()

    def start(self):
        self.starts += 1
        job = self.job | {"name": f"{self.role}-{self.starts}"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", engine_servers.__file__, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(engine_servers.__file__).parents[1])},
        )
        self.url = json.loads(self.process.stdout.readline())["url"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def pause(self, seconds):
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def held(self):
        """What it holds, by its metrics."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            name, _, rest = line.partition("{")
            found[name] = float(rest.split()[-1]) if rest else 0.0
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        held = {name: found[name] for name in (*busy, "glmjax:kv_transfer_leases_held")}
        held["stage"] = STAGE - found["glmjax:kv_transfer_stage_free"]
        return {name: value for name, value in held.items() if value}


class Chaos:
    """Both engines and the front, and what happens to them."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        with ThreadPoolExecutor() as pool:
            prefill, decode = pool.submit(Process, "prefill"), pool.submit(Process, "decode", block_size=3)
            self.prefill, self.decode = prefill.result(), decode.result()
        self.happened = []
        self.front = None
        self.start_front()

    def start_front(self):
        """A front where the last one was, if there was one."""
        port = 0 if self.front is None else self.front.port

        async def choose(path, headers, body):
            return Pair(self.prefill.url, self.decode.url)

        app = build_front(choose, FrontOptions(min_prefill_tokens=4, prefill_timeout=5.0))
        self.front = Server(app, port=port, grace_s=1)

    def restart_front(self):
        self.front.close()
        self.start_front()

    def restart(self, engine):
        engine.kill()
        time.sleep(0.2)
        engine.start()

    def go_on(self, over):
        """One disaster after the other until all calls are through, each kind at least once."""
        kinds = [
            ("prefill dies", lambda: self.restart(self.prefill)),
            ("prefill hangs", lambda: self.prefill.pause(1.5)),
            ("decode dies", lambda: self.restart(self.decode)),
            ("decode hangs", lambda: self.decode.pause(1.5)),
            ("the front is restarted", self.restart_front),
        ]
        self.random.shuffle(kinds)
        while not over.is_set():
            name, happen = kinds[len(self.happened) % len(kinds)]
            over.wait(0.7)
            happen()
            self.happened.append(name)

    def close(self):
        self.front.close()
        for engine in (self.prefill, self.decode):
            engine.kill()


def insist(chaos, number):
    """A client that tries again after an error: what became of each time."""
    outcomes = []
    while len(outcomes) < 60:
        outcomes.append(call(chaos, number))
        if outcomes[-1][0] not in ("error", "no front"):
            break
        time.sleep(0.5)
    return outcomes


def call(chaos, number):
    """What became of a call: its answer's tokens beside the right ones, or its error; and seconds that it took."""
    draw = random.Random(number)
    prompt = [
        draw.randrange(4),
        *range(draw.randrange(1, 60)),
        *(draw.randrange(250) for _ in range(draw.randrange(9))),
    ]
    max_tokens, patience = draw.randrange(1, 14), draw.choice([SLOWEST, SLOWEST, SLOWEST, 0.3])
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    began = time.monotonic()
    try:
        answer = httpx.post(f"{chaos.front.url}/v1/completions", json=body, timeout=patience)
        if answer.status_code == 200:
            kind = (answer.json()["choices"][0]["token_ids"], expected(prompt, max_tokens))
        else:
            assert answer.status_code in (500, 502, 503) and answer.json()["error"]["message"]
            kind = "error"
    except httpx.TimeoutException:
        assert patience < SLOWEST, "no answer in bounded time"
        kind = "hung up"
    except httpx.TransportError:
        kind = "no front"
    return kind, time.monotonic() - began


@pytest.mark.slow
def test_answers_are_right_or_clear_errors_and_nothing_is_lost():
    chaos = Chaos(seed=0)
    over = threading.Event()
    trouble = threading.Thread(target=chaos.go_on, args=(over,))
    try:
        trouble.start()
        with ThreadPoolExecutor(CLIENTS) as pool:
            each = list(pool.map(lambda number: insist(chaos, number), range(CALLS)))
        while len(set(chaos.happened)) < 5:
            each.append(insist(chaos, len(each)))
        over.set()
        trouble.join()
        last = [outcomes[-1][0] for outcomes in each]
        answers = [kind for kind in last if isinstance(kind, tuple)]
        assert all(tokens == right for tokens, right in answers)
        assert len(answers) + last.count("hung up") == len(each)
        assert max(seconds for outcomes in each for _, seconds in outcomes) < SLOWEST
        deadline = time.monotonic() + 20
        while held := (chaos.prefill.held(), chaos.decode.held()):
            if held == ({}, {}):
                break
            assert time.monotonic() < deadline, held
            time.sleep(0.2)
        kind, _ = call(chaos, CALLS + 1)
        assert kind[0] == kind[1]  # and it goes on
    finally:
        over.set()
        trouble.join()
        chaos.close()
