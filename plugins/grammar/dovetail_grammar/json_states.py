"""Where a JSON text stands in its schema, told so that equal states are followed by equal texts.

A library computes a mask from all that it knows of a text, and does not say which texts it knows the same of. A schema
whose properties do not depend on each other (`is_local`) leaves little to know: which containers are open, which keys
the open objects have, how many items the open arrays, and what of the present string or number is written. What was
closed says nothing any more. Of strings and numbers that are free but for their length, only that length counts.

A state is found token by token. States are interned, and each knows those that followed it, so that a token that came
before costs one look-up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dovetail_grammar.json_reader import AFTER, START, STRING, Place, Reader, schemas_at
from dovetail_grammar.local_schemas import Made, Schemas

MAX_STATES, MAX_STEPS = 4096, 65536
"""States of a grammar that are kept, and steps from one to another: about a kilobyte and a hundred bytes each."""


class Shared:
    """What states have in common that equal texts follow: the mask, if it is kept.

    Attributes:
        slot: Where it is kept; -1 for nowhere.
        is_used: It was asked for since the keeper last looked.
    """

    __slots__ = ("is_used", "slot")

    def __init__(self) -> None:
        self.slot = -1
        self.is_used = False


class State:
    """A place in a text, exactly: it can be gone on from.

    Attributes:
        place: What tells it from others; its form is that of the `States` that made it.
        shared: Of all states that differ only in counts which are far from every bound.
        following: By token, the states that have followed; None where the text can no longer be told from others.
    """

    __slots__ = ("following", "place", "shared")

    def __init__(self, place: Any, shared: Shared) -> None:
        self.place, self.shared = place, shared
        self.following: dict[int, State | None] = {}


class States(ABC):
    """The states of one grammar's texts."""

    def __init__(self, start: Any) -> None:
        """`start`: the place at which texts begin."""
        self._first = start
        self._begin()

    def _begin(self) -> None:
        """Forget all states; whoever stands in one can go on from it."""
        self._states: dict[Any, State] = {}
        self._shared: dict[Any, Shared] = {}
        self._num_steps = 0
        self.start = self._interned(self._first)

    def after(self, state: State, token_id: int) -> State | None:
        """Return the state behind a token that the grammar allows; None where that is not followed any more."""
        try:
            return state.following[token_id]
        except KeyError:
            place = self.read(state.place, token_id)
            if len(self._states) >= MAX_STATES or self._num_steps >= MAX_STEPS:
                self._begin()
            found = None if place is None else self._interned(place)
            state.following[token_id] = found
            self._num_steps += 1
            return found

    @abstractmethod
    def read(self, place: Any, token_id: int) -> Any | None:
        """Return the place behind a token; None where the token is not what was expected."""

    @abstractmethod
    def blurred(self, place: Any) -> Any:
        """Return what of a place the next token can depend on."""

    def _interned(self, place: Any) -> State:
        found = self._states.get(place)
        if found is None:
            shared = self._shared.setdefault(self.blurred(place), Shared())
            found = self._states[place] = State(place, shared)
        return found


class JsonStates(States):
    """The states of one schema's texts. A place: the open containers, the phase, and its part.

    The part is what is written so far of a key, a string or a number, else the whitespace since the last of them.
    """

    def __init__(self, schema: Any, tokens: Sequence[bytes], longest: int) -> None:
        """`longest`: bytes of the longest token, beyond which no mask looks. The schema must be `is_local`."""
        self._root = Made(schema).of([schema])
        self._tokens, self._longest = tokens, longest
        super().__init__(START)

    def read(self, place: Place, token_id: int) -> Place | None:
        """Go on, byte by byte."""
        data = self._tokens[token_id]
        found = self.read_text(place, data)
        return None if found is None or not data or found[1] < len(data) else found[0]

    def read_text(self, place: Place, data: bytes) -> tuple[Place, int] | None:
        """Return the place behind a text, and how far it was read: up to its end, or to a character that cannot be."""
        reader = Reader(self._root, place)
        until = reader.read(data)
        return None if until is None else ((tuple(reader.frames), reader.phase, reader.part), until)

    def behind(self, place: Place) -> bytes | None:
        """Return the whitespace behind a text that is complete; None of one that is not."""
        frames, phase, part = place
        return part if not frames and phase == AFTER else None

    def blurred(self, place: Place) -> Any:
        """Leave out how far counts are from bounds that no token reaches."""
        frames, phase, part = place
        near = [
            (schemas, said if isinstance(said, tuple) else self._distances(said, schemas)) for schemas, said in frames
        ]
        if phase == STRING and isinstance(part, tuple):
            count, rest = part
            part = (self._far(count, schemas_at(self._root, frames).lengths), rest)
        return tuple(near), phase, part

    def _distances(self, count: int, schemas: Schemas) -> Any:
        return count if schemas.has_places else self._far(count, schemas.counts)

    def _far(self, count: int, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return how far a count is from its bounds, up to what one token can make of it."""
        return tuple(max(-1, min(bound - count, self._longest + 1)) for bound in bounds)
