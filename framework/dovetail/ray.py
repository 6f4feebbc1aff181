"""Dovetail under Ray Serve: `serve.run(dovetail.ray.deployment("MODEL"))`, or `serve run dovetail.ray:app`.

This is the name that people type; what it stands for is the server's (`dovetail_server.ray`), as it serves requests.
"""

from __future__ import annotations

from typing import Any

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError

try:
    from dovetail_server.ray.application import app, deployment
    from dovetail_server.ray.llm_server import LLMServer
except ModuleNotFoundError as error:
    if error.name not in ("ray", "aiohttp", "yarl"):
        raise
    text = f"dovetail.ray needs {error.name}, which is not installed: {install_extra('ray')}"
    raise ConfigError(text) from None

__all__ = ["LLMServer", "app", "deployment"]


def __getattr__(name: str) -> Any:
    """Import what needs `ray.serve.llm`, and so vLLM or SGLang, when somebody asks for it."""
    if name != "Ingress":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dovetail_server.ray.ingress import Ingress

    return Ingress
