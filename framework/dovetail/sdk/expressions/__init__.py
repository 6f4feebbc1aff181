"""Regular expressions as sets of texts, as ECMAScript reads them where nothing else is said.

Says in plain expressions what look-around says, and what does not match; and whether two can match the same text.
"""

from dovetail.sdk.expressions.ambiguous import ambiguity
from dovetail.sdk.expressions.characters import RARE, unicode_dialect
from dovetail.sdk.expressions.plain import complement, plainly

__all__ = ["RARE", "ambiguity", "complement", "plainly", "unicode_dialect"]
