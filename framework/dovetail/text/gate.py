"""`Gate`: follows a choice's thinking on token ids, in the engine: how many tokens it takes, and when it is over.

The gate is the output parser of the same `FormatSpec`, its text thrown away, with its state kept for each of the last
tokens; so the two agree after every token, whatever the format, and `rollback` restores what was. Once thinking is over
for good, a token costs nothing.

How an engine uses it for a request with a grammar:

| | next token |
|---|---|
| `gate.answering` | masked by the grammar, which has seen every token since `accept` returned True |
| `gate.in_reasoning` | free |
| `gate.may_think` | free, or masked by the grammar together with `gate.start_ids`: whichever comes |

A grammar starts behind the token for which `accept` returned True. That token is the end marker of the thinking, or,
where the model answered without thinking, the first token of the answer. (Without a mask, a model may begin to think in
the middle of such an answer; then `accept` returns True again behind that thought.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from dovetail.contracts.reasoning import FormatSpec
from dovetail.contracts.tools import NewCall, ToolBody, ToolEvent
from dovetail.text.machine import Machine
from dovetail.text.output import make_parser
from dovetail.text.tokenizer import Tokenizer

MAX_ROLLBACK = 256
"""Most tokens that `rollback` takes back at once."""


class _Discard(ToolBody):
    """Reads a tool section without looking at it."""

    def __init__(self, new_call: NewCall) -> None:
        self._new_call = new_call

    def feed(self, text: str) -> list[ToolEvent]:
        return []

    def close(self) -> list[ToolEvent]:
        return []


class Gate:
    """The `ReasoningGate` of a `FormatSpec`, for one choice."""

    def __init__(self, spec: FormatSpec, tokenizer: Tokenizer, prompt_tail: str | None = None) -> None:
        """Prepare.

        Args:
            spec: The format, as the output parser gets it.
            tokenizer: The model's.
            prompt_tail: What the template appended to the prompt; None where no template rendered it.
        """
        if spec.tools is not None:
            spec = replace(spec, tools=replace(spec.tools, body=_Discard))
        self._parser: Machine = make_parser(spec, tokenizer)
        if prompt_tail is not None:
            self._parser.prime(prompt_tail)
        self._history: deque[tuple[dict[str, Any], bytes]] = deque(maxlen=MAX_ROLLBACK)
        self._now = _state_of(self._parser)
        start = None if spec.reasoning is None else tokenizer.added_tokens.get(spec.reasoning.start)
        self.start_ids: tuple[int, ...] = () if start is None else (start,)
        """Tokens that open thinking, where one token does."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens generated inside thinking so far, markers excluded."""
        return self._parser.reasoning_tokens

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token continues the thinking, as far as known."""
        return self._parser.in_reasoning

    @property
    def may_think(self) -> bool:
        """Whether nothing but whitespace was written yet and the model may open its thinking with the next token."""
        return self._parser.may_think

    @property
    def answering(self) -> bool:
        """Whether the answer has begun."""
        return self._parser.answering

    def accept(self, token_id: int) -> bool:
        """Take one token. True where a grammar starts to hold behind it."""
        parser = self._parser
        self._history.append(self._now)
        if parser.settled:
            return False
        before = parser.answering
        parser.feed((token_id,))
        parser.forget()
        self._now = _state_of(parser)
        return not before and parser.answering

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens.

        Raises:
            ValueError: More than were accepted, or than `MAX_ROLLBACK`.
        """
        if num_tokens > len(self._history):
            raise ValueError(f"cannot take back {num_tokens} tokens; the last {len(self._history)} are remembered")
        for _ in range(num_tokens):
            self._now = self._history.pop()
        if num_tokens:
            _restore(self._parser, self._now)


def _state_of(parser: Machine) -> tuple[dict[str, Any], bytes]:
    """Copy what a machine remembers. Its containers are empty then, except for the offsets of undecided tokens."""
    state = vars(parser).copy()
    state["_starts"] = state["_starts"].copy()
    return state, parser.undecoded


def _restore(parser: Machine, saved: tuple[dict[str, Any], bytes]) -> None:
    state, undecoded = saved
    vars(parser).update(state)
    vars(parser)["_starts"] = state["_starts"].copy()
    parser.undecoded = undecoded
