"""GLM-5.3 served in JAX.

Public names load on first use, so that ``import glmjax`` and ``import glmjax.kernels`` pull in nothing else.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "GLMConfig": "glmjax.config",
    "LLM": "glmjax.api",
    "Layout": "glmjax.sharding.layout",
    "RequestOutput": "glmjax.types",
    "SamplingParams": "glmjax.types",
    "forward": "glmjax.model",
    "load_checkpoint": "glmjax.checkpoint",
    "save_pretrained": "glmjax.checkpoint",
    "serve": "glmjax.api",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'glmjax' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
