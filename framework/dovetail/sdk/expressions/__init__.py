"""Regular expressions as ECMAScript reads them, as sets of texts.

Says in plain expressions what look-around says, and what does not match; and whether two can match the same text.
"""

from dovetail.sdk.expressions.characters import RARE
from dovetail.sdk.expressions.plain import complement, plainly

__all__ = ["RARE", "complement", "plainly"]
