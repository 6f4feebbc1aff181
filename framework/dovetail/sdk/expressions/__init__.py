"""Regular expressions as they are read: as trees of sets of characters, and where readers differ."""

from dovetail.sdk.expressions.ambiguous import ambiguity
from dovetail.sdk.expressions.characters import RARE, unicode_dialect

__all__ = ["RARE", "ambiguity", "unicode_dialect"]
