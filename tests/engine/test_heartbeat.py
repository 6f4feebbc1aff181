"""When an engine counts as hanging."""

from __future__ import annotations

import pytest

from dovetail.engine.watchdog import EngineWatchdog


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def looks(
    heart: EngineWatchdog, clock: Clock, num: int, news: int, step: int = 0, *, is_busy: bool = True
) -> float | None:
    """Look so many times, at the proper interval; the last outcome."""
    late_s = None
    for _ in range(num):
        clock.now += heart.look_s
        late_s = heart.look(news, step, is_busy=is_busy)
    return late_s


def test_a_busy_engine_has_the_limit_or_ten_recent_steps() -> None:
    """Thirty seconds at least; an engine whose last step took 31 s has 310."""
    clock = Clock()
    heart = EngineWatchdog(30.0, clock)
    assert looks(heart, clock, 31, 0, 0) is None
    assert looks(heart, clock, 1, 0, 0) == pytest.approx(31)
    assert looks(heart, clock, 1, 1, 1) is None
    assert looks(heart, clock, 315, 1, 1) is None
    assert looks(heart, clock, 15, 1, 1) is not None


def test_an_idle_engine_may_be_silent() -> None:
    """Nothing is due from it, and its time begins with the work."""
    clock = Clock()
    heart = EngineWatchdog(30.0, clock)
    assert looks(heart, clock, 1000, 0, is_busy=False) is None
    assert looks(heart, clock, 30, 0) is None
    assert looks(heart, clock, 2, 0) is not None


@pytest.mark.parametrize("gap_s", [60.0, 8 * 3600.0, -3600.0])
def test_time_in_which_this_process_stood_still_does_not_count(gap_s: float) -> None:
    """After a stop of this process, or a jump of the clock, the engine has nearly all of its time left."""
    clock = Clock()
    heart = EngineWatchdog(30.0, clock)
    assert looks(heart, clock, 5, 0) is None
    clock.now += gap_s
    assert heart.look(0) is None
    assert looks(heart, clock, 22, 0) is None
