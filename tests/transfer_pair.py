"""Two engines in one process, on a clock that stands still, and a request that one has and the other wants."""

from transfer_case import clone, content, noise, peer, same, table_for, write

from glmjax.serving.clock import ManualClock
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.local import LocalConnector

TOKENS = 37
BLOCKS = 24
PREFILL = {"dcp": 4, "interleave": 2}


class Pair:
    """Two engines with random memories, and a request of 37 tokens in the first."""

    def __init__(self, prefill=PREFILL, decode=None, consumer=LocalConnector, **settings):
        self.clock, self.hub = ManualClock(), {}
        self.settings = Settings(**{"inline": True, "piece_bytes": 1} | settings)
        self.p, self.d = peer("p", **prefill), peer("d", **decode or {})
        self.rows, self.mine = noise(self.p, BLOCKS, 0), noise(self.d, BLOCKS, 1)
        self.producer = make_connector(self.p, self.rows, self.clock, self.settings, self.hub)
        self.consumer = consumer(self.d, self.mine, self.clock, self.settings, self.hub)
        self.values = content(self.p, TOKENS, 2)
        self.table, self.into = table_for(self.p, TOKENS, BLOCKS, 3), table_for(self.d, TOKENS, BLOCKS, 4)
        write(self.p, self.rows, self.table, self.values, range(TOKENS))
        self.before = clone(self.mine)

    def offer(self, name="r"):
        return self.producer.offer(name, self.table, TOKENS)

    def expected(self, first=0, last=TOKENS):
        rows = clone(self.before)
        write(self.d, rows, self.into, self.values, range(first, last))
        return rows

    def ends(self):
        for connector in (self.producer, self.consumer):
            connector.check()
        return [(lease.request_id, lease.state) for lease in self.producer.collect()]

    def refused(self, fetch, message):
        """Nothing was moved, the message is clear, and the producer holds nothing after its lease."""
        assert fetch.poll() == "failed"
        assert isinstance(fetch.error, TransferError)
        assert message in str(fetch.error), fetch.error
        assert fetch.bytes_moved == 0
        assert same(self.mine, self.before)
        self.nothing_is_left()

    def nothing_is_left(self):
        self.clock.advance(self.settings.lease_seconds)
        self.ends()
        assert self.producer.held() == []
        assert self.consumer.stats()["fetches_running"] == 0
