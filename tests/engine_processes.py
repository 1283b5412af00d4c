"""Engines of ``engine_servers`` in processes of their own, and clients that insist on an answer."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import engine_servers
import httpx
from engine_servers import expected

from glmjax.serving.transfer.factory import between_processes

STAGE = 300
SLOWEST = 30.0  # seconds: of a call, whatever happens
BASE = {
    "connector": between_processes(),
    "delay": 0.01,
    "stage_blocks": STAGE,
    "settings": {"lease_seconds": 2.0, "call_timeout": 1.0, "timeout": 4.0},
}


class Process:
    """An engine of a role, with a new name each time that it is started.

    Attributes:
      url: where it serves; its connector answers on ``connector_port``.
    """

    def __init__(self, role, *, environment=None, **options):
        self.role, self.starts = role, 0
        self.job = BASE | {"role": role} | options
        self.environment = environment or {}
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
            env=os.environ | {"PYTHONPATH": str(Path(engine_servers.__file__).parents[1])} | self.environment,
        )
        said = json.loads(self.process.stdout.readline())
        self.url, self.connector_port = said["url"], said["connector_port"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def pause(self, seconds):
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def metrics(self):
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            name, _, rest = line.partition("{")
            found[name] = float(rest.split()[-1]) if rest else 0.0
        return found

    def held(self):
        """What it holds, by its metrics."""
        found = self.metrics()
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        held = {name: found[name] for name in (*busy, "glmjax:kv_transfer_leases_held")}
        held["stage"] = STAGE - found["glmjax:kv_transfer_stage_free"]
        return {name: value for name, value in held.items() if value}


def all_returned(*engines):
    """Nothing is held, at the latest when leases have run out."""
    deadline = time.monotonic() + 20
    while any(held := [engine.held() for engine in engines]):
        assert time.monotonic() < deadline, held
        time.sleep(0.2)


def insist(url, number):
    """A client that tries again after an error: what became of each time."""
    outcomes = []
    while len(outcomes) < 60:
        outcomes.append(call(url, number))
        if outcomes[-1][0] not in ("error", "no front"):
            break
        time.sleep(0.5)
    return outcomes


def call(url, number, *, patient=False):
    """What became of a call: its answer's tokens beside the right ones, or its error; and seconds that it took.

    Args:
      patient: it is one that does not hang up early.
    """
    draw = random.Random(number)
    prompt = [
        draw.randrange(4),
        *range(draw.randrange(1, 60)),
        *(draw.randrange(250) for _ in range(draw.randrange(9))),
    ]
    max_tokens, patience = draw.randrange(1, 14), draw.choice([SLOWEST, SLOWEST, SLOWEST, 0.3])
    patience = SLOWEST if patient else patience
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    began = time.monotonic()
    try:
        if draw.random() < 0.4:
            tokens = streamed(url, body, patience)
        else:
            tokens = answered(httpx.post(f"{url}/v1/completions", json=body, timeout=patience))
        kind = "error" if tokens is None else (tokens, expected(prompt, max_tokens))
    except httpx.TimeoutException:
        assert patience < SLOWEST, "no answer in bounded time"
        kind = "hung up"
    except httpx.TransportError:
        kind = "no front"
    return kind, time.monotonic() - began


def answered(answer):
    """Tokens of an answer; None: it is an error, and says so."""
    if answer.status_code == 200:
        return answer.json()["choices"][0]["token_ids"]
    assert answer.status_code in (500, 502, 503) and answer.json()["error"]["message"]
    return None


def streamed(url, body, patience):
    """The same of a stream, whose error may come late."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=patience) as answer:
        if answer.status_code != 200:
            answer.read()
            return answered(answer)
        *events, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert last == "[DONE]"
        events = [json.loads(event) for event in events]
        if "error" in events[-1]:
            assert events[-1]["error"]["message"]
            return None
        return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def right_or_given_up(each):
    """Every client got the right answer in the end unless it hung up, and always in bounded time."""
    last = [outcomes[-1][0] for outcomes in each]
    answers = [kind for kind in last if isinstance(kind, tuple)]
    assert all(tokens == right for tokens, right in answers)
    assert len(answers) + last.count("hung up") == len(each)
    assert max(seconds for outcomes in each for _, seconds in outcomes) < SLOWEST
