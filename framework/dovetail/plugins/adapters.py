"""How a plugin written for the previous API version is used: an adapter makes today's class of yesterday's.

`ADAPTERS[kind, n]` names a function `adapt(loaded) -> adapted` that turns what an entry point of API `n` names into
what API `n + 1` expects. A kind that speaks `oldest_api` to `api` has one for every step between them; the loader runs
them in order, before it checks the contract. There is none while every kind is at its first version.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dovetail.plugins.kinds import KINDS

ADAPTERS: dict[tuple[str, int], str] = {}
"""`module:function` by (kind, API version that it reads)."""


def adapt(kind: str, api: int, loaded: Any) -> Any:
    """Return `loaded`, written for API `api` of `kind`, as the API of today."""
    for step in range(api, KINDS[kind].api):
        module, _, function = ADAPTERS[kind, step].partition(":")
        loaded = getattr(import_module(module), function)(loaded)
    return loaded
