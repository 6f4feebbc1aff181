"""Tables that stand as JSON beside the module that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ConfigError


def table(file: str, name: str = "") -> Any:
    """Return what the JSON file beside a module holds.

    Args:
        file: The module's `__file__`.
        name: Of the JSON file; "": the module's own.

    Raises:
        ConfigError: It is missing or broken, as in an installation that was not finished.
    """
    path = Path(file).with_name(name) if name else Path(file).with_suffix(".json")
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {why}; it is a part of Dovetail: install dovetail-llm again") from error
