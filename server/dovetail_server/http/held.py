"""Bytes of request bodies in memory: counted for the whole server and for each caller, and bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dovetail_server.errors.catalogue import queue_full_bytes
from dovetail_server.http.auth import CALLER
from dovetail_server.tenants.tenant import Tenant, share_of

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings


class Holder(Protocol):
    """What the layers need of their server."""

    num_held_bytes: int
    """Bytes of request bodies in memory, …"""
    held_by: dict[Tenant, int]
    """… and whose they are."""

    @property
    def settings(self) -> ServeSettings:
        """Its limits."""


class HeldBytes:
    """What one body, or one connection, has in memory. The caller is the one when the first bytes come."""

    def __init__(self, state: Holder) -> None:
        """Begin with nothing; `state` counts for all."""
        self.num = 0
        self._state = state
        self._tenant: Tenant | None = None

    def check(self, new: int) -> None:
        """Refuse more bytes where there is no room. Alone, whatever is within its own limit is served.

        Raises:
            ServiceError: 429, all bodies together, and this caller's, have too many.
        """
        held, most = self._state.num_held_bytes, self._state.settings.max_queued_bytes
        if held + new > most and held > self.num:
            tenant = self._tenant or CALLER.get().tenant
            own = self._state.held_by.get(tenant, 0)
            if own + new > share_of(tenant, self._state.held_by) * most:
                raise queue_full_bytes(most)

    def take(self, num: int) -> None:
        """Count bytes as the caller's, who is known as soon as any are received."""
        if self._tenant is None:
            self._tenant = CALLER.get().tenant
        self.num += num
        self._state.num_held_bytes += num
        of_tenant = self._state.held_by.get(self._tenant, 0) + num
        self._state.held_by[self._tenant] = of_tenant
        if not of_tenant:
            del self._state.held_by[self._tenant]

    def let_go(self, num: int | None = None) -> None:
        """Give bytes back; without a number, all of them."""
        self.take(-self.num if num is None else -min(num, self.num))
