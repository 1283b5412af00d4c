"""Sizes of KV pools: as told, or what memory holds, and errors before anything is allocated."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import CONFIG

import glmjax.pool_sizes
from glmjax.cache import abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.memory import GIB, device_budget
from glmjax.options import engine_options
from glmjax.params import num_bytes
from glmjax.pool_sizes import device_blocks, pool_sizes

GLM = GLMConfig.glm_5_3()


@pytest.fixture
def large_host(monkeypatch):
    monkeypatch.setattr(glmjax.pool_sizes, "available_bytes", lambda: 2048.0 * GIB)


@given(
    gib=st.none() | st.floats(1e-4, 0.1),
    max_num_seqs=st.integers(1, 64),
    block_size=st.sampled_from([1, 8, 64]),
    max_model_len=st.integers(2, 512),
    cache_dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_pool_is_as_large_as_memory_allows_and_sequences_need(
    gib, max_num_seqs, block_size, max_model_len, cache_dtype
):
    options = engine_options(
        kv_cache_gib=gib, max_num_seqs=max_num_seqs, block_size=block_size, kv_cache_dtype=cache_dtype
    )
    budget = device_budget(options, jax.devices()[:1])
    blocks = device_blocks(CONFIG, options, max_model_len, budget)
    enough = max_num_seqs * math.ceil(max_model_len / block_size)
    one = num_bytes(abstract_cache(CONFIG, 0, block_size, cache_dtype))  # the spare block alone
    assert 1 <= blocks <= enough
    if gib is not None:
        assert blocks == 1 or blocks * one <= gib * GIB
        assert blocks == enough or (blocks + 1) * one > gib * GIB


def test_num_device_blocks_is_taken_as_told():
    assert device_blocks(CONFIG, engine_options(num_device_blocks=7), 512, 1.0) == 7


def hisparse(**options):
    return engine_options(
        **{"dtype": "bfloat16", "num_speculative_tokens": 3, "num_device_blocks": 4000, "max_num_seqs": 8, **options}
    )


def test_48_gib_admit_as_many_tokens_as_vllm_says(large_host):
    """spec/system.md 1.3."""
    sizes = pool_sizes(GLM, hisparse(hisparse_host_gib=48))
    assert (sizes.num_blocks, sizes.max_model_len) == (15_539, 994_368)
    assert sizes.offload.region_pages * 64 == 10_240


def test_a_million_tokens_need_more_and_the_error_says_how_much(large_host):
    with pytest.raises(ConfigError, match=r"=1048576 needs 16386, which are 50\.62 GiB: raise hisparse_host_gib"):
        pool_sizes(GLM, hisparse(hisparse_host_gib=48, max_model_len=1_048_576))
    assert pool_sizes(GLM, hisparse(hisparse_host_gib=50.62, max_model_len=1_048_576)).num_blocks >= 16_386


def test_a_pool_of_more_than_95_percent_of_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(glmjax.pool_sizes, "available_bytes", lambda: 50.0 * GIB)
    assert pool_sizes(GLM, hisparse(hisparse_host_gib=47))
    with pytest.raises(ConfigError, match=r"host pools of 48\.0 GiB .* are more than 95% of the 50\.0 GiB"):
        pool_sizes(GLM, hisparse(hisparse_host_gib=48))


def test_the_buffer_holds_every_query_s_selection(large_host):
    with pytest.raises(ConfigError, match=r"hisparse_buffer=8191 does not hold the 2048 rows .* give at least 8192"):
        pool_sizes(GLM, hisparse(hisparse_host_gib=48, hisparse_buffer=8191))
    assert pool_sizes(GLM, hisparse(hisparse_host_gib=48, hisparse_buffer=8192)).offload.region_pages == 128


def test_pages_are_what_the_device_holds_beside_the_index_keys(large_host):
    options = hisparse(hisparse_host_gib=48, num_device_blocks=None, kv_cache_gib=20)
    sizes = pool_sizes(GLM, options)
    cache = abstract_cache(
        GLM, sizes.num_blocks, 64, "fp8_ds_mla", mtp=True, offload=sizes.offload, num_slots=options.max_num_seqs
    )
    page = 64 * 656 * (GLM.num_hidden_layers + 1)
    assert num_bytes(cache) <= 20 * GIB < num_bytes(cache) + page


def test_plain_offload_is_bounded_by_the_device(large_host):
    plain = {"hisparse_host_gib": None, "kv_offload": "host", "kv_offload_gib": 48}
    sizes = pool_sizes(GLM, hisparse(**plain))
    assert (sizes.max_model_len, sizes.offload.region_pages) == (4000 * 64, 0)
    with pytest.raises(ConfigError, match="4000 blocks of 64 tokens are fewer than max_model_len=256001"):
        pool_sizes(GLM, hisparse(**plain, max_model_len=256_001))


def test_dcp_ranks_share_the_pool(large_host):
    sizes = pool_sizes(GLM, hisparse(hisparse_host_gib=48, layout="pcp=8,dcp=8,ep=8"))
    assert (sizes.num_blocks, sizes.block_size) == (15_539 // 8, 512)
