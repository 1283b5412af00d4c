"""How large the stage is through which requests are handed over, and whether it is on the devices or on the host."""

import dataclasses
from collections.abc import Sequence

import jax

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.memory import GIB, HOST_SHARE, available_bytes, block_bytes
from glmjax.options import EngineOptions

STAGE_GIB = 8.0  # two requests on their way at most, unless one is longer
DEVICE_STAGE = 1 / 8  # of a device's memory for KV, that the stage may take by itself; 1 / 2 if told to be there


@dataclasses.dataclass(frozen=True)
class StageSize:
    """Memory through which requests are handed over.

    Attributes:
      num_blocks: of each data-parallel rank.
      on_device: on the devices, else on the host.
    """

    num_blocks: int
    on_device: bool


def blocks_on_device(
    config: GLMConfig, options: EngineOptions, connector: str, budget: float, devices: Sequence[jax.Device]
) -> int | None:
    """Blocks of the stage of each data-parallel rank if it is to be on the devices.

    By itself it is there for connector "local", and for "nixl" on GPUs if rows need no new order on their way into the
    decode engine's, which both engines are told by an interleave of a block; if ``DEVICE_STAGE`` of a device's memory
    for KV, ``budget`` bytes, holds the longest request; and if rows are not in host memory anyway (HiSparse).

    Raises:
      ConfigError: it is told to be there and cannot be.
    """
    layout, told = options.layout, options.kv_buffer_device == "device"
    if options.kv_buffer_device == "host":
        return None
    obstacle = None
    if connector == "jax":
        obstacle = "connector='jax' moves host memory"
    elif connector == "nixl" and options.role == "decode" and layout.dp * layout.dcp != layout.num_devices:
        obstacle = f"with layout {layout} several devices have the same KV, and connector='nixl' writes to one of them"
    if told and obstacle:
        raise ConfigError(f"kv_buffer_device='device' is not possible: {obstacle}: use 'host'")
    if obstacle:
        return None
    if not told and (options.host_gib is not None or (connector == "nixl" and not _worth_it(options, devices))):
        return None

    one = block_bytes(config, options)
    longest = options.max_model_len or config.max_position_embeddings
    need = -(-longest // (options.block_size * layout.dcp))
    if options.host_gib is None:  # a request is on the device whole
        need = min(need, options.num_device_blocks or int(budget // one))
    share = (1 / 2 if told else DEVICE_STAGE) * budget
    blocks = min(2 * need, max(need, int(DEVICE_STAGE * budget / one)))
    if options.connector_stage_gib is not None:
        blocks = int(options.connector_stage_gib * GIB / (one * layout.dcp))
    if 0 < blocks * one <= share:
        return blocks
    if not told:
        return None
    raise ConfigError(
        f"kv_buffer_device='device' is not possible: a stage of {blocks} blocks of {one / GIB:.4f} GiB on each device "
        f"is none, or more than half of the {budget / GIB:.2f} GiB of memory for KV: lower max_model_len, set "
        "connector_stage_gib, or use 'host'"
    )


def _worth_it(options: EngineOptions, devices: Sequence[jax.Device]) -> bool:
    """Whether NIXL had better move memory of the devices: into them it makes a read of every run of tokens."""
    scattered = options.role == "decode" and options.layout.interleave != options.block_size
    return devices[0].platform != "cpu" and not scattered


def blocks_on_host(options: EngineOptions, dp: int, longest: int, block_bytes: int) -> int:
    """Blocks of the stage through which requests are handed over, of each data-parallel rank.

    Args:
      longest: blocks of the longest request. The stage holds two of them, or one where two are more than 8 GiB, unless
        ``connector_stage_gib`` says otherwise.
      block_bytes: of a block with the rows of all layers, on all DCP ranks.

    Raises:
      ConfigError: it holds no block, or this machine has no room for it.
    """
    blocks = max(longest, min(2 * longest, int(STAGE_GIB * GIB / block_bytes)))
    if options.connector_stage_gib is not None:
        blocks = int(options.connector_stage_gib * GIB / block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"connector_stage_gib={options.connector_stage_gib:g} holds no block: one takes {block_bytes / GIB:.4f} GiB"
        )
    need, free = blocks * block_bytes * dp, available_bytes()
    if need > HOST_SHARE * free:
        raise ConfigError(
            f"a stage of {blocks} blocks of {block_bytes / GIB:.4f} GiB for each of {dp} data-parallel ranks takes "
            f"{need / GIB:.1f} GiB, and {HOST_SHARE:.0%} of the {free / GIB:.1f} GiB of free memory are to be had: set "
            "connector_stage_gib"
        )
    return blocks
