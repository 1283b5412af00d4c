"""Engines in processes of their own that are killed, stopped and started again, clients that hang up, a new front.

Whatever happens, an answer is right or a clear error, and comes in bounded time; in the end nothing is held.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_processes import Process, all_returned, call, insist, right_or_given_up

from glmjax.serving.front import FrontOptions, Pair, build_front
from glmjax.serving.server import Server

CALLS, CLIENTS = 200, 6


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


@pytest.mark.slow
def test_answers_are_right_or_clear_errors_and_nothing_is_lost():
    chaos = Chaos(seed=0)
    over = threading.Event()
    trouble = threading.Thread(target=chaos.go_on, args=(over,))
    try:
        trouble.start()
        with ThreadPoolExecutor(CLIENTS) as pool:
            each = list(pool.map(lambda number: insist(chaos.front.url, number), range(CALLS)))
        while len(set(chaos.happened)) < 5:
            each.append(insist(chaos.front.url, len(each)))
        over.set()
        trouble.join()
        right_or_given_up(each)
        all_returned(chaos.prefill, chaos.decode)
        kind, _ = call(chaos.front.url, CALLS + 1)
        assert kind[0] == kind[1]  # and it goes on
    finally:
        over.set()
        trouble.join()
        chaos.close()
