"""The names that requests may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail_server import errors
from dovetail_server.openai.models import DEFAULT_MODEL


def served_name(name: str | None, served: Sequence[str]) -> str:
    """Return the name a reply carries. A request that names none, or SGLang's `default`, means the first.

    Raises:
        RequestError: A 404 that lists the served names.
    """
    if name is None or (name == DEFAULT_MODEL and name not in served):
        return served[0]
    if name not in served:
        raise errors.model_not_found(name, list(served))
    return name
