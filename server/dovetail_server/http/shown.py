"""What of settings and places a caller is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.processing.plugin_settings import Given
from dovetail_server.http.auth import Caller

HIDDEN = "**********"
"""In place of a secret, as pydantic writes it."""
_USERINFO = re.compile(r"(?<=://)[^/\s?#]*@")


def shown(value: Any, caller: Caller) -> Any:
    """Return JSON values without users and passwords of URLs; for callers without admin rights, paths as bare names."""
    if isinstance(value, str):
        plain = _USERINFO.sub(f"{HIDDEN}@", value)
        return plain.rstrip("/").rpartition("/")[2] if plain.startswith("/") and not caller.may_admin else plain
    if isinstance(value, Mapping):
        return {name: shown(item, caller) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item, caller) for item in value]
    return value


def shown_options(given: Given) -> dict[str, dict[str, Any]]:
    """Return options of plugins: the values of those that are declared here and are no secrets, the names of others."""
    return {
        plugin: {name: option.value if option.is_public else HIDDEN for name, option in section.items()}
        for plugin, section in given.items()
    }
