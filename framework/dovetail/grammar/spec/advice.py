"""What to write in place of a keyword that cannot be enforced."""

from __future__ import annotations

from dovetail.contracts.tables import table

_DATA: dict[str, dict[str, str]] = table(__file__)
ADVICE = _DATA["keywords"]
"""What to write in place of a keyword."""
HINTS = _DATA["hints"]
"""What to do about a grammar that is no schema, by words of its refusal."""


def advice(place: str) -> str:
    """Return what to do about a keyword, named by its JSON pointer."""
    parts = place.rsplit("/", 2)
    keyword = next((part for part in reversed(parts) if part in ADVICE), "")
    return ADVICE.get(keyword, "write it in another way, or leave it out")


def hint(message: str) -> str | None:
    """Return what to write instead, where a refusal of an expression or a grammar of rules says enough."""
    return next((said for words, said in HINTS.items() if words in message), None)
