"""Regular expressions as they are read: as trees of sets of characters, and where readers differ."""

from dovetail.sdk.expressions.ambiguous import ambiguity

__all__ = ["ambiguity"]
