"""Checks of devices hold for the host and for a late one, and find each seeded fault."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.contracts.compiler import AheadCompiler
from dovetail.contracts.device import Device
from dovetail_testing.conformance.device import DeviceConformance
from dovetail_testing.late_device import LateDevice, LateEvent

PLACE = torch.device("cpu")


class TestLate(DeviceConformance):
    """The late device."""

    plugin_class = LateDevice


class Aliases(LateDevice):
    """Copies what is there when it comes to it."""

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.zeros_like(tensor)
        self._queue.append(lambda: host.copy_(tensor))
        self.num_sent += 1
        return host


class Eager(LateDevice):
    """Its events pass before what is before them."""

    def mark(self) -> LateEvent:
        return LateEvent(self, self.num_sent - 1)


class Stuck(LateDevice):
    """Its events pass only for who waits."""

    def mark(self) -> LateEvent:
        event = super().mark()
        event.query = lambda: False  # type: ignore[method-assign]
        return event


class Busy(LateDevice):
    """Is idle, it says."""

    def is_idle(self) -> bool:
        return True


class Halfway(LateDevice):
    """Waits for one copy."""

    def synchronize(self) -> None:
        self.go_on()


class Flat(LateDevice):
    """Copies lose their shape."""

    def to_host(self, tensor: Tensor) -> Tensor:
        return super().to_host(tensor.flatten())


class Unpinned(LateDevice):
    """Pins memory, and forgets what was in it."""

    def pinned(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)


class Boundless(LateDevice):
    """Has more free than there is."""

    def memory(self) -> tuple[int, int]:
        return 2, 1


class Frozen(LateDevice):
    """Its graphs replay what they have computed."""

    def capture(self, step: Callable[[], Any], pool: Any) -> tuple[Any, Any, Any]:
        kept = step().clone()
        return super().capture(lambda: kept, pool)


class Wrong(LateDevice):
    """Is there, though it says that it surely is not."""

    @classmethod
    def surely_absent(cls) -> str | None:
        return "there is no driver"

    @classmethod
    def absent(cls) -> str | None:
        return None


class Counting(Device):
    """A host that counts memory of its own."""

    def memory(self) -> tuple[int, int]:
        return 1, 2


class Compiler(AheadCompiler):
    """Has no kernels, and knows the engines that it was asked for."""

    known: ClassVar[set[str]] = set()
    seen = 0

    @classmethod
    def folder(cls) -> Path:
        return Path()

    @classmethod
    def kept(cls) -> dict[str, int]:
        return {}

    @classmethod
    def report_late(cls, report: Callable[[str, float], None]) -> None:
        """Nothing is compiled."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    @property
    def is_known(self) -> bool:
        return self._fingerprint in self.known

    def collecting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compile(self) -> tuple[int, int]:
        self.known.add(self._fingerprint)
        return self.seen, 0

    def close(self) -> None:
        """Nothing was begun."""


class Forgetful(Compiler):
    is_known = False  # type: ignore[assignment]


class Presuming(Compiler):
    is_known = True  # type: ignore[assignment]


class Inventive(Compiler):
    seen = 3


class CompiledAhead(LateDevice):
    """Its kernels are compiled before requests wait for them."""

    ahead: ClassVar[type[AheadCompiler]] = Compiler

    @classmethod
    def compiler(cls) -> type[AheadCompiler]:
        return cls.ahead


class CompiledAgain(CompiledAhead):
    ahead = Forgetful


class NeverCompiled(CompiledAhead):
    ahead = Presuming


class MoreCompiled(CompiledAhead):
    ahead = Inventive


class TestCompiledAhead(DeviceConformance):
    """One that compiles passes."""

    plugin_class = CompiledAhead


FAULTS = [
    (Aliases, "test_a_copy_is_of_what_was_there", "other numbers came"),
    (Eager, "test_events_pass_when_what_is_before_them_is_done", "has passed before copy 0"),
    (Stuck, "test_events_pass_when_what_is_before_them_is_done", "never passes"),
    (Busy, "test_idle_means_that_nothing_is_left", "copy 0 was not made"),
    (Halfway, "test_idle_means_that_nothing_is_left", "copy 1 was not made"),
    (Flat, "test_a_copy_is_of_what_was_there", "other numbers came"),
    (Unpinned, "test_pinned_memory_holds_what_was_given", r"pinned\(\) changes 1 numbers"),
    (Boundless, "test_memory_is_bytes", r"memory\(\) is \(2, 1\)"),
    (Frozen, "test_a_replay_reads_its_inputs_anew", "a replay gave 2, not 10"),
    (Wrong, "test_what_is_surely_absent_is_absent", "finds the device"),
    (CompiledAgain, "test_what_is_compiled_ahead_is_known_then", "is_known stays false"),
    (NeverCompiled, "test_what_is_compiled_ahead_is_known_then", "never was"),
    (MoreCompiled, "test_what_is_compiled_ahead_is_known_then", r"returned \(3, 0\)"),
    (Counting, "test_facts_go_together", "of a host is None"),
]


@pytest.mark.parametrize(("faulty", "name", "said"), FAULTS, ids=lambda each: getattr(each, "__name__", None))
def test_each_seeded_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, faulty: type[Device], name: str, said: str
) -> None:
    """By the check that names it."""
    monkeypatch.setattr("dovetail_testing.conformance.device.LIMIT_S", 0.05)
    checks = DeviceConformance()
    monkeypatch.setattr(checks, "plugin", lambda: faulty)
    with pytest.raises(AssertionError, match=said):
        getattr(checks, name)()
