"""An engine without a model, in a process of its own: ``transfer_worker.py JOB``, JSON lines in and out.

The job says what engine it is. A line read is a request to offer, answered with its ``kv_transfer_params``; or such
params to fetch, answered when all is there or, if it is to hang, when rows are on their way and for ever after. Leases
that end are told as they do; the engine ends with its input.
"""

import json
import queue
import sys
import threading

from transfer_case import clone, content, noise, peer, same, table_for, write
from transfer_on_devices import on_devices, refill

from glmjax.serving.clock import Clock
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.job import Guard, Settings
from glmjax.serving.transfer.params import from_params, to_params


def say(**message):
    sys.stdout.write("@" + json.dumps(message) + "\n")
    sys.stdout.flush()


def fetch(connector, fetch, seed, hang):
    """Fetches into the first blocks of memory on the host and says whether the rows are right."""
    offer, info = from_params(fetch), connector.info
    if hang:
        Guard.pause = lambda guard: (say(reading=offer.request_id), threading.Event().wait())
    table = range(-(-offer.num_tokens // info.entry_tokens))
    expected = clone(connector.rows)
    write(info, expected, table, content(info, offer.num_tokens, seed), range(offer.num_tokens))
    state = connector.fetch(offer, table).wait(60)
    say(fetched=offer.request_id, state=state, right=same(connector.rows, expected))


def main():
    job = json.loads(sys.argv[1])
    info = peer(**job["peer"])
    rows = noise(info, job["blocks"], 0)
    on_device = on_devices(rows, 0, info) if job.get("on_device") else None
    connector = make_connector(
        info, rows if on_device is None else on_device, Clock(), Settings(**job.get("settings", {}))
    )
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
        if "fetch" in request:
            fetch(connector, **request)
            continue
        tokens, seed = request["tokens"], request["seed"]
        table = request.get("table") or table_for(info, tokens, job["blocks"], seed)
        write(info, rows, table, content(info, tokens, seed), range(tokens))
        if on_device is not None:
            refill(on_device, rows)
        say(offer=to_params(connector.offer(request["name"], table, tokens)))
    connector.close()
    for lease in connector.collect():
        say(ended=lease.request_id, state=lease.state)
    say(held=len(connector.held()), stats=connector.stats())


if __name__ == "__main__":
    main()
