"""Where a JSON text stands in its schema, told so that equal states are followed by equal texts.

A library computes a mask from all that it knows of a text, and does not say which texts it knows the same of. A schema
whose properties do not depend on each other (`is_local`) leaves little to know: which containers are open, which keys
the open objects have, how many items the open arrays, and what of the present string or number is written. What was
closed says nothing any more. Of strings and numbers that are free but for their length, only that length counts.

A state is found token by token. States are interned, and each knows those that followed it, so that a token that came
before costs one look-up; in a free string, so does any other token of as many characters, and between values any other
whitespace of that length. How many items an array has is kept beside the state: it goes on alike at any number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dovetail.sdk.masks import Words
from dovetail_grammar.json_reader import (
    AFTER,
    IN_KEY,
    SCALARS,
    START,
    STRING,
    Change,
    Counts,
    Frame,
    JsonReader,
    Place,
    schemas_at,
)
from dovetail_grammar.local_schemas import Made, Schemas

MAX_STATES, MAX_STEPS = 4096, 65536
STATE_BYTES, STEP_BYTES = 1024, 256
"""What a state takes with its place and what it shares, and a step from it; measured."""
"""States of a grammar that are kept, and steps from one to another: about a kilobyte and a hundred bytes each."""
OTHER, TEXT, SPACE = 0, 1, 2
"""Kinds of places: within a free string, where characters are counted; between values; and any other."""

Step = tuple["TextState | None", Change | None]
"""What a token leads to, and what it does to counts. Without a state, the text can no longer be told from others."""
LOST: Step = (None, None)


class StateTokens:
    """The bytes of a vocabulary's tokens.

    Attributes:
        texts: `[V]`.
        longest: Bytes of the longest.
    """

    def __init__(self, texts: Sequence[bytes], longest: int) -> None:
        self.texts, self.longest = texts, longest
        self._alike: dict[int, tuple[int, int, int]] = {}

    def alike(self, kind: int, token_id: int) -> int:
        """Return a number below 0 that tokens share which do the same in all places of a kind; 0 for none."""
        found = self._alike.get(token_id)
        if found is None:
            data = self.texts[token_id]
            found = self._alike[token_id] = (0, -_num_plain(data), -len(data) if data.isspace() else 0)
        return found[kind]


def _num_plain(data: bytes) -> int:
    """Return how many characters bytes are which a string may hold as they are; 0 where some are not complete."""
    if b'"' in data or b"\\" in data:
        return 0
    try:
        return len(data.decode())
    except UnicodeDecodeError:
        return 0


class SharedMask:
    """What states have in common that equal texts follow: the mask, if it is kept.

    Attributes:
        slot: Where it is kept; -1 for nowhere.
        line: It, there.
        bits: Its bytes, of which one is had in a fourth of the time of a word of an array.
        is_used: It was asked for since the keeper last looked.
        forced: The tokens that must follow, once that was asked.
    """

    __slots__ = ("__weakref__", "bits", "forced", "is_used", "line", "slot")

    def __init__(self) -> None:
        self.slot = -1
        self.line: Words | None = None
        self.bits: memoryview | None = None
        self.is_used = False
        self.forced: list[int] | None = None


class TextState:
    """A place in a text, exactly but for counts of items: it can be gone on from.

    Attributes:
        place: What tells it from others; its form is that of the `States` that made it.
        kind: Of that place.
        shared: Of all states that differ only in counts which are far from every bound; None where items are counted.
        counted: The same by the counts of items.
        following: The steps from it, by token or by what is alike.
    """

    __slots__ = ("counted", "following", "kind", "place", "shared")

    def __init__(self, place: Any, kind: int, shared: SharedMask | None) -> None:
        self.place, self.kind, self.shared = place, kind, shared
        self.counted: dict[Counts, SharedMask] = {}
        self.following: dict[int, Step] = {}


class States(ABC):
    """The states of one grammar's texts."""

    def __init__(self, start: Any, tokens: StateTokens) -> None:
        """`start`: the place at which texts begin."""
        self._first, self._vocabulary = start, tokens
        self._begin()

    def _begin(self) -> None:
        """Forget all states; a text that is in one can continue from it."""
        self._states: dict[Any, TextState] = {}
        self._shared: dict[Any, SharedMask] = {}
        self._num_steps = 0
        self.start = self._interned(self._first)

    def end(self) -> None:
        """Release all states, once no text is read with them.

        States know each other. Without this their memory, and the masks that are kept for them, would wait for a full
        round of the garbage collector, which an engine rarely has.
        """
        for state in self._states.values():
            state.following.clear()
        self._states.clear()
        self._shared.clear()

    @property
    def num_bytes(self) -> int:
        """Memory that they take by now."""
        return STATE_BYTES * len(self._states) + STEP_BYTES * self._num_steps

    def after(self, state: TextState, token_id: int) -> Step:
        """Return the step that a token makes which the grammar allows."""
        following = state.following
        found = following.get(token_id)
        if found is not None:
            return found
        key = (state.kind and self._vocabulary.alike(state.kind, token_id)) or token_id
        if key < 0 and (found := following.get(key)) is not None:
            return found
        place, change = self.read(state.place, token_id) or LOST
        self._count()
        found = following[key] = LOST if place is None else (self._interned(place), change)
        return found

    def shared(self, state: TextState, counts: Counts) -> SharedMask:
        """Return what a state shares with others whose open arrays have `counts` items."""
        if state.shared is not None:
            return state.shared
        found = state.counted.get(counts)
        if found is None:
            self._count()
            pairs = zip(counts, self.arrays(state.place), strict=True)
            key = self.blurred(state.place), tuple(self._distances(count, schemas) for count, schemas in pairs)
            found = state.counted[counts] = self._shared.setdefault(key, SharedMask())
        return found

    def _count(self) -> None:
        """Note that something more is kept."""
        if len(self._states) >= MAX_STATES or self._num_steps >= MAX_STEPS:
            for state in self._states.values():
                state.following.clear()
            self._begin()
        self._num_steps += 1

    @abstractmethod
    def read(self, place: Any, token_id: int) -> tuple[Any, Change | None] | None:
        """Return the place behind a token, and what it does to counts; None where it is not what was expected."""

    @abstractmethod
    def blurred(self, place: Any) -> Any:
        """Return what of a place the next token can depend on."""

    @abstractmethod
    def arrays(self, place: Any) -> Sequence[Schemas]:
        """Return what may hold for each array that is open at a place."""

    @abstractmethod
    def kind(self, place: Any) -> int:
        """Return which tokens do the same at a place."""

    def _interned(self, place: Any) -> TextState:
        found = self._states.get(place)
        if found is None:
            is_counted = any(schemas.counts or schemas.has_places for schemas in self.arrays(place))
            shared = None if is_counted else self._shared.setdefault((self.blurred(place), ()), SharedMask())
            found = self._states[place] = TextState(place, self.kind(place), shared)
        return found

    def _distances(self, count: int, schemas: Schemas) -> Any:
        return count if schemas.has_places else self._far(count, schemas.counts)

    def _far(self, count: int, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return how far a count is from its bounds, up to what one token can make of it."""
        return tuple(max(-1, min(bound - count, self._vocabulary.longest + 1)) for bound in bounds)


class JsonStates(States):
    """The states of one schema's texts. A place: the open containers, the phase, and its part.

    The part is what is written so far of a key, a string or a number, else the whitespace since the last of them.
    """

    def __init__(self, schema: Any, tokens: StateTokens) -> None:
        """No mask looks further than the longest token. The schema must be `is_local`."""
        self._made = Made(schema)
        self._root = self._made.of([schema])
        super().__init__(START, tokens)

    def end(self) -> None:
        """Release what may hold at places, too."""
        super().end()
        self._made.end()

    def read(self, place: Place, token_id: int) -> tuple[Place, Change | None] | None:
        """Go on, byte by byte."""
        data = self._vocabulary.texts[token_id]
        found = self.read_text(place, data)
        return None if found is None or not data or found[2] < len(data) else found[:2]

    def read_text(self, place: Place, data: bytes) -> tuple[Place, Change | None, int] | None:
        """As `read`, of a text; and how far it was read: up to its end, or to a character that cannot be."""
        reader = JsonReader(self._root, place)
        until = reader.read(data)
        return None if until is None else (reader.place, reader.change, until)

    def behind(self, place: Place) -> bytes | None:
        """Return the whitespace behind a text that is complete; None of one that is not."""
        frames, phase, part = place
        return part if not frames and phase == AFTER else None

    def blurred(self, place: Place) -> Any:
        """Leave out how far a string's length is from bounds that no token reaches."""
        frames, phase, part = place
        if phase == STRING and isinstance(part, tuple):
            count, rest = part
            part = (self._far(count, schemas_at(self._root, frames).lengths), rest)
        return frames, phase, part

    def arrays(self, place: Place) -> Sequence[Schemas]:
        """Look at the frames."""
        return _arrays(place[0])

    def kind(self, place: Place) -> int:
        """Look at the phase."""
        frames, phase, part = place
        if phase == STRING:
            return TEXT if isinstance(part, tuple) and not part[1] else OTHER
        # A number may end in whitespace; around the whole text, it does not count alike.
        return SPACE if frames and phase not in (IN_KEY, SCALARS) else OTHER


def _arrays(frames: Sequence[Frame]) -> list[Schemas]:
    return [schemas for schemas, keys in frames if keys is None]
