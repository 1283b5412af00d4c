"""A front whose network is gone when it sends a call, in a network namespace of its own: ``unshare --net`` runs it.

Prints the status of the answer and the seconds that it took, with the limits of the system's patience shortened.
"""

import asyncio
import socket
import subprocess
import threading
import time

import httpx

from glmjax.serving import front
from glmjax.serving.front import FrontOptions, Pair, build_front, one_pair

QUICK = {
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 2,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 3000,
}


def network(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def answer_once(listening):
    """Answers the first call and keeps the connection."""
    connection, _ = listening.accept()
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    connection.recv(1 << 16)


async def main():
    front._KEEP_ALIVE = tuple(
        (level, name, QUICK.get((level, name), value)) for level, name, value in front._KEEP_ALIVE
    )
    network("up")
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer_once, args=(listening,), daemon=True).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    app = build_front(one_pair(Pair(url, url)), FrontOptions())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front", timeout=None) as client:
        assert (await client.get("/v1/models")).text == "ok"
        network("down")
        began = time.monotonic()
        async with asyncio.timeout(20):
            answer = await client.post("/tokenize", json={"prompt": "a"})
        print(answer.status_code, time.monotonic() - began)


if __name__ == "__main__":
    asyncio.run(main())
