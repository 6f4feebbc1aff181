"""`Plain`: the text of the tokens that mean nothing but text in one phase of a format."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.sdk.formats.detokenizer import TokenTables
from dovetail.sdk.formats.layout import PhaseMarkers, ReplyPhase

MAX_TABLES = 256
"""Tables that are kept for a tokenizer."""


class Plain(dict[int, str]):
    """Text by token id; `""` for a token that is looked at more closely.

    Plain is a token of whole characters that is no marker, and in which no marker begins. Filled as tokens come; shared
    by all replies of a format.
    """

    def __init__(self, tokenizer: TokenTables, view: PhaseMarkers, skipped: frozenset[int], holds: str = "") -> None:
        """Prepare; `skipped` tokens give no text, and one that holds a character of `holds` is not plain."""
        self._pieces, self._view, self._skipped, self._holds = tokenizer.pieces, view, skipped, holds

    def __missing__(self, token_id: int) -> str:
        """Look at a token for the first time."""
        view = self._view
        text = "" if token_id in view.ids or token_id in self._skipped else self._pieces[token_id] or ""
        if view.matcher is not None and view.matcher.begins(text):
            text = ""
        if any(char in text for char in self._holds + view.bare):
            text = ""
        self[token_id] = text
        return text


def plain_tables(
    tokenizer: TokenTables, views: Mapping[ReplyPhase, PhaseMarkers], skipped: frozenset[int]
) -> dict[ReplyPhase, Plain]:
    """Return the tables of all phases; arguments as for `Plain`. Each reply asks for them."""
    found, known = {}, tokenizer.plain
    for phase, view in views.items():
        table = known.get((view.number, skipped, ""))
        found[phase] = plain_tokens(tokenizer, view, skipped) if table is None else table
    return found


def plain_tokens(tokenizer: TokenTables, view: PhaseMarkers, skipped: frozenset[int], holds: str = "") -> Plain:
    """Return the table of a phase; arguments as for `Plain`."""
    tables = tokenizer.plain
    key = view.number, skipped, holds
    found = tables.get(key)
    if found is None:
        if len(tables) >= MAX_TABLES:
            tables.clear()
        found = tables[key] = Plain(tokenizer, view, skipped, holds)
    return found
