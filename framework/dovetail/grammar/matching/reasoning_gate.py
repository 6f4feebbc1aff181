"""`ReasoningGate`: follows thinking token by token in the engine, and says which tokens are the grammar's business.

There is one for each way in which formats mark thinking: `MarkerGate` for text between two markers, `MessageGate` for
messages with headers. Both are made of what `thinking.thinking_of` read from the request's `FormatSpec`, and agree with
the output parser of the same format after every token: a marker that is one added token matches by its id, any other in
the text, wherever tokens cut it. Only in counting do they differ: tokens of a marker spelled as text, and a start
marker that is repeated, count as thinking here; and a call within thinking ends it here at once, while the parser waits
for what follows the call. An end of thinking is one wherever it stands, as the parser is told
(`Markers.ends_quoted`): a budget may force it within code, and a grammar holds at once. A token costs about a
microsecond; two more in an answer without a grammar in which thinking may begin.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from dovetail.messages import MarkedThinking, MessageThinking, Thinking
from dovetail.sdk.formats.answer import Answer
from dovetail.sdk.formats.place import Place

MAX_ROLLBACK = 256
"""Most tokens that `rollback` takes back at once."""
WHITESPACE = b" \t\r\n"
MAX_HEADER = 512
"""Characters of the longest header, as output parsers count; longer text is the answer."""

MAX_TAIL = 256
"""Bytes at the end of a message that are remembered, where they may be a header."""

Paths = tuple[tuple[int, ...], tuple[int, ...]]
"""What is left of the canonical header of thinking, and of that of the answer."""


class ReasoningGate(ABC):
    """Follows one request's thinking on token ids; the output parser agrees with it after each token.

    Attributes:
        reasoning_tokens: Tokens accepted inside thinking, markers excluded.
        text_after_marker: Of the token that ended thinking: its bytes behind a marker that is spelled as text.
        covers_reply: The grammar describes the whole reply, thinking included; the gate only keeps the budget.
        forbidden_ids: Tokens that must not come while the grammar does not hold: they would end thinking otherwise.
        after: What may stand between the end of thinking and the grammar's text, from its beginning on: the newlines of
            the template, which models have learnt and output parsers drop.
    """

    covers_reply = False
    forbidden_ids: frozenset[int] = frozenset()
    after = b""
    _SAVED: tuple[str, ...] = ()

    def __init__(self, thinking: Thinking, tokens: Sequence[bytes], *, constrained: bool) -> None:
        """Start at the prompt's end.

        Args:
            thinking: The request's.
            tokens: Bytes by token id.
            constrained: Whether a grammar waits for the answer.
        """
        self.reasoning_tokens = 0
        self.text_after_marker = b""
        self._budget = thinking.budget
        self._tokens = tokens
        self._constrained = constrained
        self._past: deque[tuple[Any, ...]] = deque(maxlen=MAX_ROLLBACK)

    @property
    @abstractmethod
    def free(self) -> bool:
        """Whether the next token is not the grammar's business."""

    @property
    @abstractmethod
    def forced_ids(self) -> tuple[int, ...] | None:
        """The tokens of which one must come, whatever the grammar says; None for no such demand."""

    @property
    def extra_id(self) -> int | None:
        """Beside what the grammar allows: the token that opens thinking."""
        return None

    @property
    def forbidden_id(self) -> int | None:
        """Past the budget: the token that would open thinking."""
        return None

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up."""
        return self._budget is not None and self.reasoning_tokens >= self._budget

    def accept(self, token_id: int) -> bool:
        """Take a token. True: it belongs to thinking, its markers or headers; False: it is the answer's."""
        self._past.append(tuple([getattr(self, name) for name in self._SAVED]))
        self.text_after_marker = b""
        return self._take(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens.

        Raises:
            ValueError: More than were accepted, or than `MAX_ROLLBACK`.
        """
        if num_tokens > len(self._past):
            raise ValueError(f"cannot take back {num_tokens} tokens; the last {len(self._past)} are remembered")
        saved = None
        for _ in range(num_tokens):
            saved = self._past.pop()
        if saved is not None:
            for name, value in zip(self._SAVED, saved, strict=True):
                setattr(self, name, value)

    @abstractmethod
    def _take(self, token_id: int) -> bool:
        """Move on by one token."""

    def _bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""


class MarkerGate(ReasoningGate):
    """Thinking between two markers. See `contracts.output.State` for the states.

    Where a marker of several tokens has to be forced or offered, its canonical ids are used.

    Attributes:
        state: `open`, `in` or `out`.
    """

    _SAVED = ("state", "reasoning_tokens", "text_after_marker", "_at", "_tail", "_begun", "_answer")

    def __init__(self, thinking: MarkedThinking, tokens: Sequence[bytes], *, constrained: bool) -> None:
        """Start at the prompt's end."""
        super().__init__(thinking, tokens, constrained=constrained)
        self.state: str = thinking.state
        self._start, self._end = thinking.start, thinking.end
        self.after = thinking.after.encode()
        self._end_bytes = thinking.end.text.encode()
        self._tools = frozenset(thinking.tools)
        self._outs = {*thinking.answers, *(thinking.end.ids if len(thinking.end.ids) == 1 else ())}
        self._breaks = frozenset(thinking.breaks) | (self._tools if thinking.ended_by_tools else frozenset())
        # Beside a grammar a call that is spelled in thinking is none: it might be a quotation that does not fit.
        self._break_bytes = () if constrained else tuple(text.encode() for text in thinking.break_texts)
        self._tail_len = max([len(text) for text in (self._end_bytes, *self._break_bytes)]) - 1
        self.forbidden_ids = frozenset(thinking.breaks) if thinking.calls else self._breaks
        self._at = 0
        self._tail = b""
        self._begun = False
        self._answer = Answer(Place())

    @property
    def free(self) -> bool:
        """Within thinking, or in the middle of the marker that opens it."""
        return self.state == "in" or (self.state == "open" and self._at > 0)

    @property
    def forced_ids(self) -> tuple[int, ...] | None:
        """In the middle of the start marker its next token, past the budget the end marker's."""
        if self.state == "open" and self._at and self._constrained:
            return (self._start.ids[self._at],)
        if self.state == "in" and self.exhausted:
            return (self._end.ids[self._at],)
        return None

    @property
    def extra_id(self) -> int | None:
        """Until the answer begins."""
        if self.state != "open" or self._begun or self._budget == 0 or not self._start.ids:
            return None
        return self._start.ids[0]

    @property
    def forbidden_id(self) -> int | None:
        """With a budget of nothing, except where an answer only names it."""
        if self.state != "open" or self._budget != 0 or len(self._start.ids) != 1:
            return None
        may_name = self._begun and not self._constrained
        return None if may_name and not self._answer.at_marker(opens=True)[0] else self._start.ids[0]

    def _take(self, token_id: int) -> bool:
        if self.state == "in":
            return self._think(token_id)
        return self.state == "open" and self._open(token_id)

    def _open(self, token_id: int) -> bool:
        """Thinking may begin. Beside a grammar it cannot once the answer has, as nothing else is offered then."""
        start = self._start.ids
        if start and token_id == start[self._at] and self._budget != 0 and (self._at or self._counts(opens=True)):
            self._at += 1
            if self._at == len(start):
                self.state, self._at, self._tail = "in", 0, b""
            return True
        said = b"".join(map(self._bytes, (*start[: self._at], token_id)))
        self._at = 0
        if (token_id in self._tools and self._counts(opens=False)) or (not self._begun and token_id in self._outs):
            self.state = "out"
        elif self._constrained or said.strip(WHITESPACE):
            self._begun = True
        if not self._constrained:
            self._answer = self._answer.then(said)
        return False

    def _counts(self, *, opens: bool) -> bool:
        """Whether the marker that follows does, by the parser's rule; beside a grammar none does in an answer."""
        if self._constrained or not self._begun:
            return not (opens and self._begun)
        counts, self._answer = self._answer.at_marker(opens=opens)
        return counts

    def _think(self, token_id: int) -> bool:
        if token_id in self._breaks:
            self.state = "out"
            return False
        if self.exhausted and token_id == self._end.ids[self._at]:
            self._at += 1
            if self._at == len(self._end.ids):
                self.state, self._at = "out", 0
            return True
        if len(self._end.ids) == 1 and token_id == self._end.ids[0]:
            self.state = "out"
            return True
        if (len(self._end.ids) > 1 or self._break_bytes) and self._ends_in_text(token_id):
            self.state = "out"
            return True
        self.reasoning_tokens += 1
        return True

    def _ends_in_text(self, token_id: int) -> bool:
        text = self._tail + self._bytes(token_id)
        if len(self._end.ids) > 1:
            place = text.find(self._end_bytes)
            if place >= 0:
                self.text_after_marker = text[place + len(self._end_bytes) :]
                return True
        if any(marker in text for marker in self._break_bytes):
            return True
        self._tail = text[max(0, len(text) - self._tail_len) :]
        return False


class MessageGate(ReasoningGate):
    """Thinking in messages with headers.

    Without a grammar every header is read for what it says, as the parser reads it. Beside a grammar headers are kept
    to those of thinking and of the answer, token by token: the only ones whose message the grammar could follow.

    Attributes:
        phase: `header` (also between messages), `think`, `preamble` or `answer`.
    """

    _SAVED = ("phase", "reasoning_tokens", "_header", "_between", "_paths", "_tail")

    def __init__(self, thinking: MessageThinking, tokens: Sequence[bytes], *, constrained: bool) -> None:
        """Start at the prompt's end."""
        super().__init__(thinking, tokens, constrained=constrained)
        self.covers_reply = thinking.whole
        self._thinking = thinking
        opens = (thinking.start, *thinking.parts)
        self._marks = {mark.ids[0]: mark.text for mark in (*opens, *thinking.inner, thinking.body, *thinking.bodies)}
        self._ends = frozenset(thinking.ends)
        bodies = {mark.ids[0]: mark.text for mark in thinking.bodies}
        self._bodies = {thinking.body.ids[0]: "", **bodies}
        self._breaks = self._ends | {mark.ids[0] for mark in opens} | (self._bodies.keys() if bodies else set())
        self.forbidden_ids = frozenset(self._marks) | self._ends - {thinking.ends[0]}
        self._thinks, self._answers = re.compile(thinking.thinks), re.compile(thinking.answers)
        self.phase: str = {"in": "think", "out": "answer"}.get(thinking.state, "header")
        self._bare = re.compile(rf"(?:{thinking.bare})\Z") if thinking.bare else None
        self._tail = b""
        self._header = thinking.header
        self._between = False
        self._paths: Paths = thinking.first

    @property
    def free(self) -> bool:
        """Anywhere but in the answer."""
        return self.phase != "answer"

    @property
    def forced_ids(self) -> tuple[int, ...] | None:
        """Past the budget the end of thinking and the answer's header; beside a grammar every header."""
        if self.phase == "think" and self.exhausted:
            return (self._thinking.ends[0],)
        if self.phase != "header" or self.covers_reply:
            return None
        if self._constrained:
            paths = self._paths[1:] if self.exhausted else self._paths
            found = tuple({path[0] for path in paths if path})
            return found or self._thinking.body.ids
        return (self._paths[1][:1] or None) if self.exhausted and not self._thinking.calls else None

    @property
    def forbidden_id(self) -> int | None:
        """Past the budget, where calls may come: where the header of thinking parts from the answer's."""
        if self.phase != "header" or not self.exhausted:
            return None
        thinking, answer = self._paths
        return thinking[0] if thinking and answer and thinking[0] != answer[0] else None

    def _take(self, token_id: int) -> bool:
        thinking = self._thinking
        if self.phase == "answer" and self._constrained:
            return False
        if self.phase != "header":
            if self._bare is not None and self._is_bare_header(token_id):
                return True
            if token_id not in self._breaks:
                self.reasoning_tokens += self.phase == "think"
                return self.phase != "answer"
            self._tail = b""
            self.phase, self._header, self._between = "header", "", False
            self._paths = thinking.next
        if token_id in self._ends:
            self._header, self._between = "", True
            self._paths = thinking.next
            return True
        if (shown := self._bodies.get(token_id)) is not None:
            self._header += shown
            self._begin_message()
            return True
        if token_id == thinking.start.ids[0]:
            self._header, self._paths = "", thinking.next
        self._paths = _along(self._paths, token_id)
        return self._read_header(token_id)

    def _is_bare_header(self, token_id: int) -> bool:
        """Whether the text before the marker of a body is a header without a beginning; if so, its message begins."""
        if token_id != self._thinking.body.ids[0]:
            self._tail = (self._tail + self._bytes(token_id))[-MAX_TAIL:]
            return False
        found = self._bare.search(self._tail.decode(errors="replace")) if self._bare is not None else None
        if found is None:
            return False
        self._header, self._tail = found[0], b""
        self._begin_message()
        return True

    def _read_header(self, token_id: int) -> bool:
        """Take a token of a header, or text where a header should be, which is the answer."""
        mark = self._marks.get(token_id)
        text = mark if mark is not None else self._bytes(token_id).decode(errors="replace")
        if self._between and mark is None:
            if not text.strip():
                return True
            self.phase, self._header = "answer", ""
            self._tail = text.lstrip().encode() if self._bare is not None else b""
            return False
        self._between = False
        self._header += text
        if len(self._header) > MAX_HEADER:
            self.phase, self._header = "answer", ""
            return False
        return True

    def _begin_message(self) -> None:
        header, self._header, self._between = self._header, "", False
        if self._thinks.search(header):
            self.phase = "think"
        else:
            self.phase = "answer" if self._answers.search(header) else "preamble"


def _along(paths: Paths, token_id: int) -> Paths:
    """Keep the ways that go on with a token, what is left of them; the others are empty."""
    thinking, answer = (path[1:] if path[:1] == (token_id,) else () for path in paths)
    return thinking, answer


def make_gate(thinking: Thinking, tokens: Sequence[bytes], *, constrained: bool) -> ReasoningGate:
    """Return the gate of a request; see `ReasoningGate`."""
    if isinstance(thinking, MessageThinking):
        return MessageGate(thinking, tokens, constrained=constrained)
    return MarkerGate(thinking, tokens, constrained=constrained)
