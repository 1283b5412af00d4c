"""The verbs of a connector, in one process and on a clock that stands still."""

import contextlib
import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_case import clone, noise, peer, same, write
from transfer_pair import BLOCKS, PREFILL, TOKENS, Pair

from glmjax.errors import ConfigError
from glmjax.serving.clock import Clock
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.local import LocalConnector


def test_rows_are_fetched_and_the_lease_ends():
    pair = Pair()
    offer = pair.offer()
    assert (offer.engine_id, offer.num_tokens, offer.dcp, offer.lease_seconds) == ("p", TOKENS, 4, 30.0)
    fetch = pair.consumer.fetch(offer, pair.into)
    assert (fetch.poll(), fetch.error) == ("done", None)
    assert same(pair.mine, pair.expected())
    assert fetch.bytes_moved == TOKENS * pair.p.token_bytes
    assert pair.ends() == [("r", "done")]
    assert pair.producer.stats()["leases_done"] == 1
    assert pair.consumer.stats()["bytes_fetched"] == fetch.bytes_moved


@given(
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, TOKENS),
    st.integers(0, 2),
)
def test_any_sharding_to_any_other_behind_any_prefix(dcp, interleave, to_dcp, to_interleave, first, group):
    pair = Pair({"dcp": dcp, "interleave": interleave}, {"dcp": to_dcp, "interleave": to_interleave, "dp": 3})
    rows = clone(pair.before)
    write(pair.d, rows, pair.into, pair.values, range(first, TOKENS), group)
    fetch = pair.consumer.fetch(pair.offer(), pair.into, first=first, group=group)
    assert fetch.poll() == "done", fetch.error
    assert same(pair.mine, rows)
    assert fetch.bytes_moved == (TOKENS - first) * pair.d.token_bytes
    assert pair.ends() == [("r", "done")]


def test_all_here_already_moves_nothing_and_frees_the_producer():
    pair = Pair(decode={"kv_cache_dtype": "float32"})  # not even hands are shaken
    fetch = pair.consumer.fetch(pair.offer(), pair.into, first=TOKENS)
    assert (fetch.poll(), fetch.bytes_moved) == ("done", 0)
    assert same(pair.mine, pair.before)
    assert pair.ends() == [("r", "done")]


def test_chunks_are_fetched_under_one_lease():
    pair = Pair()
    offer = pair.offer()
    for first, last in ((0, 11), (11, 12), (12, TOKENS)):
        assert pair.ends() == []
        fetch = pair.consumer.fetch(offer, pair.into, first=first, last=last, final=last == TOKENS)
        assert fetch.poll() == "done", fetch.error
        assert same(pair.mine, pair.expected(0, last))
    assert pair.ends() == [("r", "done")]


def test_without_a_thread_of_its_own_a_fetch_would_block():
    pair = Pair(inline=False, timeout=60.0)
    fetch = pair.consumer.fetch(pair.offer(), pair.into)
    assert fetch.wait(60) == "done", fetch.error
    assert same(pair.mine, pair.expected())
    pair.consumer.close()


OTHER = [("kv_cache_dtype", "bfloat16"), ("model", "large"), ("speculation", False), ("glmjax_version", "9")]


@pytest.mark.parametrize(("field", "value"), OTHER)
def test_another_kind_of_engine_is_refused_before_any_byte_moves(field, value):
    pair = Pair(decode={field: value})
    message = f"engine d cannot exchange KV with p: {field} is {value!r} at d and {getattr(pair.p, field)!r} at p"
    pair.refused(pair.consumer.fetch(pair.offer(), pair.into), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": "never"}, "request 'never' is not on offer: its lease is unknown"),
        ({"engine_id": "gone"}, "no engine gone in this process"),
        ({"blocks": (0, 1, 2, 3, 4)}, "is offered as"),
        ({"num_tokens": TOKENS - 1}, "is offered as"),
        ({"group": 1}, "is offered as"),
        ({"dcp": 1}, "is offered as"),
    ],
)
def test_an_offer_that_the_producer_did_not_make_is_refused(change, message):
    """It has passed through a client: changed block ids would read other requests' rows."""
    pair = Pair()
    pair.refused(pair.consumer.fetch(dataclasses.replace(pair.offer(), **change), pair.into), message)


def test_a_producer_that_was_restarted_is_another():
    pair = Pair()
    offer = pair.offer()
    assert pair.consumer.fetch(offer, pair.into, last=1, final=False).poll() == "done"
    pair.before = clone(pair.mine)
    pair.producer.close()
    assert pair.ends() == [("r", "failed")]
    again = make_connector(peer("p2", **PREFILL), pair.rows, pair.clock, pair.settings, pair.hub)
    pair.hub["p"] = again  # at the old one's address
    pair.refused(pair.consumer.fetch(offer, pair.into), "engine p is not here, but p2: restarted?")


def test_done_failed_and_withdraw_free_the_blocks():
    pair = Pair()
    done, failed, withdrawn, kept = (pair.offer(name) for name in "abcd")
    for _ in range(2):  # a second time is harmless
        pair.consumer.done(done)
        pair.consumer.failed(failed, "aborted")
    pair.consumer.done(dataclasses.replace(done, engine_id="gone"))
    assert pair.producer.withdraw(withdrawn.request_id)
    assert pair.ends() == [("a", "done"), ("b", "failed"), ("c", "failed")]
    assert pair.producer.held() == [kept.blocks]


def test_one_that_is_read_cannot_be_withdrawn():
    pair = Pair()
    offer = pair.offer()
    pair.consumer.fetch(offer, pair.into, last=4, final=False)
    assert not pair.producer.withdraw("r")
    assert pair.consumer.fetch(offer, pair.into, first=4).poll() == "done"
    assert not pair.producer.withdraw("r")


def test_arguments_of_ones_own_are_errors_at_once():
    pair = Pair(decode={"dp": 2})
    offer = pair.offer()
    for arguments, message in (
        ({"last": TOKENS + 1}, "within 0 .. 37, got 0 .. 38"),
        ({"first": 5, "last": 4}, "got 5 .. 4"),
        ({"blocks": pair.into[:-1]}, "do not hold 37 tokens"),
        ({"blocks": [BLOCKS] * 10}, "block ids of mla must be in"),
        ({"group": 2}, r"group must be in \[0, 2\), got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.consumer.fetch(offer, arguments.pop("blocks", pair.into), **arguments)
    for arguments, message in (
        (("s", pair.table, 97), "do not hold 97 tokens"),
        (("s", [BLOCKS], 1), "block ids of mla must be in"),
        (("s", pair.table, TOKENS, 1), r"group must be in \[0, 1\)"),
        (("r", pair.table, TOKENS), "was offered before"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.producer.offer(*arguments)
    assert pair.producer.held() == [offer.blocks]


def test_closing_is_final_and_leaves_nothing():
    pair = Pair(inline=False)
    offer = pair.offer()
    pair.consumer.close()
    with pytest.raises(ValueError, match="is closed"):
        pair.consumer.fetch(offer, pair.into)
    pair.producer.close()
    pair.producer.close()
    assert pair.ends() == [("r", "failed")]
    with pytest.raises(ValueError, match="is closed"):
        pair.offer("s")
    assert pair.hub == {}


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12._api", None)
    info = peer("x", connector="nixl")
    with pytest.raises(ConfigError, match=r"connector 'nixl' needs NIXL .*: pip install --no-deps nixl-cu12==1\.5\.1"):
        make_connector(info, noise(info, 2, 0), Clock())


def test_unknown_kinds_are_refused():
    pair = Pair()
    with pytest.raises(ConfigError, match="connector must be one of local, nixl, jax, got 'carrier pigeon'"):
        make_connector(peer("x", connector="carrier pigeon"), pair.mine, pair.clock)
    with pytest.raises(ConfigError, match="connector must be 'local' for this engine, got 'jax'"):
        LocalConnector(peer("x", connector="jax"), pair.mine, pair.clock, pair.settings, {})


def test_the_real_clock_runs_too():
    with contextlib.closing(make_connector(peer("x"), noise(peer("x"), 2, 0), Clock())) as connector:
        connector.offer("r", [0], 4)
        assert connector.collect() == ()
        connector.check()
