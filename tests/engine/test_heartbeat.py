"""When an engine counts as hanging."""

from __future__ import annotations

import pytest

from dovetail_server.supervision.stall_logger import EngineWatchdog


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def looks(heart: EngineWatchdog, clock: Clock, num: int, news: int, *, is_busy: bool = True) -> float | None:
    """Look so many times, at the proper interval; the last outcome."""
    late_s = None
    for _ in range(num):
        clock.now += heart.look_s
        late_s = heart.look(news, is_busy=is_busy)
    return late_s


@pytest.mark.parametrize("limit_s", [0.5, 8.0, 30.0, 600.0])
def test_a_busy_engine_ends_within_the_limit(limit_s: float) -> None:
    """From the last progress on, which is seen two looks late; however long earlier steps took."""
    clock = Clock()
    heart = EngineWatchdog(limit_s, clock)
    for news in range(20):
        assert looks(heart, clock, int(0.8 * limit_s / heart.look_s), news) is None
    progress = clock.now
    clock.now += heart.look_s
    assert looks(heart, clock, 1, 20) is None
    while looks(heart, clock, 1, 20) is None:
        pass
    assert 0.8 * limit_s < clock.now - progress <= limit_s + heart.look_s / 1000


def test_an_idle_engine_may_be_silent() -> None:
    """Nothing is due from it, and its time begins with the work."""
    clock = Clock()
    heart = EngineWatchdog(30.0, clock)
    assert looks(heart, clock, 1000, 0, is_busy=False) is None
    assert looks(heart, clock, 27, 0) is None
    assert looks(heart, clock, 1, 0) is not None


@pytest.mark.parametrize("gap_s", [60.0, 8 * 3600.0, -3600.0])
def test_time_in_which_this_process_stood_still_does_not_count(gap_s: float) -> None:
    """After a stop of this process, or a jump of the clock, the engine has nearly all of its time left."""
    clock = Clock()
    heart = EngineWatchdog(30.0, clock)
    assert looks(heart, clock, 5, 0) is None
    clock.now += gap_s
    assert heart.look(0) is None
    assert looks(heart, clock, 19, 0) is None
