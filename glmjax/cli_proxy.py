"""The ``glmjax proxy`` command, part of ``glmjax.cli``: a front before two engines that run elsewhere."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated
from urllib.parse import urlsplit

import typer

from glmjax.cli_interrupt import in_order
from glmjax.cli_options import LoadFailure, MinPrefill, OnLoadFailure
from glmjax.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0


def proxy(
    prefill: Annotated[str, typer.Argument(help="URL of an engine served with --role prefill.")],
    decode: Annotated[str, typer.Argument(help="URL of an engine served with --role decode.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(help="Clients must send it; it is handed on to the engines.")] = None,
    min_prefill_tokens: MinPrefill = 64,
    kv_load_failure_policy: LoadFailure = OnLoadFailure.recompute,
    prefill_timeout: Annotated[float, typer.Option(help="Seconds that a prompt may take.")] = 600.0,
) -> None:
    """Serve OpenAI's HTTP API with a prefill and a decode engine that run elsewhere."""
    from glmjax.serving.front import FrontOptions, Pair, build_front, one_pair
    from glmjax.serving.server import Server

    pair = Pair(engine_url("PREFILL", prefill), engine_url("DECODE", decode))
    options = FrontOptions(
        min_prefill_tokens=min_prefill_tokens,
        on_failure=kv_load_failure_policy.value,
        prefill_timeout=prefill_timeout,
        api_keys=() if api_key is None else [api_key],
    )
    server = Server(build_front(one_pair(pair), options), host, port)
    typer.echo(f"Serving {pair.prefill} and {pair.decode} on {server.url}")
    warn_of_engines({"prefill": pair.prefill, "decode": pair.decode})
    with in_order():
        server.wait()


def engine_url(name: str, text: str) -> str:
    """A URL without what follows the engine's own paths.

    Raises:
      ConfigError: it is none, or has parts that would be lost.
    """
    import httpx

    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        good = good and not (parts.query or parts.fragment or parts.username)
        httpx.URL(text)
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good or any(map(str.isspace, text)):
        raise ConfigError(f"{name} must be a URL such as http://127.0.0.1:8001, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def warn_of_engines(urls: dict[str, str]) -> None:
    """Logs a warning for each engine, by its role, that does not answer or says that it has another role.

    They may be started, or put right, later.
    """
    with ThreadPoolExecutor(len(urls)) as pool:
        for doubt in pool.map(_doubt, urls.keys(), urls.values()):
            if doubt is not None:
                log.warning("%s", doubt)


def _doubt(role: str, url: str) -> str | None:
    import httpx

    try:
        response = httpx.get(f"{url}/version", timeout=LOOK_SECONDS)
        found = response.raise_for_status().json().get("role")
    except httpx.TransportError as error:
        return f"the {role} engine at {url} cannot be reached ({error}): calls need it"
    except (httpx.HTTPStatusError, ValueError, AttributeError):
        return f"what answers at {url} is no glmjax engine: expected one served with --role {role}"
    if found != role:
        has = "no role" if found is None else f"the role {found}"
        return f"the engine at {url} has {has}: expected one served with --role {role}"
    return None
