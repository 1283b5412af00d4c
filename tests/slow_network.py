"""A relay between two programs that talk over TCP, which delays, throttles, stalls and breaks off as it is told."""

import asyncio
import dataclasses
import random
import threading

PIECE = 1024  # bytes that are passed on together


@dataclasses.dataclass(frozen=True)
class Weather:
    """How the network is.

    Attributes:
      delay: seconds for a piece of up to ``PIECE`` bytes, either way.
      bytes_per_second: of a connection, either way.
      breaks: probability for each piece that half of it arrives and the connection is reset.
      stalled: nothing arrives; what is sent meanwhile arrives later.
    """

    delay: float = 0.0
    bytes_per_second: float = 1e9
    breaks: float = 0.0
    stalled: bool = False


FAIR = Weather()


class Relay:
    """Listens on ``port`` of this machine and passes connections on to port ``behind``, in whatever ``weather`` it is.

    Attributes:
      pieces: that it has passed on.
      broken: connections that it has broken off.
    """

    def __init__(self, seed):
        self.weather, self.behind = FAIR, 0
        self.pieces = self.broken = 0
        self._random = random.Random(seed)
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        ready.wait()

    async def _serve(self, ready):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=PIECE)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _connected(self, reader, writer):
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.behind, limit=PIECE)
        except OSError:
            writer.transport.abort()
            return
        ends = writer, far_writer
        await asyncio.gather(self._pass_on(reader, far_writer, ends), self._pass_on(far_reader, writer, ends))
        for end in ends:
            end.close()

    async def _pass_on(self, reader, writer, ends):
        try:
            while piece := await reader.read(PIECE):
                await asyncio.sleep(self.weather.delay + len(piece) / self.weather.bytes_per_second)
                await self._while_stalled()
                if self._random.random() < self.weather.breaks:
                    self.broken += 1
                    writer.write(piece[: len(piece) // 2])
                    await writer.drain()
                    raise ConnectionResetError
                self.pieces += 1
                writer.write(piece)
                await writer.drain()
            await self._while_stalled()
            writer.write_eof()
        except OSError:
            for end in ends:
                end.transport.abort()

    async def _while_stalled(self):
        while self.weather.stalled:
            await asyncio.sleep(0.02)
