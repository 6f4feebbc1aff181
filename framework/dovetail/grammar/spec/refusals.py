"""Codes with which the engine refuses a grammar, in `Finish.code`."""

from __future__ import annotations

TOO_COMPLEX = "grammar_too_complex"
FINAL = frozenset(("invalid_grammar", "invalid_json_schema"))
"""Errors that no other option to enforce the same grammar would mend."""
BUSY, FULL, OWNER_FULL = "grammar_busy", "grammar_queue_full", "grammar_owner_queue_full"
LATER = frozenset((BUSY, FULL, OWNER_FULL))
"""Refusals for which the grammar is not to blame: the same request may succeed later."""
