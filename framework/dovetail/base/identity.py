"""Fresh identifiers and the time of a reply, which a reply that is made again on another machine has to have again.

Without an `Identity` they are random, and the clock's. With one in the present context they follow from it and from how
many were asked for before.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextvars import ContextVar


class Identity:
    """What the identifiers of one reply follow from: a secret and a time."""

    def __init__(self, secret: bytes, began_ns: int) -> None:
        """Begin to count; `secret` has 16 to 64 bytes."""
        self.secret = secret
        self.began_ns = began_ns
        self._num = 0

    @classmethod
    def new(cls) -> Identity:
        """Return a random identity of the current time."""
        return cls(secrets.token_bytes(16), time.time_ns())

    @property
    def seed(self) -> int:
        """A seed for draws, below 2**63."""
        return int.from_bytes(self._digest(b"seed", 8), "big") >> 1

    def token_hex(self, num_bytes: int) -> str:
        """Return the next identifier, twice as many letters as bytes, of which there are at most 64."""
        self._num += 1
        return self._digest(b"%d" % self._num, num_bytes).hex()

    def _digest(self, name: bytes, num_bytes: int) -> bytes:
        return hashlib.blake2b(name, digest_size=num_bytes, key=self.secret).digest()


IDENTITY: ContextVar[Identity | None] = ContextVar("dovetail_identity", default=None)
"""Of the reply that the present task makes."""


def token_hex(num_bytes: int) -> str:
    """Return a new identifier of `num_bytes` bytes, in hexadecimal."""
    identity = IDENTITY.get()
    return secrets.token_hex(num_bytes) if identity is None else identity.token_hex(num_bytes)


def time_ns() -> int:
    """Return when the reply began where it has an identity, else the time."""
    identity = IDENTITY.get()
    return time.time_ns() if identity is None else identity.began_ns
