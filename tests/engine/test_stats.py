"""The engine's throughput as it is told: of the time in which it worked, and 0 while it does not."""

from __future__ import annotations

import pytest
from test_times import World

from dovetail.engine import stats_log


def test_the_throughput_is_of_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in each second of work: 0 before and after, and an hour's pause lowers no rate."""
    world = World(monkeypatch)
    monkeypatch.setattr(stats_log.time, "perf_counter", world.clock)
    world.core.stats_log = stats_log.StatsLog(interval=1000)  # no line is logged: the rate does not wait for one
    assert world.core.stats().gen_throughput == 0.0
    for pause_s in (0.0, 3600.0):
        world.clock.now += pause_s
        world.submit(1, 4, 12)
        for _ in range(3):
            world.step()
        assert world.core.stats().gen_throughput == pytest.approx(1.0, rel=0.5)
        world.drain()
        assert world.core.stats().gen_throughput == 0.0
