"""`Answer`: an answer in which thinking may begin, as far as it has come; a value, so that tokens can be taken back."""

from __future__ import annotations

import codecs
from copy import copy
from typing import NamedTuple

from dovetail.sdk.formats.place import SIGNS, Place, ends_sentence

_SIGNS = frozenset(SIGNS)


class Answer(NamedTuple):
    """Where an answer stands. What it costs to go on does not grow with the answer.

    Attributes:
        place: Where its text stands but for `last`. Never changed: others may hold it.
        last: Its last text.
        ends: Whether it ends a sentence.
        rest: The first bytes of a character that is not whole.
    """

    place: Place
    last: str = ""
    ends: bool = False
    rest: bytes = b""

    def then(self, said: bytes) -> Answer:
        """Return it with more of its text."""
        text, size = codecs.utf_8_decode(self.rest + said, "replace", False)
        rest, place, last = (self.rest + said)[size:], self.place, text or self.last
        if text and not (place.is_settled and _SIGNS.isdisjoint(text)):
            place = self._copy()
            place.feed(text)
            last = place.last
        return Answer(place, last, ends_sentence(text, self.ends), rest)

    def at_marker(self, *, opens: bool) -> tuple[bool, Answer]:
        """Say whether a marker counts that follows, and return the answer with what it is then part of.

        Args:
            opens: It opens thinking; else a call.
        """
        place = self._copy()
        if is_quoted := place.is_quoted:
            place.hold_call()
        counts = not is_quoted and (not opens or place.may_think(self.ends))
        return counts, self._replace(place=place)

    def _copy(self) -> Place:
        place = copy(self.place)
        place.last = self.last
        return place
