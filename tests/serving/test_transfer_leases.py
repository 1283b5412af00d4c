"""Leases of offered blocks: each ends once, whatever is said of it, how often and how late."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.leases import LeaseBook

SECONDS = 30.0


def offered(*names, now=0.0):
    book = LeaseBook(SECONDS)
    for name in names:
        book.offer(name, [1, 2], 7, 0, now)
    return book


def ends(book, now):
    return [(lease.request_id, lease.state) for lease in book.collect(now)]


def test_a_lease_that_is_read_is_given_back_once():
    book = offered("a")
    lease = book.begin("a", 5.0)
    assert (lease.state, lease.blocks, lease.num_tokens, lease.deadline) == ("fetching", (1, 2), 7, 35.0)
    assert list(book.held()) == [(1, 2)]
    assert book.done("a", 6.0) == "done"
    assert list(book.held()) == [(1, 2)], "the engine does not know yet"
    assert ends(book, 6.0) == [("a", "done")]
    assert (ends(book, 6.0), list(book.held())) == ([], [])


def test_it_expires_at_its_deadline_noticed_or_not():
    assert ends(offered("a"), 29.9) == []
    assert ends(offered("a"), 30.0) == [("a", "expired")]
    book = offered("a")
    assert book.done("a", 30.0) == "expired", "what was read since may be another request's"
    with pytest.raises(TransferError, match="'a' is not on offer: its lease is expired"):
        offered("a").begin("a", 30.0)


def test_heartbeats_extend_and_never_shorten():
    book = offered("a")
    assert book.heartbeat("a", 20.0) == "offered"
    assert ends(book, 49.9) == []
    assert book.heartbeat("a", 10.0) == "offered", "a message that comes late"
    assert ends(book, 49.9) == []
    assert ends(book, 50.0) == [("a", "expired")]


def test_late_and_repeated_words_change_nothing():
    book = offered("a")
    assert book.fail("a", 1.0) == "failed"
    for collected in (False, True):
        assert [book.done("a", 2.0), book.fail("a", 2.0), book.heartbeat("a", 2.0)] == ["failed"] * 3
        if not collected:
            assert ends(book, 2.0) == [("a", "failed")]
    assert ends(book, 99.0) == []
    assert book.done("never", 2.0) == "unknown"
    book.check()


def test_withdrawn_unless_it_is_being_read():
    book = offered("a", "b")
    book.begin("b", 1.0)
    assert (book.withdraw("a", 2.0), book.withdraw("b", 2.0), book.withdraw("c", 2.0)) == (True, False, False)
    assert ends(book, 2.0) == [("a", "failed")]


def test_a_name_is_offered_once():
    book = offered("a")
    for _ in range(2):
        with pytest.raises(ValueError, match="'a' was offered before"):
            book.offer("a", [3], 1, 0, 0.0)
        book.done("a", 0.0)
        book.collect(0.0)


def test_the_past_is_remembered_so_far_and_no_further():
    book = LeaseBook(SECONDS, remembered=2)
    for name in "abc":
        book.offer(name, [0], 1, 0, 0.0)
        book.done(name, 0.0)
    book.collect(0.0)
    assert [book.state(name) for name in "abc"] == ["unknown", "done", "done"]
    book.check()


def test_closing_ends_all():
    book = offered("a", "b")
    book.begin("a", 1.0)
    book.end_all()
    assert ends(book, 1.0) == [("a", "failed"), ("b", "failed")]
    book.check()


def test_check_sees_a_lost_lease():
    book = offered("a", "b")
    del book._live["a"]
    with pytest.raises(AssertionError, match="a lease is lost"):
        book.check()


NAMES = st.sampled_from([f"r{n}" for n in range(8)])


class Leases(RuleBasedStateMachine):
    """Any words in any order, against a dictionary of deadlines."""

    def __init__(self):
        super().__init__()
        self.book, self.now = LeaseBook(SECONDS), 0.0
        self.deadline, self.end, self.reading, self.collected = {}, {}, set(), []

    def live(self, name):
        return name in self.deadline and name not in self.end

    def pass_time(self):
        for name in self.deadline:
            if self.live(name) and self.deadline[name] <= self.now:
                self.end[name] = "expired"

    def known(self, name):
        if name in self.end:
            return self.end[name]
        return "unknown" if name not in self.deadline else "fetching" if name in self.reading else "offered"

    @rule(name=NAMES)
    def offer(self, name):
        if name in self.deadline:
            with pytest.raises(ValueError):
                self.book.offer(name, [1], 1, 0, self.now)
        else:
            self.book.offer(name, [len(self.deadline)], 1, 0, self.now)
            self.deadline[name] = self.now + SECONDS

    @rule(seconds=st.sampled_from([0.0, 1.0, 14.0, 29.0, 30.0, 31.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(name=NAMES)
    def begin(self, name):
        self.pass_time()
        if self.live(name):
            self.book.begin(name, self.now)
            self.reading.add(name)
            self.deadline[name] = self.now + SECONDS
        else:
            with pytest.raises(TransferError):
                self.book.begin(name, self.now)

    @rule(name=NAMES)
    def heartbeat(self, name):
        self.pass_time()
        if self.live(name):
            self.deadline[name] = self.now + SECONDS
        assert self.book.heartbeat(name, self.now) == self.known(name)

    @rule(name=NAMES, how=st.sampled_from(["done", "failed"]))
    def finish(self, name, how):
        self.pass_time()
        if self.live(name):
            self.end[name] = how
        verb = self.book.done if how == "done" else self.book.fail
        assert verb(name, self.now) == self.known(name)

    @rule(name=NAMES)
    def withdraw(self, name):
        self.pass_time()
        may = self.live(name) and name not in self.reading
        if may:
            self.end[name] = "failed"
        assert self.book.withdraw(name, self.now) == may

    @rule()
    def collect(self):
        self.pass_time()
        found = self.book.collect(self.now)
        self.collected += [lease.request_id for lease in found]
        assert {lease.request_id: lease.state for lease in found}.items() <= self.end.items()
        assert sorted(self.collected) == sorted(self.end), "each once"

    @precondition(lambda self: self.deadline)
    @rule()
    def close(self):
        self.pass_time()
        self.book.expire(self.now)
        self.book.end_all()
        self.end |= {name: "failed" for name in self.deadline if self.live(name)}

    @invariant()
    def law(self):
        self.book.check()
        assert len(list(self.book.held())) == len(self.deadline) - len(self.collected)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
