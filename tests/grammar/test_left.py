"""What compiling and routing leave in memory: nothing of the last work, little of the last texts."""

from __future__ import annotations

import threading
import weakref
from functools import partial

from dovetail.grammar.compile.jobs import Workers
from dovetail.sdk.schemas.schema import MAX_CHARS, LRUMemo


class Held:
    """Stands for a grammar."""


def test_a_thread_that_waits_holds_nothing_of_its_last_work() -> None:
    """A large grammar would stay in memory until the next one is compiled."""
    workers, done = Workers("test", 1), threading.Event()
    held = Held()
    gone = threading.Event()
    weakref.finalize(held, gone.set)

    def work(_: Held) -> None:
        done.set()

    workers.put("", partial(work, held))
    del held
    assert done.wait(30)
    assert gone.wait(30)
    workers.close()


def test_of_long_texts_only_the_last_stays() -> None:
    """Short ones stay beside each other; what was made of a long one goes as soon as another comes."""
    made: list[str] = []

    def make(source: str) -> str:
        made.append(source[:1])
        return source.upper()

    recent = LRUMemo(make)
    long, texts = "l" * MAX_CHARS, ["a", "b", "c"]
    for text in (*texts, *texts, long, long, "a", long):
        assert recent(text) == text.upper()
    assert made == ["a", "b", "c", "l", "a", "l"]
    for number in range(10):
        recent(str(number))
    made.clear()
    for number in range(10):
        recent(str(number))
    assert len(made) == 10
    recent("9")
    assert len(made) == 10
