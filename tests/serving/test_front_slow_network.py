"""Engines and a front with a bad network between them: slow, stalled, breaking off, or all of it in turn.

Between the front and either engine, and between the engines' connectors, stands a relay. What NIXL itself moves goes by
TCP and stutters with the engine that it is read from, which is stopped and goes on. Whatever happens, an answer is
right or a clear error, and comes in bounded time; in the end nothing is held.
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lost_network
import pytest
from engine_processes import Process, all_returned, call, insist, right_or_given_up
from slow_network import FAIR, Relay, Weather

from glmjax.serving import front
from glmjax.serving.front import FrontOptions, Pair, build_front, one_pair
from glmjax.serving.server import Server

pytestmark = pytest.mark.slow

CALLS, CLIENTS = 120, 6
LIMITS = {"lease_seconds": 3.0, "call_timeout": 1.5, "timeout": 6.0}  # of a connector
PREFILL_TIMEOUT = 2.5
STALLED = Weather(stalled=True)
SLOW = Weather(delay=0.08, bytes_per_second=50_000)


class Network:
    """Two engines, a front, and relays to either engine and to the prefill engine's connector."""

    def __init__(self):
        self.to_prefill, self.to_decode, self.to_connector = self.relays = [Relay(seed) for seed in range(3)]
        tcp = {"UCX_TLS": "tcp"}  # else NIXL reads the other's memory without any network

        def start(role, **options):
            return Process(role, environment=tcp, settings=LIMITS, **options)

        with ThreadPoolExecutor() as pool:
            prefill = pool.submit(start, "prefill", told_port=self.to_connector.port)
            decode = pool.submit(start, "decode", block_size=3)
            self.prefill, self.decode = prefill.result(), decode.result()
        self.to_prefill.behind = int(self.prefill.url.rpartition(":")[2])
        self.to_decode.behind = int(self.decode.url.rpartition(":")[2])
        self.to_connector.behind = self.prefill.connector_port
        pair = Pair(*(f"http://127.0.0.1:{relay.port}" for relay in (self.to_prefill, self.to_decode)))
        options = FrontOptions(min_prefill_tokens=4, prefill_timeout=PREFILL_TIMEOUT)
        self.front = Server(build_front(one_pair(pair), options), port=0, grace_s=1)
        self.url = self.front.url

    @contextlib.contextmanager
    def weather(self, weather, *relays):
        for relay in relays:
            relay.weather = weather
        yield
        for relay in relays:
            relay.weather = FAIR

    def counts(self):
        """What became of prompts, and of their KV."""
        found = self.decode.metrics()
        return {name: found[f"glmjax:kv_transfer_{name}"] for name in ("fetches_done", "fetches_failed", "recomputed")}

    def close(self):
        self.front.close()
        for engine in (self.prefill, self.decode):
            engine.kill()
        for relay in self.relays:
            relay.close()


@pytest.fixture(scope="module")
def network():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "REST_SECONDS", 0.3)  # it is soon tried again
        network = Network()
        yield network
        network.close()


def calls(network, numbers):
    """Of clients that all wait for their answers: seconds of each; the answers are right."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        each = list(pool.map(lambda number: call(network.url, number, patient=True), numbers))
    for kind, _ in each:
        assert isinstance(kind, tuple), kind
        assert kind[0] == kind[1]
    return [seconds for _, seconds in each]


def grown(network, before):
    return {name: count - before[name] for name, count in network.counts().items()}


def test_a_slow_network_is_borne(network):
    """Everything takes longer, and nothing is computed twice."""
    before, passed = network.counts(), [relay.pieces for relay in network.relays]
    with network.weather(SLOW, *network.relays):
        seconds = calls(network, range(2000, 2018))
    assert min(seconds) > 4 * SLOW.delay  # the front asks twice at least, with a way there and a way back
    counts = grown(network, before)
    assert counts["fetches_done"] > 10 and not counts["fetches_failed"] and not counts["recomputed"]
    # All of it went by way of the relays, with a question and an answer each.
    pieces = [relay.pieces - before for relay, before in zip(network.relays, passed, strict=True)]
    assert min(pieces) >= 2 * counts["fetches_done"]
    all_returned(network.prefill, network.decode)


def test_prompts_whose_kv_does_not_come_in_time_are_computed_again(network):
    before = network.counts()
    with network.weather(STALLED, network.to_connector):
        seconds = calls(network, range(3000, 3012))
    counts = grown(network, before)
    assert counts["recomputed"] == counts["fetches_failed"] > 6
    assert LIMITS["call_timeout"] < max(seconds) < 3 * LIMITS["call_timeout"] + 5
    all_returned(network.prefill, network.decode)


def test_prompts_that_the_prefill_engine_does_not_answer_in_time_are_computed_elsewhere(network):
    before = network.counts()
    with network.weather(STALLED, network.to_prefill):
        seconds = calls(network, range(4000, 4012))
    assert not grown(network, before)["fetches_done"]
    assert PREFILL_TIMEOUT < max(seconds) < 3 * PREFILL_TIMEOUT + 5
    all_returned(network.prefill, network.decode)


def test_a_decode_engine_that_is_out_of_reach_for_a_while_answers_later(network):
    """It is not given up: who has waited for an answer so long would not have it sooner from anywhere else."""
    over = threading.Timer(2.0, lambda: setattr(network.to_decode, "weather", FAIR))
    with network.weather(STALLED, network.to_decode):
        over.start()
        seconds = calls(network, range(5000, 5006))
    assert min(seconds) > 1.5
    all_returned(network.prefill, network.decode)


class Trouble:
    """One kind of weather after the other until all calls are through, each at least once."""

    def __init__(self, network, seed):
        breaking = Weather(delay=0.002, breaks=0.06)
        kinds = {
            "all is slow": lambda: self.hold(1.0, SLOW, *network.relays),
            "connections break off": lambda: self.hold(1.5, breaking, *network.relays),
            "connectors do not hear each other": lambda: self.hold(2.0, STALLED, network.to_connector),
            "prefill is out of reach": lambda: self.hold(3.0, STALLED, network.to_prefill),
            "decode is out of reach": lambda: self.hold(1.0, STALLED, network.to_decode),
            "what is read stutters": self.stutter,
        }
        self.network, self.random, self.over = network, random.Random(seed), threading.Event()
        self.happened = []
        self.kinds = list(kinds.items())
        self.random.shuffle(self.kinds)
        self.thread = threading.Thread(target=self.go_on)

    def hold(self, seconds, weather, *relays):
        with self.network.weather(weather, *relays):
            time.sleep(seconds)

    def stutter(self):
        for _ in range(10):
            self.network.prefill.pause(self.random.uniform(0.05, 0.3))
            time.sleep(0.05)

    def go_on(self):
        while not self.over.is_set():
            name, happen = self.kinds[len(self.happened) % len(self.kinds)]
            happen()
            self.happened.append(name)
            self.over.wait(0.2)

    @property
    def all_kinds(self):
        return len(set(self.happened)) == len(self.kinds)


def test_answers_are_right_or_clear_errors_and_nothing_is_lost(network):
    trouble, before = Trouble(network, seed=0), network.counts()
    trouble.thread.start()
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            each = list(pool.map(lambda number: insist(network.url, number), range(CALLS)))
            while not trouble.all_kinds:
                each += pool.map(lambda number: insist(network.url, number), range(len(each), len(each) + CLIENTS))
    finally:
        trouble.over.set()
        trouble.thread.join()
    right_or_given_up(each)
    counts = grown(network, before)
    assert counts["fetches_done"] and counts["fetches_failed"] and any(relay.broken for relay in network.relays)
    all_returned(network.prefill, network.decode)
    before = network.counts()
    calls(network, range(6000, 6006))  # and it goes on
    assert grown(network, before)["fetches_done"]


ALONE = ["unshare", "--net", "--map-root-user"]  # without this machine's network


def test_a_network_that_is_gone_when_a_call_is_sent_is_noticed():
    """Of a peer that takes nothing the system alone would think for a quarter of an hour that it may come back."""
    if not (
        shutil.which("unshare") and shutil.which("ip") and subprocess.run([*ALONE, "true"], check=False).returncode == 0
    ):
        pytest.skip("no network namespaces here")
    environment = os.environ | {"PYTHONPATH": str(Path(lost_network.__file__).parents[1])}
    command = [*ALONE, sys.executable, "-P", lost_network.__file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    status, seconds = run.stdout.split()
    assert status == "503" and float(seconds) < 10
