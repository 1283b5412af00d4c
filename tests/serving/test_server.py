"""A server that closes while it answers."""

import json
import threading

import httpx
from engine_servers import make_engine, start_server


def events_of(server, first):
    """The events of a stream that would take half a minute; ``first`` is set once there is one."""
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "temperature": 0, "stream": True}
    found = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
                first.set()
    return found


def test_a_stream_that_outlives_the_grace_period_ends_as_aborted_and_without_a_fault(caplog):
    server = start_server(make_engine("one", None, delay=0.08), grace_s=1)
    first, found = threading.Event(), []
    client = threading.Thread(target=lambda: found.extend(events_of(server, first)))
    client.start()
    assert first.wait(20)
    server.close()
    client.join()
    assert found[-1] == "[DONE]"
    assert json.loads(found[-2])["choices"][0]["finish_reason"] == "abort"
    assert len(found) < 100
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
