"""How many connections are open, from one address and in all, and how many may be."""

from __future__ import annotations

import ipaddress
import logging
import resource
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings

logger = logging.getLogger("dovetail.server")
MAX_FILES = 1 << 16
RESERVED_FILES = 256
"""Open files that are left for everything but connections: weights, database, batches, pipes."""
SAY_EVERY_S = 60.0


def raise_file_limit() -> None:
    """Allow this process, and those that it starts, as many open files as its user may have, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return how many connections the limit of open files leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_FILES)
    return max(files - RESERVED_FILES, files // 2)


def network_of(address: str) -> str:
    """Return what connections are counted by: an IPv4 address, or an IPv6 network, of which one client has all."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


class Connections:
    """The open connections of one server."""

    def __init__(self, settings: ServeSettings) -> None:
        """Take the limits of the settings."""
        self.most = settings.max_connections or most_connections()
        self.most_per_address = settings.max_connections_per_address or max(1, self.most * 3 // 4)
        self.num_open = 0
        self.num_refused = 0
        self._by_network: Counter[str] = Counter()
        self._said = -SAY_EVERY_S

    def open(self, address: str | None) -> str | None:
        """Count a new connection, which is to be given back with `close`; or say why it may not be."""
        network = None if address is None else network_of(address)
        if self.num_open >= self.most:
            return self._refuse(f"the server has {self.most} connections, its limit, set by --max-connections")
        if network is not None and self._by_network[network] >= self.most_per_address:
            limit = f"{self.most_per_address} connections, the limit, set by --max-connections-per-address"
            return self._refuse(f"{network} has {limit}")
        self.num_open += 1
        if network is not None:
            self._by_network[network] += 1
        return None

    def close(self, address: str | None) -> None:
        """Give a counted connection back."""
        self.num_open -= 1
        if address is not None:
            network = network_of(address)
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]

    def _refuse(self, why: str) -> str:
        self.num_refused += 1
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            logger.warning("A connection was refused (%d so far): %s.", self.num_refused, why)
        return why
