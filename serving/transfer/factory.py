"""Connectors by name. A kind is imported when it is asked for: each brings a library of its own."""

from importlib.util import find_spec

from glmjax.errors import ConfigError
from glmjax.serving.clock import Clock
from glmjax.serving.transfer.connector import PullConnector
from glmjax.serving.transfer.interface import PeerInfo
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.local import Hub, LocalConnector
from glmjax.serving.transfer.memory import AnyMemory

CONNECTORS = ("local", "nixl", "jax")


def between_processes() -> str:
    """The kind to take between processes if nobody says: "nixl" where it is installed, else "jax"."""
    return "nixl" if find_spec("nixl_cu12") is not None else "jax"


def make_connector(
    info: PeerInfo, rows: AnyMemory, clock: Clock, settings: Settings | None = None, hub: Hub | None = None
) -> PullConnector:
    """A connector of the kind that ``info.connector`` names.

    Args:
      rows: memory that is fetched from and into; kept, and written to while fetches run.
      hub: where local connectors of this process find each other.

    Raises:
      ConfigError: the kind is unknown, its library is missing, or memory and ``info`` disagree.
    """
    settings = settings or Settings()
    match info.connector:
        case "local":
            return LocalConnector(info, rows, clock, settings, {} if hub is None else hub)
        case "nixl":
            from glmjax.serving.transfer.nixl import NixlConnector

            return NixlConnector(info, rows, clock, settings)
        case "jax":
            from glmjax.serving.transfer.jax_pull import JaxConnector

            return JaxConnector(info, rows, clock, settings)
    raise ConfigError(f"connector must be one of {', '.join(CONNECTORS)}, got {info.connector!r}")
