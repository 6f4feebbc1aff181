"""Phrases that a file lists are finished once they are begun: boilerplate that every reply has somewhere.

The file is a JSON list of phrases, each a list of token ids. What a request has said is compared with the phrases'
first tokens; which phrase it is in, and where, is kept in its memo.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dovetail.contracts import DraftRequest, Speculator


@dataclass
class PhrasesOptions:
    """Settings: `--phrases.file phrases.json`."""

    file: str = field(default="", metadata={"help": "JSON list of phrases, each a list of token ids."})
    begin: int = field(default=3, metadata={"help": "Tokens of a phrase that have to be said before it is drafted."})


class Place(NamedTuple):
    """How long the request was, and how much of which phrase it had said then."""

    length: int
    phrase: tuple[int, ...]
    said: int


class Phrases(Speculator):
    """Drafts the rest of a phrase."""

    Options = PhrasesOptions

    def __init__(self) -> None:
        """Read the file, if there is one."""
        found = json.loads(Path(self.options.file).read_text()) if self.options.file else []
        phrases = [tuple(phrase) for phrase in found if len(phrase) > self.options.begin]
        self._by_begin = {phrase[: self.options.begin]: phrase for phrase in phrases}

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Return the rest of the phrase that each request is in."""
        return [list(self._rest(request))[: request.most_drafts] for request in requests]

    def _rest(self, request: DraftRequest) -> Iterator[int]:
        place = request.memo if isinstance(request.memo, Place) else None
        if place is not None:
            new = tuple(request.ids[place.length :])
            goes_on = new == place.phrase[place.said : place.said + len(new)]
            place = place._replace(length=len(request.ids), said=place.said + len(new)) if goes_on else None
        if place is None:
            begun = self._by_begin.get(tuple(request.ids[-self.options.begin :]))
            place = None if begun is None else Place(len(request.ids), begun, self.options.begin)
        request.memo = place
        yield from () if place is None else place.phrase[place.said :]
