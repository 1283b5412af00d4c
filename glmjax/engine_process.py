"""An engine's own process, as ``processes`` starts it: ``python -m glmjax.engine_process``, a job on standard input.

It answers with the URL that it serves on, or with an error, on standard output, and ends when its input does.
"""

import json
import logging
import os
import sys
import threading
from typing import Any

from glmjax.cli_log import lines_on_stderr
from glmjax.errors import GlmjaxError
from glmjax.sharding.layout import Layout

log = logging.getLogger("glmjax.engine_process")  # this is __main__


def main() -> None:
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    job = json.loads(sys.stdin.readline())
    serving, over = threading.Event(), threading.Event()
    threading.Thread(target=_end_with_input, args=(serving, over), daemon=True).start()
    with lines_on_stderr(job["log_level"], f"{job['options']['role']} engine: "):
        try:
            server = _serve(job)
        except GlmjaxError as error:
            _say(reply, error=str(error))
            raise SystemExit(2) from None
        serving.set()
        _say(reply, url=server.url)
        while not over.wait(1.0):
            if fault := server.fault():
                log.error("%s", fault)
                break
        server.close()
    raise SystemExit(1 if server.fault() else 0)


def _serve(job: dict[str, Any]) -> Any:
    import jax

    from glmjax import api

    count = Layout.parse(job["options"]["layout"]).num_devices
    if count > 1 and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    return api.serve(job["model"], port=0, block=False, **job["http"], **job["options"])


def _end_with_input(serving: threading.Event, over: threading.Event) -> None:
    """Whoever started this has ended, or wants this to end: in order, or at once while it loads and compiles."""
    sys.stdin.read()
    over.set()
    if not serving.is_set():
        os._exit(1)


def _say(reply: Any, **message: str) -> None:
    reply.write(json.dumps(message) + "\n")
    reply.flush()


if __name__ == "__main__":
    main()
