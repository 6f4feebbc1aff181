"""Where a text of tool calls stands: in which call, and where in its arguments; and whose states can be told at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.sdk.schemas.structural import formats_of
from dovetail_grammar.json_reader import MAX_RAW, START, Change, Place
from dovetail_grammar.json_states import OTHER, JsonStates, States, StateTokens
from dovetail_grammar.local_schemas import Schemas, is_local

MAX_FOLLOWED = 64 * 1024
"""Characters of a grammar up to which it is looked whether its states can be told."""
_TAGS = {"type", "tags", "separator", "at_least_one", "stop_after_first"}
_TAG, _CONTENT = {"type", "begin", "content", "end"}, {"type", "json_schema"}


@dataclass(frozen=True, slots=True)
class ToolTagStates:
    """A tag around one tool's arguments, which are an object.

    Attributes:
        begin: What stands before the arguments, in the form of `_Texts`.
        arguments: Their states.
        end: What stands behind them.
    """

    begin: bytes
    arguments: JsonStates
    end: bytes


class CallStates(States):
    """The states of one or more calls with a text between them, and nothing else.

    A place is the number of a call and the place in its arguments; or, between arguments, the number of the last call
    (-1 for none) and what was written since.
    """

    def __init__(self, calls: Sequence[ToolTagStates], separator: bytes, texts: CallTexts) -> None:
        self._calls, self._texts = calls, texts
        self._begins = {call.begin: number for number, call in enumerate(calls)}
        self._before = [b"", *(call.end + separator for call in calls)]
        super().__init__((-1, b""), texts.tokens)

    def end(self) -> None:
        """Release those of the arguments, too."""
        super().end()
        for call in self._calls:
            call.arguments.end()

    def read(
        self, place: tuple[int, bytes | Place], token_id: int
    ) -> tuple[tuple[int, bytes | Place], Change | None] | None:
        """Go on, into arguments and out of them."""
        number, part = place
        change, was_between = None, isinstance(part, bytes)
        data = self._texts.of(token_id)
        if not data:
            return None
        while data:
            if isinstance(part, bytes):
                was_between = True
                number, part, data = self._between(number, part, data)
                if isinstance(part, bytes) and len(part) > MAX_RAW:
                    return None
                continue
            arguments = self._calls[number].arguments
            found = arguments.read_text(part, data)
            if found is None:
                return None
            part, made, until = found
            if not was_between:
                change = made
            elif made is not None:
                change = Change(0, 0, made.opened)  # what was open in other arguments is closed
            if until < len(data):
                behind = arguments.behind(part)
                if behind is None:
                    return None
                part = behind
            data = data[until:]
        return (number, part), change

    def _between(self, number: int, part: bytes, data: bytes) -> tuple[int, bytes | Place, bytes]:
        """Go on up to the first byte of arguments; returns the place, and what is left to read."""
        before = self._before[number + 1]
        for at in range(1, len(data) + 1):
            written = part + data[:at]
            entered = self._begins.get(written[len(before) :]) if written.startswith(before) else None
            if entered is not None:
                return entered, START, data[at:]
        return number, part + data, b""

    def blurred(self, place: tuple[int, bytes | Place]) -> Any:
        """As in the arguments."""
        number, part = place
        return number, part if isinstance(part, bytes) else self._calls[number].arguments.blurred(part)

    def arrays(self, place: tuple[int, bytes | Place]) -> Sequence[Schemas]:
        """As in the arguments."""
        number, part = place
        return () if isinstance(part, bytes) else self._calls[number].arguments.arrays(part)

    def kind(self, place: tuple[int, bytes | Place]) -> int:
        """As in the arguments."""
        number, part = place
        return OTHER if isinstance(part, bytes) else self._calls[number].arguments.kind(part)


class CallTexts:
    """Texts in which an added token (`<tool_call>`) is told from the characters of its name; one for a vocabulary.

    In arguments no such token is allowed, as it has no text (`make_vocabulary`).

    Attributes:
        tokens: What each is in arguments.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self.tokens = StateTokens(texts, max(map(len, vocabulary.tokens)))
        self._added = {token_id: self._marked(token_id) for token_id in vocabulary.added.values()}
        self._names = {text: token_id for text, token_id in vocabulary.added.items() if text}
        names = sorted(self._names, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    @staticmethod
    def _marked(token_id: int) -> bytes:
        return b"\xff%d\xff" % token_id  # no UTF-8 text holds such a byte

    def of(self, token_id: int) -> bytes:
        """Return a token's."""
        found = self._added.get(token_id)
        if found is not None:
            return found
        return self.tokens.texts[token_id]

    def written(self, text: str) -> bytes:
        """Return that of a text in which a name of an added token means the token."""
        parts = [text] if self._split is None else self._split.split(text)
        return b"".join(
            self._marked(self._names[part]) if part in self._names else part.encode() for part in parts if part
        )


def followed(spec: GrammarSpec) -> str:
    """Return of a grammar what `states_of` needs to tell its states; empty where that is not tried."""
    if spec.whitespace is not None or len(spec.source) > MAX_FOLLOWED:
        return ""
    if spec.kind is Kind.JSON_OBJECT:
        return '{"type": "object"}'
    return spec.source if spec.kind in (Kind.JSON, Kind.STRUCTURAL) else ""


def states_of(kind: Kind, source: str, texts: CallTexts) -> States | None:
    """Return the states of a grammar; None where texts cannot be told by them.

    Args:
        kind: The grammar's.
        source: As `followed` gives it.
        texts: Of the masks' vocabulary.
    """
    if not source:
        return None
    found = json.loads(source)
    if kind is Kind.STRUCTURAL:
        return _calls(formats_of(found), texts)
    if not is_local(found):
        return None
    return JsonStates(found, texts.tokens)


def _calls(node: Mapping[str, Any], texts: CallTexts) -> CallStates | None:
    tags, separator = [node], ""
    if node["type"] == "tags_with_separator":
        if not node.keys() <= _TAGS or not node.get("at_least_one"):
            return None
        tags, separator = node["tags"], node["separator"]
    calls = []
    for tag in tags:
        if tag.get("type", "tag") != "tag" or not tag.keys() <= _TAG or not tag["content"].keys() <= _CONTENT:
            return None
        begin, end, schema = tag["begin"], tag["end"], tag["content"].get("json_schema")
        if not isinstance(begin, str) or not begin or not isinstance(end, str):
            return None
        if not isinstance(schema, dict) or schema.get("type") != "object" or not is_local(schema):
            return None
        calls.append(ToolTagStates(texts.written(begin), JsonStates(schema, texts.tokens), texts.written(end)))
    begins = sorted(call.begin for call in calls)
    if not calls or any(longer.startswith(shorter) for shorter, longer in pairwise(begins)):
        return None  # which call it is would show later only
    return CallStates(calls, texts.written(separator), texts)
