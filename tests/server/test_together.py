"""Work of several requests that threads do at once while the event loop waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dovetail_server.http.auth import CALLER
from dovetail_server.reading.together import Together

WHO: ContextVar[int] = ContextVar("who")


def gathered(works: list[Callable[[], Any]], together: Together) -> list[Any]:
    """What comes of works that arrive in one round."""

    async def main() -> list[Any]:
        return await asyncio.gather(*map(together.run, works), return_exceptions=True)

    return asyncio.run(main())


def test_works_of_a_round_are_done_at_once() -> None:
    """Behind the first, each of two waits for the other, which only another thread can be."""
    both = threading.Barrier(2)
    assert sorted(gathered([lambda: -1, *[lambda: both.wait(60)] * 2], Together(2, 1.0))) == [-1, 0, 1]


def test_keys_have_turns() -> None:
    """What one sends next waits for no more than one work of another's thousand."""
    done: list[str] = []

    async def asked(together: Together, owner: str) -> None:
        CALLER.set(replace(CALLER.get(), owner=owner))
        await together.run(lambda: done.append(owner))

    async def main() -> None:
        together = Together(1, 1.0)
        await asyncio.gather(*(asked(together, owner) for owner in ["a"] * 1000 + ["b"] * 2))

    asyncio.run(main())
    assert [at for at, owner in enumerate(done) if owner == "b"] == [2, 4]


def test_a_lone_work_needs_no_thread() -> None:
    """The loop's own does it, at once; so do all with a single core."""
    here = threading.current_thread()
    assert gathered([threading.current_thread], Together(8, 1.0)) == [here]
    assert gathered([threading.current_thread] * 3, Together(1, 1.0)) == [here] * 3


@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_gets_its_own(num_threads: int) -> None:
    """Its result, what it raises, whatever that is, and the context that it came in."""

    def fails(error: BaseException) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    async def asked(together: Together, at: int) -> int:
        WHO.set(at)
        return await together.run(WHO.get)

    async def main() -> list[Any]:
        together = Together(num_threads, 1.0)
        wanted: list[Coroutine[Any, Any, Any]] = [asked(together, at) for at in range(20)]
        wanted += [together.run(fails(error)) for error in (ValueError("x"), StopIteration(), TimeoutError("y"))]
        return await asyncio.gather(*wanted, return_exceptions=True)

    found = asyncio.run(main())
    assert found[:20] == list(range(20))
    assert [type(each) for each in found[20:]] == [ValueError, RuntimeError, TimeoutError]


def test_who_has_left_is_passed_over() -> None:
    """Its work is not done, and the others get theirs."""
    done: list[int] = []

    async def main() -> None:
        together = Together(2, 1.0)
        tasks = [asyncio.ensure_future(together.run(lambda at=at: done.append(at))) for at in range(5)]  # type: ignore[misc]
        asyncio.get_running_loop().call_soon(lambda: [tasks[at].cancel() for at in (1, 3)])
        await asyncio.wait(tasks)

    asyncio.run(main())
    assert sorted(done) == [0, 2, 4]


def test_a_round_ends_after_its_time() -> None:
    """Of ten works of 2 ms, rounds of 3 ms do two threads' at most twice; others have their turn between."""
    rounds: list[int] = []

    async def main() -> None:
        together = Together(2, 0.003)
        loop, num_done, is_over = asyncio.get_running_loop(), 0, False

        def note() -> None:
            rounds.append(num_done)
            if not is_over:
                loop.call_soon(note)

        async def one() -> None:
            nonlocal num_done
            await together.run(lambda: time.sleep(0.002))
            num_done += 1

        loop.call_soon(note)
        await asyncio.gather(*(one() for _ in range(10)))
        is_over = True

    asyncio.run(main())
    assert max(after - before for before, after in pairwise(rounds)) <= 4


def test_a_machine_without_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests fail, and do not wait for ever."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    found = gathered([int, int, int], Together(2, 1.0))
    assert [str(each) for each in found] == ["0", *["can't start new thread"] * 2]
