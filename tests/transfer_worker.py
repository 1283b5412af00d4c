"""A prefill engine without a model, in a process of its own: ``transfer_worker.py JOB``, JSON lines in and out.

The job says what engine it is. A line read is a request to offer; it is answered with its ``kv_transfer_params``.
Leases that end are told as they do; the engine ends with its input.
"""

import json
import queue
import sys
import threading

from transfer_case import content, noise, peer, table_for, write

from glmjax.serving.clock import Clock
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.params import to_params


def say(**message):
    sys.stdout.write("@" + json.dumps(message) + "\n")
    sys.stdout.flush()


def main():
    job = json.loads(sys.argv[1])
    info = peer(**job["peer"])
    rows = noise(info, job["blocks"], 0)
    connector = make_connector(info, rows, Clock(), Settings(**job.get("settings", {})))
    lines = queue.SimpleQueue()

    def listen():
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=listen, daemon=True).start()
    say(ready=info.engine_id)
    while True:
        for lease in connector.collect():
            say(ended=lease.request_id, state=lease.state)
        connector.check()
        try:
            line = lines.get(timeout=0.01)
        except queue.Empty:
            continue
        if not line:
            break
        request = json.loads(line)
        tokens, seed = request["tokens"], request["seed"]
        table = table_for(info, tokens, job["blocks"], seed)
        write(info, rows, table, content(info, tokens, seed), range(tokens))
        say(offer=to_params(connector.offer(request["name"], table, tokens)))
    connector.close()
    for lease in connector.collect():
        say(ended=lease.request_id, state=lease.state)
    say(held=len(connector.held()), stats=connector.stats())


if __name__ == "__main__":
    main()
