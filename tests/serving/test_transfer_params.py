"""Who may exchange KV with whom, and offers as ``kv_transfer_params``."""

import dataclasses
import json

import pytest
from transfer_case import peer

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError, RequestError
from glmjax.serving.transfer.interface import (
    INDEX,
    MLA,
    MUST_MATCH,
    PROTOCOL,
    Offer,
    PeerInfo,
    check_compatible,
    fingerprint,
)
from glmjax.serving.transfer.memory import describe, memory
from glmjax.serving.transfer.params import asks_for_offer, from_params, to_params
from glmjax.sharding.relayout import KVSharding

MINE = peer("d")
OTHER = {
    "protocol": PROTOCOL + 1,
    "glmjax_version": "0.2.0",
    "connector": "nixl",
    "model": "large",
    "kv_cache_dtype": "bfloat16",
    "speculation": False,
    "layers": 4,
    "indexers": 3,
    "mla_row_bytes": 24,
    "index_row_bytes": 16,
}
FREE = {"engine_id": "p", "block_size": 16, "dcp": 8, "interleave": 16, "dp": 4}


def test_every_field_is_either_checked_or_free():
    fields = {field.name for field in dataclasses.fields(PeerInfo)}
    assert set(OTHER) == set(MUST_MATCH)
    assert fields == set(MUST_MATCH) | set(FREE)


@pytest.mark.parametrize("field", MUST_MATCH)
def test_a_peer_that_differs_is_refused_by_name(field):
    theirs = dataclasses.replace(MINE, engine_id="p", **{field: OTHER[field]})
    with pytest.raises(ConfigError) as error:
        check_compatible(MINE, theirs)
    mine, other = getattr(MINE, field), OTHER[field]
    assert str(error.value) == f"engine p cannot exchange KV with d: {field} is {other!r} at p and {mine!r} at d"


def test_layouts_may_differ_but_must_be_possible():
    check_compatible(MINE, dataclasses.replace(MINE, **FREE))
    with pytest.raises(ConfigError, match="interleave"):
        check_compatible(MINE, dataclasses.replace(MINE, dcp=2, interleave=3))


def test_fingerprint_is_of_what_makes_the_rows():
    config = GLMConfig.glm_5_3()
    same = dataclasses.replace(config, eos_token_ids=(7,), max_position_embeddings=4096)
    assert fingerprint(config) == fingerprint(same)
    changed = [
        dataclasses.replace(config, **x) for x in ({"rope_theta": 1e4}, {"index_topk": 64}, {"mla_norm_eps": 1e-6})
    ]
    assert len({fingerprint(c) for c in (config, *changed)} | {fingerprint(config, "other weights")}) == 5


@pytest.mark.parametrize("speculation", [False, True])
def test_an_engine_describes_itself_by_its_memory(speculation):
    import numpy as np

    config = GLMConfig.glm_5_3()
    layers, indexers = config.num_hidden_layers + speculation, config.num_full_indexers + speculation
    rows = memory([np.zeros((layers, 4, 656), np.uint8)] * 4, [np.zeros((indexers, 4, 132), np.uint8)] * 4)
    options = {"engine_id": "p", "connector": "jax", "kv_cache_dtype": "fp8_ds_mla"}
    info = describe(config, rows, KVSharding(2, 1, 4), speculation=speculation, dp=2, **options)
    assert (info.layers, info.indexers, info.dcp, info.dp) == (layers, indexers, 2, 2)
    assert info.entry_tokens == 8
    if speculation:
        assert info.token_bytes == 54728
    with pytest.raises(ConfigError, match="region mla"):
        describe(config, rows, KVSharding(2, 1, 4), speculation=not speculation, dp=2, **options)
    assert set(rows) == {MLA, INDEX}


OFFER = Offer(
    engine_id="p-1", request_id="req-7#3", blocks=(5, 0, 9), num_tokens=70, group=1, dcp=8, host="10.0.0.1", port=5600,
    lease_seconds=12.5,
)  # fmt: skip


def test_params_are_json_and_come_back_as_the_offer():
    params = json.loads(json.dumps(to_params(OFFER)))
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert params["remote_block_ids"] == [[5, 0, 9]]
    assert params["tp_size"] == 8
    assert from_params(params) == OFFER
    assert from_params(params | {"remote_block_ids": [5, 0, 9], "remote_blocks_expiry_time": 1.5}) == OFFER


def test_what_a_router_sends_first():
    null = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    first = {"do_remote_decode": True, "do_remote_prefill": False, **null}
    assert asks_for_offer(first)
    assert from_params(first) is None
    for nothing in (None, {}, {"do_remote_decode": False}, {"do_remote_prefill": None}):
        assert not asks_for_offer(nothing)
        assert from_params(nothing) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_remote_decode": True}, "exclude each other"),
        ({"do_remote_prefill": "yes"}, "must be booleans, got 'yes'"),
        ({"remote_engine_id": None}, "remote_engine_id must be a string that is not empty, got None"),
        ({"remote_request_id": 7}, "remote_request_id must be a string that is not empty, got 7"),
        ({"remote_num_tokens": None}, "remote_num_tokens must be a whole number"),
        ({"remote_num_tokens": 0}, "remote_num_tokens must be a whole number"),
        ({"remote_num_tokens": True}, "remote_num_tokens must be a whole number"),
        ({"remote_block_ids": None}, "remote_block_ids must be a list of block ids"),
        ({"remote_block_ids": [[1], [2]]}, "remote_block_ids must be a list of block ids"),
        ({"remote_block_ids": [1, -1]}, "remote_block_ids must be a list of block ids"),
        ({"remote_block_ids": [[1.5]]}, "remote_block_ids must be a list of block ids"),
        ({"remote_port": 70000}, "remote_port must be a whole number in"),
        ({"remote_dp_rank": -1}, "remote_dp_rank must be a whole number"),
        ({"dcp_size": 0}, "dcp_size must be a whole number"),
        ({"remote_lease_seconds": float("nan")}, "remote_lease_seconds must be a positive number of seconds"),
        ({"remote_host": 4}, "remote_host must be a string"),
    ],
)
def test_params_that_are_wrong_are_refused_by_name(change, message):
    with pytest.raises(RequestError, match=message) as error:
        from_params(to_params(OFFER) | change)
    assert error.value.param == "kv_transfer_params"


def test_params_must_be_an_object():
    with pytest.raises(RequestError, match="must be an object, got list"):
        asks_for_offer([])
