"""A request and its reply on their way between the front and a replica."""

from __future__ import annotations

from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request whose body has come.

    Attributes:
        method: As in the request.
        path: Percent-decoded.
        query: Behind the question mark, as it came.
        headers: In lower case, without those of the connection.
        body: All of it.
        prompt: What its prompt begins with, by which Ray's router chooses; Ray looks for an attribute of this name.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What comes of a reply before its body, whose pieces follow it."""

    status: int
    headers: Headers
