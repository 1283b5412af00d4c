"""``kv_transfer_params`` of requests and answers, under the keys of vLLM's NIXL connector.

A proxy or sidecar sends the prompt to the prefill engine with ``do_remote_decode``, takes ``kv_transfer_params`` from
the answer as they are, and sends the same request with them to the decode engine. Keys that no engine here reads are
ignored, and null stands for absent.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from glmjax.errors import RequestError
from glmjax.serving.transfer.interface import Offer

PARAM = "kv_transfer_params"

Role = Literal["prefill", "decode"]


def to_params(offer: Offer) -> dict[str, Any]:
    """What the prefill engine answers, ready for JSON."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine_id,
        "remote_request_id": offer.request_id,
        "remote_block_ids": [list(offer.blocks)],  # a list for each group of layers that shares a table: there is one
        "remote_num_tokens": offer.num_tokens,
        "remote_host": offer.host,
        "remote_port": offer.port,
        "remote_dp_rank": offer.group,
        "remote_lease_seconds": offer.lease_seconds,
        "tp_size": offer.dcp,
        "dcp_size": offer.dcp,
    }


def asks_for_offer(params: Mapping[str, Any] | None) -> bool:
    """Whether a request wants its KV offered to another engine.

    Raises:
      RequestError: the flags are no flags, or both are set.
    """
    wanted, given = _flags(params)
    if wanted and given:
        raise RequestError(f"{PARAM}: do_remote_decode and do_remote_prefill exclude each other", PARAM)
    return wanted


def from_params(params: Mapping[str, Any] | None) -> Offer | None:
    """The offer that a request brings to the decode engine; None if it brings none.

    Raises:
      RequestError: a value is missing or not what it should be; the message names it.
    """
    if asks_for_offer(params) or not _flags(params)[1]:
        return None
    assert params is not None
    dcp = _whole(params, "dcp_size", 1, default=_whole(params, "tp_size", 1, default=1))
    num_tokens = _whole(params, "remote_num_tokens", 1)
    return Offer(
        engine_id=_text(params, "remote_engine_id"),
        request_id=_text(params, "remote_request_id"),
        blocks=_blocks(params),
        num_tokens=num_tokens,
        group=_whole(params, "remote_dp_rank", 0, default=0),
        dcp=dcp,
        host=_text(params, "remote_host", default=""),
        port=_whole(params, "remote_port", 0, most=65535, default=0),
        lease_seconds=max(1.0, _seconds(params, "remote_lease_seconds", default=30.0)),
    )


def read_params(params: Any, num_prompts: int, role: Role | None) -> dict[str, Any]:
    """What a call asks for, as arguments of ``Engine.submit``: to offer its KV, or to fetch it.

    Beside vLLM's keys, ``cached_tokens`` with ``do_remote_decode`` says how many leading tokens the other engine has.

    Args:
      role: of the engine: "prefill" offers, "decode" fetches, None does neither.

    Raises:
      RequestError: the parameters are not well formed, ask for what such an engine does not do, or come with several
        prompts.
    """
    send, fetch = asks_for_offer(params), _flags(params)[1]
    for flag, wanted, other in (("do_remote_decode", send, "prefill"), ("do_remote_prefill", fetch, "decode")):
        if wanted and role != other:
            this = "has no role" if role is None else f"has the role {role}"
            raise RequestError(f"{PARAM}: {flag} is for an engine started with --role {other}; this one {this}", PARAM)
    if (send or fetch) and num_prompts > 1:
        raise RequestError(f"{PARAM} is for calls with one prompt, got {num_prompts}", PARAM)
    if role is None:
        return {}
    cached = _whole(params, "cached_tokens", 0, default=0) if send else 0
    return {"send": send, "send_from": cached, "offer": from_params(params)}


def _flags(params: Any) -> tuple[bool, bool]:
    if params is None:
        return False, False
    if not isinstance(params, Mapping):
        raise RequestError(f"{PARAM} must be an object, got {type(params).__name__}", PARAM)
    flags = [params.get(key) or False for key in ("do_remote_decode", "do_remote_prefill")]
    for flag in flags:
        if not isinstance(flag, bool):
            raise RequestError(f"{PARAM}: do_remote_decode and do_remote_prefill must be booleans, got {flag!r}", PARAM)
    return flags[0], flags[1]


def _refuse(key: str, rule: str, value: Any) -> RequestError:
    return RequestError(f"{PARAM}: {key} must be {rule}, got {value!r}", PARAM)


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _whole(params: Mapping[str, Any], key: str, least: int, *, most: int = 1 << 31, default: int | None = None) -> int:
    value = params.get(key)
    value = default if value is None else value
    if not _is_whole(value, least, most):
        raise _refuse(key, f"a whole number in [{least}, {most}]", value)
    assert value is not None
    return value


def _text(params: Mapping[str, Any], key: str, *, default: str | None = None) -> str:
    value = params.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or (default is None and not value):
        raise _refuse(key, "a string that is not empty", value)
    return value


def _seconds(params: Mapping[str, Any], key: str, *, default: float) -> float:
    value = params.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _refuse(key, "a positive number of seconds", value)
    return float(value)


def _blocks(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Block ids, flat as older versions of vLLM have them or as the one list of a list."""
    value = params.get("remote_block_ids")
    nested = isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple)
    blocks = value[0] if nested and value is not None else value
    if not isinstance(blocks, list | tuple) or not all(_is_whole(b, 0, 1 << 31) for b in blocks):
        raise _refuse("remote_block_ids", "a list of block ids, or a list of one such list", value)
    return tuple(blocks)
