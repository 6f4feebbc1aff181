"""What every `Device` must do: copy what was there, pass events in order, and replay what it recorded.

```python
class TestAcme(DeviceConformance):
    name = "acme"
```
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.device import Device
from dovetail_testing.checks import check
from dovetail_testing.conformance.base import Conformance

NUMS = (0, 1, 63, 257, 4097)
DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool)
LIMIT_S = 10.0
"""In which a device comes to the end of what these checks send to it."""


class DeviceConformance(Conformance):
    """What every device must do. Where it is not there, the tests that use it are skipped."""

    kind = "device"

    def device(self) -> Device:
        """Return the device, ready to be used by this thread."""
        cls: type[Device] = self.plugin()
        if (cause := cls.absent()) is not None:
            pytest.skip(cause)
        return cls(cls.take(None))

    def test_it_is_asked_before_torch_is_there(self) -> None:
        """Importing its module and asking whether it is surely absent imports no torch: a start asks first."""
        cls, _ = self.plugin(), self._child()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {cls.__module__} import {cls.__qualname__} as cls; "
            "cls.surely_absent(); (ahead := cls.compiler()) and ahead.kept(); sys.exit('torch' in sys.modules)"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        check(found.returncode == 0, f"{cls.__module__} imports torch; import it where the device is used")

    def test_what_is_surely_absent_is_absent(self) -> None:
        """The answer without torch is never another than that with it, and says what to do."""
        cls: type[Device] = self.plugin()
        if (cause := cls.surely_absent()) is not None:
            check(cls.absent() is not None, f"surely_absent() says {cause!r}, and absent() finds the device")

    def test_facts_go_together(self) -> None:
        """A host has the host's memory and no graphs of its own; kinds and models have names."""
        device = self.device()
        check(bool(device.kind) and bool(device.model), f"kind {device.kind!r}, model {device.model!r}: give names")
        check("CPU" in device.activities, f"activities {set(device.activities)}: the host can always be recorded")
        check(device.by_rows <= {"sums"}, f"by_rows {set(device.by_rows)}: sums or nothing")
        check(device.num() >= 1, f"num() is {device.num()}: this device is there")
        check(device.absent() is None, f"absent() says {device.absent()!r} of a device that is there")
        if device.is_host:
            check(device.memory() is None, "memory() of a host is None: the core measures it")
            check(device.mark() is None, "mark() of a host is None: all is computed when a call returns")

    def test_memory_is_bytes(self) -> None:
        """Free memory is a part of all, and giving back what was freed leaves no less."""
        device = self.device()
        if (found := device.memory()) is None:
            return
        check(0 <= found[0] <= found[1], f"memory() is {found}: (free, total) bytes")
        device.trim()
        device.synchronize()

    def test_pinned_memory_holds_what_was_given(self) -> None:
        """Values, shape and dtype stay."""
        device = self.device()
        for num in NUMS:
            for dtype in DTYPES:
                given = _numbers(num, dtype)
                kept = device.pinned(given.clone())
                check(_same(kept, given), f"pinned() changes {num} numbers of {dtype}")

    def test_a_copy_is_of_what_was_there(self) -> None:
        """What overwrites a tensor behind `to_host` is not in the copy, also of one that is sliced or transposed."""
        device = self.device()
        for num in NUMS:
            for dtype in DTYPES:
                wanted = _numbers(2 * num, dtype).view(num, 2)
                for name, given in (("whole", wanted), ("sliced", wanted[:, :1]), ("transposed", wanted.T)):
                    there = given.to(device.place) if device.place.type != "cpu" else given.clone()
                    host = device.to_host(there)
                    there.zero_()
                    self._wait(device)
                    check(_same(host, given), f"to_host() of {num} numbers of {dtype}, {name}: other numbers came")

    def test_events_pass_when_what_is_before_them_is_done(self) -> None:
        """An event that has passed means that copies before it can be read; who waits does not wait for ever."""
        device = self.device()
        for waits in (True, False):
            copies = []
            for at in range(9):
                host = device.to_host(torch.full((5,), at, device=device.place))
                copies.append((host, device.mark()))
            for at, (host, event) in enumerate(copies):
                if event is not None and waits:
                    event.synchronize()
                elif event is not None:
                    _until(event.query, "an event never passes that is asked again and again")
                check(bool((host == at).all()), f"an event has passed before copy {at} in front of it was made")

    def test_idle_means_that_nothing_is_left(self) -> None:
        """`is_idle` becomes true by itself, and then copies can be read; `synchronize` brings it about."""
        device = self.device()
        for is_asked in (True, False):
            hosts = [device.to_host(torch.full((3,), at, device=device.place)) for at in range(7)]
            if is_asked:
                _until(device.is_idle, "is_idle() stays false")
            else:
                device.synchronize()
            for at, host in enumerate(hosts):
                check(bool((host == at).all()), f"copy {at} was not made when the device had nothing left to do")
            check(device.is_idle(), "is_idle() is false though nothing was sent since it was true")

    def test_a_replay_reads_its_inputs_anew(self) -> None:
        """Results stand where they stood, and are those of the inputs that are there now; graphs share a pool."""
        device = self.device()
        if not device.captures:
            return
        given, pool = torch.ones(257, device=device.place), None
        graphs: list[tuple[Any, Tensor]] = []
        for factor in (2, 3):
            graph, result, pool = device.capture(lambda factor=factor: given * factor, pool)  # type: ignore[misc]
            graphs.append((graph, result))
        for value in (5, 7, 11):
            for factor, (graph, result) in zip((2, 3), graphs, strict=True):
                address = result.data_ptr()
                given.fill_(value)
                graph.replay()
                host = device.to_host(result)
                self._wait(device)
                check(result.data_ptr() == address, "a replay moved its results")
                check(bool((host == factor * value).all()), f"a replay gave {host[0].item():g}, not {factor * value}")

    def test_what_is_compiled_ahead_is_known_then(self) -> None:
        """An engine that never was is not known; once its kernels are compiled, one like it is."""
        compiler = self.device().compiler()
        if compiler is None:
            pytest.skip("nothing compiles its kernels ahead")
        fingerprint = uuid.uuid4().hex
        ahead = compiler(fingerprint)
        check(not ahead.is_known, "is_known is true of an engine that never was")
        with ahead.collecting():
            pass
        found = ahead.compile()
        ahead.close()
        ahead.close()
        check(found == (0, 0), f"compile() returned {found} where nothing was collected")
        again = compiler(fingerprint)
        is_known = again.is_known
        again.close()
        check(is_known, "is_known stays false for an engine whose kernels are compiled: each start compiles them again")

    def _wait(self, device: Device) -> None:
        if (event := device.mark()) is not None:
            event.synchronize()


def _numbers(num: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(num) % 100 + 1).to(dtype)


def _same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())


def _until(is_so: Any, otherwise: str) -> None:
    """Ask again until it is so, for `LIMIT_S` at most."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        check(time.monotonic() < end, otherwise)
