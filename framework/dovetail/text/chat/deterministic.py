"""What a chat template sees of time and chance: the same in every render for one prompt.

A prompt is rendered more than once to tell what the template appended to it, and a format is read off several renders.
A template that writes the time of day, or draws lots, must not seem to say something else each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2.utils import pass_environment


class RenderState:
    """A time, and what is drawn from then on."""

    def __init__(self) -> None:
        self.now = datetime.now().astimezone()
        self._seed = random.getrandbits(64)
        self.restart()

    def restart(self) -> None:
        """Begin a render: it draws what others of this moment do."""
        self.chance = random.Random(self._seed)


_CURRENT: ContextVar[RenderState | None] = ContextVar("render_state", default=None)


@contextmanager
def frozen_render() -> Iterator[None]:
    """Render at one moment, within: the moment of now, or of an outer block."""
    token = _CURRENT.set(_CURRENT.get() or RenderState())
    try:
        yield
    finally:
        _CURRENT.reset(token)


def begin_render() -> None:
    """Draw the same lots as the other renders of this moment."""
    if (render_state := _CURRENT.get()) is not None:
        render_state.restart()


def strftime_now(pattern: str) -> str:
    """Write the time of the moment; the function that templates know."""
    return (_CURRENT.get() or RenderState()).now.strftime(pattern)


@pass_environment
def choice(environment: jinja2.Environment, values: Sequence[Any]) -> Any:
    """Draw one of several values; Jinja's filter `random`."""
    if not values:
        return environment.undefined("no value to draw from")
    return (_CURRENT.get() or RenderState()).chance.choice(values)
