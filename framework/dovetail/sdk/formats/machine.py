"""`IncrementalParser`: what every output parser shares, from tokens to markers and runs of text, whatever these mean.

Two stations, the same for all formats; the third, what a marker does and where text goes, is the subclass's:

1. *Decoding*: tokens to text; a character whose bytes are split comes with its last byte.
2. *Markers*: a marker that is a token matches by its id; another by an automaton over the text, which holds back the
   longest end of the text that may still become one. Which markers count depends on the phase (see `layout.py`).

Adjacent text of one kind becomes one event. All work is linear in the output.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from dovetail.base.identity import token_hex
from dovetail.contracts.output import ContentDelta, Event, ReasoningDelta, State, ToolStart
from dovetail.sdk.formats.detokenizer import Detokenizer, TokenTables
from dovetail.sdk.formats.layout import FormatLayout, PhaseMarkers, ReplyPhase
from dovetail.sdk.formats.place import Place
from dovetail.sdk.formats.plain import Plain, plain_tables, plain_tokens

_SPACE = re.compile(r"\s+")
THINKS = frozenset([ReplyPhase.IN, ReplyPhase.ASIDE])


def new_call_id() -> str:
    """Return a fresh tool call id."""
    return f"call_{token_hex(12)}"


class IncrementalParser(ABC):
    """The stations that do not depend on the format. See `FormatParser` for the arguments.

    Attributes:
        reasoning_tokens: Tokens generated inside thinking so far, markers excluded. A token belongs where its first
            character does. Text without ids counts none.
        num_chars: Characters of the tokens fed so far, markers that are tokens not included.
        marker_ids: Ids of the format's markers that are tokens.
    """

    def __init__(
        self,
        layout: FormatLayout,
        tokenizer: TokenTables | None,
        *,
        phase: ReplyPhase,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.reasoning_tokens = 0
        self.num_chars = 0
        self._layout = layout
        self._by_ids = layout.by_ids
        self.marker_ids = layout.marker_ids
        self._decoder = None
        self._plain: dict[ReplyPhase, Plain] = {}
        self._passing: Plain | None = None
        """The tokens that go out as they are, while nothing is held back anywhere; None: none does."""
        self._passing_tables: dict[tuple[ReplyPhase, str], Plain] = {}
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._decoder = Detokenizer(
                tokenizer, skip_special_tokens=skip_special_tokens, keep=layout.marker_ids | layout.kept
            )
            skipped = self._decoder.skipped
            self._plain = plain_tables(tokenizer, layout.by_ids, skipped)
        self._keep_markers = keep_markers
        self._make_id = make_id
        self._num_calls = 0
        self._priming = False
        self._phase = phase
        self._views = layout.by_ids
        # Station 2: text that may become a marker, and the offsets in the output where tokens start that are not
        # attributed yet.
        self._held = ""
        self._state = 0
        self._seen = 0
        self._starts: deque[int] = deque()
        self._unread = ""
        """Text to read once more, as the third station found that it belongs to none of what it had begun."""
        self.place = Place()
        """Where the text stands that the present phase gave out."""
        # Output.
        self._events: list[Event] = []
        self._run_kind: type[ReasoningDelta] | type[ContentDelta] = ContentDelta
        self._run: list[str] = []
        self._reported = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as known."""
        return self._phase is ReplyPhase.IN

    @property
    @abstractmethod
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker or its newlines."""

    @abstractmethod
    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended to the prompt, before anything is fed."""

    def feed(self, token_ids: Sequence[int], text: str | None = None) -> list[Event]:
        """Take new tokens, or text if there are no ids."""
        if self._passing is not None:
            if len(token_ids) == 1 and text is None and (piece := self._passing[token_ids[0]]):
                return self._pass(piece)
            self._passing = None
        if text is not None and not token_ids:
            self._use(self._layout.by_text)
            self._push(text)
            return self._drain()
        if self._views is not self._by_ids:
            self._use(self._by_ids)
        decoder = self._decoder
        if decoder is None:
            raise ValueError("a parser without a tokenizer takes text, not token ids")
        for token_id in token_ids:
            piece = self._plain[self._phase][token_id]
            if not piece or self._held or self._starts or decoder.pending:
                self._token(token_id, decoder)
                continue
            self.num_chars += len(piece)
            if self._phase in THINKS:
                self.reasoning_tokens += 1
            self._sink(piece)
            if self._unread:
                self._push("")
        if not (self._held or self._starts or decoder.pending):
            self._passing = self._find_passing()
        return self._drain() if self._run or self._events else []

    def _find_passing(self) -> Plain | None:
        """Return the tokens that mean nothing but text now: the first two stations hold nothing back."""
        return None

    def _pass(self, piece: str) -> list[Event]:
        """Return the events of a token that means nothing but text."""
        self.num_chars += len(piece)
        if self._phase is ReplyPhase.TOOL:
            return self._pass_call(piece)
        self.place.last = piece
        if self._phase is not ReplyPhase.IN:
            return [ContentDelta(piece)]
        self.reasoning_tokens += 1
        num_tokens, self._reported = self.reasoning_tokens - self._reported, self.reasoning_tokens
        return [ReasoningDelta(piece, num_tokens)]

    def _pass_call(self, piece: str) -> list[Event]:
        """As `_pass`, in calls."""
        self._sink(piece)
        if self._unread:
            self._push("")
        return self._drain()

    def _passing_table(self, holds: str = "") -> Plain | None:
        """Return the plain tokens of this phase without a character of `holds`."""
        found = self._passing_tables.get((self._phase, holds))
        if found is None and self._tokenizer is not None and self._decoder is not None:
            found = plain_tokens(self._tokenizer, self._by_ids[self._phase], self._decoder.skipped, holds)
            self._passing_tables[self._phase, holds] = found
        return found

    def _token(self, token_id: int, decoder: Detokenizer) -> None:
        """Take a token that is a marker, or part of one or of a character, or may be."""
        view = self._views[self._phase]
        role = view.ids.get(token_id)
        if role is not None and self._take_token(token_id, decoder):
            if self._unread:
                self._push("")
            return
        piece = decoder.push(token_id)
        self.num_chars += len(piece)
        if view.matcher is None and not view.bare:
            if self._phase in THINKS:
                self.reasoning_tokens += 1
            if piece:
                self._sink(piece)
                if self._unread:
                    self._push("")
        else:
            self._starts.append(self._seen)
            self._push(piece)

    def finish(self, reason: str) -> list[Event]:
        """Give out what was held back. A tool call that was open is complete if the model stopped by itself."""
        if self._decoder is not None and (rest := self._decoder.flush()):
            self._push(rest)
        self._release()
        while self._starts:
            self._starts.popleft()
            self.reasoning_tokens += self._phase in THINKS
        self._finish(cut=reason != "stop")
        return self._drain()

    @abstractmethod
    def _take(self, role: enum.Enum, marker: str) -> bool:
        """Act on a marker. False: it is literal text here."""

    @abstractmethod
    def _sink(self, text: str) -> None:
        """Take text of the present phase."""

    @abstractmethod
    def _finish(self, *, cut: bool) -> None:
        """Give out what the third station holds back: the output is over, and `cut` short or not."""

    def _new_call(self, name: str, call_id: str | None = None) -> ToolStart:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        # An escape may have made half of a surrogate pair of a name, which no reply can carry.
        return ToolStart(index, call_id or self._make_id(), name.encode(errors="replace").decode())

    def _prime(self, prompt_tail: str) -> None:
        """Push the prompt's tail through the stations as text and forget what it gave."""
        self._priming = True
        self._views = self._layout.by_text
        self._push(prompt_tail)
        self._held, self._state = "", 0
        self._drain()
        self._priming = False

    # Station 2: markers.

    def _use(self, views: object) -> None:
        if views is not self._views:
            self._release()
            self._views = self._layout.by_ids if views is self._layout.by_ids else self._layout.by_text

    def _take_token(self, token_id: int, decoder: Detokenizer) -> bool:
        """Take a marker token. False: it is literal here."""
        if rest := decoder.flush():
            self._push(rest)
        self._release()
        role = self._views[self._phase].ids.get(token_id)
        return role is not None and self._take(role, self._layout.marker_text[token_id])

    def _push(self, text: str) -> None:
        """Take text; find the markers in it that are matched in the text."""
        if self._held and (found := self._views[self._phase].matcher) is not None:
            state = found.follow(text, self._state)
            if state:
                self._held, self._state = self._held + text, state
                self._seen += len(text)
                return
        views, buffer = self._views, self._held + text
        begin, scanned, state = 0, len(self._held), self._state
        self._held, self._state = "", 0
        self._seen += len(text)
        base = self._seen - len(buffer)
        while True:
            view = self._views[self._phase]
            if view.bare and (bare := self._bare_at(view, buffer, begin)) >= 0:
                self._give(buffer[begin:bare], base + bare)
                begin = scanned = bare + 1
                state = 0
                self._take_spelled(view, buffer[bare], base + begin)
                continue
            if view.matcher is None:
                end = cut = len(buffer)
                state = length = 0
            else:
                end, state, length = view.matcher.scan(buffer, scanned, state)
                cut = end - (length or (state and view.matcher.held(state)))
            self._give(buffer[begin:cut], base + cut + (view.matcher is None))
            if not self._unread:
                if not length:
                    self._held, self._state = buffer[cut:], state
                    if self._views is not views:
                        self._views = views
                        self._hold_again()
                    return
                self._take_spelled(view, buffer[cut:end], base + end)
                begin = scanned = end
            if self._unread:
                buffer, self._unread = self._unread + buffer[max(begin, cut) :], ""
                begin = scanned = state = 0
                base = self._seen - len(buffer)
                self._views = self._layout.by_text  # a marker that was a token is text in it

    def _hold_again(self) -> None:
        """Hold back what may become one of the markers that count now."""
        held, self._held, self._state = self._held, "", 0
        self._seen -= len(held)
        if held:
            self._push(held)

    @property
    def _begins_answer(self) -> bool:
        """Whether nothing but space has come of an answer that may begin with a bare call."""
        return False

    def _bare_at(self, view: PhaseMarkers, text: str, begin: int, *, is_over: bool = False) -> int:
        """Return where a bare character begins an answer; -1: nowhere, or a longer marker begins there or before.

        Args:
            view: The markers that count.
            text: What was not given out yet, from `begin` on.
            begin: See `text`.
            is_over: Nothing follows the text that could complete a marker.
        """
        if not self._begins_answer:
            return -1
        space = _SPACE.match(text, begin)
        at = begin if space is None else space.end()
        if at == len(text) or text[at] not in view.bare:
            return -1
        for marker in view.roles:
            first = max(begin, at - len(marker)) if marker[0].isspace() else at
            for start in range(first, at + 1):
                part = text[start : start + len(marker)]
                is_whole = part == marker and len(marker) > 1
                if is_whole or (not is_over and part != marker and marker.startswith(part)):
                    return -1
        return at

    def _take_spelled(self, view: PhaseMarkers, marker: str, end: int) -> None:
        """Take a marker found in the text, which ends at offset `end`, or give it out as text."""
        if self._take(view.roles[marker], marker):
            while self._starts and self._starts[0] < end:
                self._starts.popleft()
        else:
            self._give(marker, end)

    def _release(self) -> None:
        """Give out text that was held back for a marker that did not come."""
        held, self._held, self._state = self._held, "", 0
        view = self._views[self._phase]
        bare = self._bare_at(view, held, 0, is_over=True) if held and view.bare else -1
        if bare < 0:
            self._give(held, self._seen)
            if self._unread:
                self._push("")
                self._release()
            return
        rest = held[bare + 1 :]
        self._seen -= len(rest)
        self._give(held[:bare], self._seen - 1)
        self._take_spelled(view, held[bare], self._seen)
        self._push(rest)
        self._release()

    def _give(self, text: str, end: int) -> None:
        """Give text up to offset `end` of the output to the phase's sink, and attribute its tokens."""
        while self._starts and self._starts[0] < end:
            self._starts.popleft()
            self.reasoning_tokens += self._phase in THINKS
        if text:
            self._sink(text)

    # Events, adjacent text of one kind as one.

    def _text(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if not text:
            return
        if kind is not self._run_kind:
            self._end_run()
            self._run_kind = kind
        self._run.append(text)

    def _event(self, event: Event) -> None:
        if self._run:
            self._end_run()
        self._events.append(event)

    def _end_run(self) -> None:
        run = self._run
        if not run:
            return
        text = run[0] if len(run) == 1 else "".join(run)
        run.clear()
        if self._run_kind is ContentDelta:
            self._events.append(ContentDelta(text))
        else:
            self._events.append(ReasoningDelta(text, self.reasoning_tokens - self._reported))
            self._reported = self.reasoning_tokens

    def _drain(self) -> list[Event]:
        if self._run:
            self._end_run()
        events = self._events
        if not events:
            return []
        self._events = []
        return [] if self._priming else events
