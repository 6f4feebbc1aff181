"""Small things that every generation endpoint needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from dovetail.base.identity import token_hex
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import CALLER
from dovetail_server.http.origin import ORIGIN

if TYPE_CHECKING:
    from dovetail_server.serving.choice import Choice


def new_id(prefix: str) -> str:
    """Return a fresh identifier such as `chatcmpl-…`."""
    return f"{prefix}{token_hex(16)}"


class Service(TypedDict):
    """How the engine serves a request's choices: see `Submit`."""

    priority: int
    cache_salt: str
    owner: str
    weight: float
    timeout_s: float | None


def choice_rid(rid: str, index: int, num_choices: int) -> str:
    """Return the engine's identifier of a choice; the request's own where it is the only one."""
    return rid if num_choices == 1 else f"{rid}#{index}"


def service_of(priority: int, salt: str) -> Service:
    """Return how the engine serves a request of the present caller's that asks for a priority and has a cache salt.

    Raises:
        RequestError: Its priority is not the caller's to set.
    """
    caller, origin = CALLER.get(), ORIGIN.get()
    return {
        "priority": caller.tenant.allowed(priority) if priority or caller.tenant.is_limited else 0,
        "cache_salt": salted(salt),
        "owner": caller.owner,
        "weight": caller.tenant.grant.weight,
        "timeout_s": None if origin is None else origin.timeout_s,
    }


def salted(salt: str) -> str:
    """Return a request's own salt behind what its caller's cached prefixes are rooted by.

    The root comes first, so that no salt is another caller's.
    """
    root = CALLER.get().cache_root
    return f"{root} {salt}" if root else salt


def check_not_aborted(choice: Choice) -> None:
    """Raise if the engine gave the choice up: OpenAI's API has no word for a reply that ends so."""
    if choice.finish_reason == "abort":
        raise errors.aborted(choice.abort_message, choice.abort_code, choice.grammar_param)
