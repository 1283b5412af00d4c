"""Engines from options: what two of them in one process agree on before either is built."""

import jax
import pytest
import small_model

import glmjax.memory
from glmjax import engines
from glmjax.memory import GIB, block_bytes
from glmjax.options import engine_options


class BuiltError(Exception):
    """Both engines would be there now."""


def sizes_of_a_pair(monkeypatch, tmp_path, free, **options):
    """What each engine of a pair on one device is given, when memory shrinks as they are built."""
    found = []

    def build(*_, sizes, peers, **__):
        found.append(sizes)
        free[0] /= 4
        if len(found) == 2:
            raise BuiltError

    monkeypatch.setattr(glmjax.memory, "_free_bytes", lambda devices, count: free[0])
    monkeypatch.setattr(engines, "build_engine", build)
    monkeypatch.setattr(engines, "_load", lambda *_: (small_model.CONFIG, None))
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    with pytest.raises(BuiltError):
        engines.build_pair(tmp_path, None, engine_options(prefill="dp=1", decode="dp=1", **options), ())
    return found


def test_both_have_their_stage_in_memory_of_one_kind_and_share_a_device(monkeypatch, tmp_path):
    for gib in (0.001, 0.004, 0.016, 0.064):
        first, second = sizes_of_a_pair(monkeypatch, tmp_path, [gib * GIB], max_num_seqs=1000)
        assert first == second


def test_one_that_has_no_room_on_the_device_brings_both_to_the_host(monkeypatch, tmp_path):
    one = block_bytes(small_model.CONFIG, engine_options(block_size=8))
    for blocks, on_device in ((1000, True), (16, False)):  # for each engine; the longest request has 8
        found = sizes_of_a_pair(monkeypatch, tmp_path, [2.0 * blocks * one], max_model_len=64, block_size=8)
        assert [sizes.stage.on_device for sizes in found] == [on_device, on_device]
