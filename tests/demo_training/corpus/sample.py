"""What a skill produces: one exchange to teach, with the keys that decide whether it is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeVar

Message = dict[str, Any]
T = TypeVar("T")

HELD_OUT_ONE_IN: Final = 25
_SALT: Final = "dovetail-demo-2"


def is_held_out(key: str) -> bool:
    """Whether `key` belongs to the held-out split; a pure function of the text of the key."""
    digest = hashlib.blake2b(f"{_SALT}|{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


@dataclass
class Sample:
    """One exchange: what is asked, what is answered, and how the answer is checked.

    Attributes:
        skill: The name under which the evaluation reports it.
        ask: The last user message, or the prompt of a raw completion.
        answer: The visible text of the answer.
        thought: The reasoning that precedes the answer when thinking is on.
        keys: Texts that identify the item; if one is held out, so is the sample;
            an empty key is always taught.
        history: Messages before `ask` (system message included).
        after: Messages after `ask`, for answers that follow a tool call.
        tools: Function schemas in the OpenAI format.
        calls: The tool calls of the answer, as `{"name": ..., "arguments": ...}`.
        raw: A raw completion: no chat template around `ask`.
        think: Whether thinking is on; None lets the dressing decide.
        expect: Texts that a right answer contains; none means that `check` decides.
        check: A rule for answers that no fixed text can judge.
        plain: Leave the wording of `ask` alone (copying tasks, documented lines).
        can_raw: The exchange also makes sense as a raw completion.
        can_tools: Unrelated tools may be attached.
        can_follow: Turns of other skills may stand before it.
        given: The start of the answer that stands in the prompt, as where a grammar leaves no choice: not learned.
    """

    skill: str
    ask: str
    answer: str
    thought: str = ""
    keys: tuple[str, ...] = ()
    history: list[Message] = field(default_factory=list)
    after: list[Message] = field(default_factory=list)
    tools: list[Message] | None = None
    calls: list[Message] | None = None
    raw: bool = False
    think: bool | None = None
    expect: tuple[str, ...] = ()
    check: Callable[[str], bool] | None = None
    plain: bool = False
    can_raw: bool = True
    can_tools: bool = True
    can_follow: bool = True
    given: str = ""

    @property
    def held_out(self) -> bool:
        """Whether one of the keys is in the held-out split."""
        return any(key and is_held_out(key) for key in self.keys)


Skill = Callable[[Random], Sample]


def pick(rng: Random, options: Sequence[T]) -> T:
    """Returns one of `options`, drawn evenly."""
    return options[int(rng.random() * len(options))]


def pick_skewed(rng: Random, options: Sequence[T], power: float = 2.0) -> T:
    """Returns one of `options`, the early ones more often."""
    return options[int(rng.random() ** power * len(options))]


def key_of(*parts: object) -> str:
    """Joins the parts that identify an item into the text of a key."""
    return "|".join(str(part) for part in parts)


def words(text: str) -> list[str]:
    """Returns the words of a table that is written as running text."""
    return text.split()


def capitalised(text: str) -> str:
    """Returns `text` with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def joined(items: Sequence[str]) -> str:
    """Joins as prose: 'a', 'a and b', 'a, b and c'."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
