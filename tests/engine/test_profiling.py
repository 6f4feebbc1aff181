"""From when to when a profile is recorded, whatever goes wrong with it."""

from __future__ import annotations

import pytest

from dovetail.engine import profiling as module
from dovetail.engine.profiling import Profiling
from dovetail.messages import ProfileSpec
from dovetail.messages.executor import ProfileError


class Recorder:
    """An executor's part, as far as it is asked."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fails = ""

    def start_profile(self, spec: ProfileSpec) -> None:
        self._say("start")

    def stop_profile(self) -> list[str]:
        self._say("stop")
        return ["a", "b"]

    def _say(self, what: str) -> None:
        self.said.append(what)
        if self.fails == what:
            raise ProfileError(f"cannot {what}")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def profiling(recorder: Recorder) -> Profiling:
    return Profiling(recorder)  # type: ignore[arg-type]


def spec(**more: object) -> ProfileSpec:
    return ProfileSpec(folder="f", name="n", **more)  # type: ignore[arg-type]


def run(profiling: Profiling, first: int, last: int) -> None:
    for step in range(first, last + 1):
        if profiling.is_on:
            profiling.stepped(step)


def test_it_lasts_until_it_is_ended(profiling: Profiling, recorder: Recorder) -> None:
    """Then its files are told, once."""
    assert profiling.start(spec(), 10) == {"step": 10}
    assert "error" in profiling.start(spec(), 10)
    run(profiling, 11, 20)
    assert profiling.stop() == {"files": ["a", "b"]}
    assert "no profile" in profiling.stop()["error"]
    assert recorder.said == ["start", "stop"]


def test_it_ends_by_itself(profiling: Profiling, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the steps asked for, or after the most there may be; the files are told to whoever asks later."""
    profiling.start(spec(num_steps=3), 10)
    run(profiling, 11, 12)
    assert recorder.said == ["start"]
    run(profiling, 13, 99)
    assert (recorder.said, profiling.is_on) == (["start", "stop"], False)
    assert profiling.stop() == {"files": ["a", "b"]}
    monkeypatch.setattr(module, "MAX_PROFILE_STEPS", 5)
    profiling.start(spec(), 100)
    run(profiling, 101, 200)
    assert not profiling.is_on


def test_it_begins_when_its_step_comes(profiling: Profiling, recorder: Recorder) -> None:
    """Not before; one that has gone by is now; one that is ended before was nothing."""
    profiling.start(spec(start_step=15, num_steps=2), 10)
    run(profiling, 11, 14)
    assert recorder.said == []
    run(profiling, 15, 30)
    assert recorder.said == ["start", "stop"]
    profiling.stop()
    profiling.start(spec(start_step=5), 40)
    assert recorder.said[2:] == ["start"]
    profiling.stop()
    profiling.start(spec(start_step=999), 50)
    assert "start_step" in profiling.stop()["error"]
    assert profiling.start(spec(), 51) == {"step": 51}


@pytest.mark.parametrize("fails", ["start", "stop"])
def test_a_failure_is_told_and_over(profiling: Profiling, recorder: Recorder, fails: str) -> None:
    """At once, or with a later step; the next profile is another matter."""
    recorder.fails = fails
    as_times = [profiling.start(spec(), 1), profiling.stop()]
    assert as_times[fails == "stop"]["error"] == f"cannot {fails}"
    profiling.start(spec(start_step=5, num_steps=1), 1)
    run(profiling, 2, 20)
    assert not profiling.is_on
    assert "no profile" in profiling.stop()["error"]
    recorder.fails = ""
    assert profiling.start(spec(), 30) == {"step": 30}
