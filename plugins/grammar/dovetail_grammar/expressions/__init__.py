"""Regular expressions as sets of texts, as ECMAScript reads them where nothing else is said.

Says in plain expressions what look-around says, and what does not match; and whether two can match the same text.
"""

from dovetail_grammar.expressions.characters import RARE, unicode_dialect
from dovetail_grammar.expressions.plain import complement, plainly

__all__ = ["RARE", "complement", "plainly", "unicode_dialect"]
