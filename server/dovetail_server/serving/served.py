"""The names that requests may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail_server import errors
from dovetail_server.http.addresses import DEPLOYMENT
from dovetail_server.schema.models import DEFAULT_MODEL


def check_deployment(served: Sequence[str]) -> None:
    """Raise unless the model that the address names is served, if it names one.

    Raises:
        RequestError: A 404 that lists the served names.
    """
    name = DEPLOYMENT.get()
    if name is not None and name not in (*served, DEFAULT_MODEL):
        raise errors.model_not_found(name[:128], list(served))


def served_name(name: str | None, served: Sequence[str]) -> str:
    """Return the name a reply carries. A request that names none, or SGLang's `default`, means the first.

    Raises:
        RequestError: A 404 that lists the served names, also for that of the address.
    """
    check_deployment(served)
    if name is None or (name == DEFAULT_MODEL and name not in served):
        return served[0]
    if name not in served:
        raise errors.model_not_found(name, list(served))
    return name
