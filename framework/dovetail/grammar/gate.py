"""`ThinkingGate`: follows thinking token by token, and says which tokens are the grammar's business.

It agrees with the output parser on the text side: a marker that is one added token matches by its id, any other in the
text, wherever tokens cut it. Where a marker of several tokens has to be forced or offered, its canonical ids are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.engine.messages import Thinking


class ThinkingGate:
    """One request's. See `contracts.reasoning.State` for the states.

    Attributes:
        state: `open`, `in` or `out`.
        reasoning_tokens: Tokens accepted inside thinking, markers excluded.
        rest: After the token that ended thinking: its bytes behind the marker, where the marker is spelled as text.
    """

    def __init__(self, thinking: Thinking, tokens: Sequence[bytes]) -> None:
        """Start at the prompt's end.

        Args:
            thinking: The request's.
            tokens: Bytes by token id; only looked at where a marker is not one token.
        """
        self.state: str = thinking.state
        self.reasoning_tokens = 0
        self.rest = b""
        self._start, self._end = thinking.start, thinking.end
        self._end_bytes = thinking.end.text.encode()
        self._tools = frozenset(thinking.tools)
        self._budget = thinking.budget
        self._tokens = tokens
        self._at = 0
        self._tail = b""
        self._past: list[tuple[str, int, bytes, int, bytes]] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is thinking."""
        return self.state == "in"

    @property
    def forced(self) -> int | None:
        """The one token that may follow: in the middle of the start marker, or of the end marker past the budget."""
        if self.state == "open" and self._at:
            return self._start.ids[self._at]
        if self.state == "in" and self._budget is not None and self.reasoning_tokens >= self._budget:
            return self._end.ids[self._at]
        return None

    @property
    def offered(self) -> int | None:
        """Beside what the grammar allows: the token that opens thinking."""
        if self.state != "open" or self._at or self._budget == 0 or not self._start.ids:
            return None
        return self._start.ids[0]

    @property
    def banned(self) -> int | None:
        """With a budget of nothing: the token that would open thinking."""
        if self.state == "open" and self._budget == 0 and len(self._start.ids) == 1:
            return self._start.ids[0]
        return None

    def accept(self, token_id: int) -> bool:
        """Take a token. True: it belongs to thinking or its markers; False: it is the answer's."""
        self._past.append((self.state, self._at, self._tail, self.reasoning_tokens, self.rest))
        self.rest = b""
        if self.state == "in":
            return self._think(token_id)
        if self.state == "open":
            if self._start.ids and token_id == self._start.ids[self._at] and self._budget != 0:
                self._at += 1
                if self._at == len(self._start.ids):
                    self.state, self._at, self._tail = "in", 0, b""
                return True
            self.state, self._at = "out", 0
        return False

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        if num_tokens:
            self.state, self._at, self._tail, self.reasoning_tokens, self.rest = self._past[-num_tokens]
            del self._past[-num_tokens:]

    def _think(self, token_id: int) -> bool:
        if token_id in self._tools:
            self.state = "out"
            return False
        forced = self.forced
        if forced is not None and token_id == forced:
            self._at += 1
            if self._at == len(self._end.ids):
                self.state, self._at = "out", 0
            return True
        if len(self._end.ids) == 1:
            if token_id == self._end.ids[0]:
                self.state = "out"
                return True
        elif self._ends_in_text(token_id):
            self.state = "out"
            return True
        self.reasoning_tokens += 1
        return True

    def _ends_in_text(self, token_id: int) -> bool:
        text = self._tail + self._tokens[token_id] if token_id < len(self._tokens) else self._tail
        place = text.find(self._end_bytes)
        if place >= 0:
            self.rest = text[place + len(self._end_bytes) :]
            return True
        self._tail = text[max(0, len(text) - len(self._end_bytes) + 1) :]
        return False
