"""A prefill and a decode engine in processes of their own, and one front before them, for ``serve``.

Each engine is a server on a port of this machine. It is started with a job on its standard input, answers with its URL,
and ends when that input does: with whoever started it, however that ends.
"""

import contextlib
import dataclasses
import glob
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import IO, Any

from glmjax.cli_log import LOGGER
from glmjax.errors import ConfigError, GlmjaxError
from glmjax.options import EngineOptions
from glmjax.serving.front import FrontOptions, Pair, build_front, one_pair
from glmjax.serving.server import Server

log = logging.getLogger(__name__)

CLOSE_SECONDS = 20


class EngineProcess:
    """An engine that serves in a process of its own.

    Attributes:
      url: where, once ``ready`` has returned.
    """

    def __init__(self, job: Mapping[str, Any], environment: Mapping[str, str]):
        self.role: str = job["options"]["role"]
        self.url = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "glmjax.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TTY_COMPATIBLE": "0", **environment},  # two progress bars would garble each other
            start_new_session=True,  # Ctrl-C is for who started it, who then closes it
        )
        asked = {**job, "log_level": logging.getLogger(LOGGER).getEffectiveLevel()}
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and ``ready`` says so
            self._input.write(json.dumps(asked) + "\n")
            self._input.flush()

    def ready(self) -> None:
        """Waits until it serves. GlmjaxError if it cannot, as it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with exit code {self.process.wait()}"}
        if "error" in answer:
            raise GlmjaxError(f"{self.role} engine: {answer['error']}")
        self.url = answer["url"]

    def close(self) -> None:
        """Asks it to end, and makes it."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        code = self.process.poll()
        return None if code is None else f"the {self.role} engine has ended with exit code {code}"

    @property
    def _input(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin


def start_pair(model: str, options: EngineOptions, http: Mapping[str, Any]) -> tuple[EngineProcess, EngineProcess]:
    """Starts both engines side by side and waits until they serve.

    Args:
      options: with ``prefill`` and ``decode``.
      http: keyword arguments of ``glmjax.serve`` for both: model name and key.

    Raises:
      GlmjaxError: one does not start, as it says; the other is ended then.
    """
    prefill, decode = options.prefill, options.decode
    assert prefill is not None and decode is not None
    devices = _gpus(prefill.num_devices, decode.num_devices)
    engines = []
    try:
        for role, visible in zip(("prefill", "decode"), devices, strict=True):
            job = {"model": model, "options": for_role(options, role), "http": dict(http)}
            environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
            engines.append(EngineProcess(job, environment))
        pool = ThreadPoolExecutor(len(engines))
        for ended in as_completed([pool.submit(engine.ready) for engine in engines]):
            ended.result()
    except BaseException:
        close_all(engines)  # which ends the threads that wait for them, too
        raise
    first, second = engines
    return first, second


def close_all(engines: Sequence[EngineProcess]) -> None:
    """Ends them side by side."""
    closing = [threading.Thread(target=engine.close) for engine in engines]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def serve_pair(
    model: str, host: str, port: int, options: EngineOptions, http: Mapping[str, Any], api_keys: Sequence[str]
) -> tuple[Server, Pair]:
    """Both engines, and a server before them that ends them when it closes."""
    engines = start_pair(model, options, http)
    pair = Pair(*(engine.url for engine in engines))
    front = FrontOptions(
        min_prefill_tokens=options.min_prefill_tokens, on_failure=options.kv_load_failure_policy, api_keys=api_keys
    )
    prefill, decode = engines
    told = threading.Event()

    def fault() -> str | None:
        if options.kv_load_failure_policy == "recompute" and prefill.ended and not told.is_set():
            told.set()
            log.error("%s: its prompts are computed by the decode engine from now on", prefill.ended)
        return decode.ended or (prefill.ended if options.kv_load_failure_policy == "fail" else None)

    try:
        app = build_front(one_pair(pair), front)
        server = Server(app, host, port, on_close=lambda: close_all(engines), fault=fault)
    except BaseException:
        close_all(engines)
        raise
    return server, pair


def for_role(options: EngineOptions, role: str) -> dict[str, Any]:
    """Options of one engine of a pair, ready for JSON."""
    own = options.of_engine(role)
    names = {field.name for field in dataclasses.fields(own)} - {"prefill", "decode"}
    return {name: getattr(own, name) for name in sorted(names)} | {"layout": str(own.layout)}


def _gpus(*counts: int) -> list[list[str] | None]:
    """The GPUs that each engine sees; None where none are used. ConfigError if there are too few."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    found = len(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))) or given in ("", "-1"):
        return [None] * len(counts)
    names = [str(n) for n in range(found)] if given is None else [n for n in given.split(",") if n]
    if len(names) < sum(counts):
        raise ConfigError(
            f"two engines need {sum(counts)} GPUs, and this process sees {len(names)} ({', '.join(names)}): let one "
            "process serve both layouts with connector='local', or set JAX_PLATFORMS=cpu to simulate devices"
        )
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [names[end - count : end] for end, count in zip(ends, counts, strict=True)]
