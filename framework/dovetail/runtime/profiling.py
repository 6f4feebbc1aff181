"""A profile of one rank by torch's profiler, written as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dovetail.messages import ProfileSpec
from dovetail.messages.executor import ProfileError
from dovetail.runtime.device.devices import device_of

TAIL_BYTES = 64


class TorchProfile:
    """Records from when it is made until `write`; both in the thread that computes steps."""

    def __init__(self, spec: ProfileSpec, rank: int, device: torch.device) -> None:
        """Begin.

        Raises:
            ProfileError: The device has no such activity, or somebody else's profile is being recorded.
        """
        self.path = Path(spec.folder) / f"{spec.name}-TP-{rank}.trace.json"
        found = device_of(device)
        wanted: Sequence[str] = spec.activities or tuple(found.activities)
        if not {*wanted} <= {*found.activities}:
            possible = ", ".join(found.activities)
            raise ProfileError(f"activities: this engine runs on {found.kind}; possible: {possible}")
        self._profile = profile(
            activities=[getattr(ProfilerActivity, found.activities[name]) for name in wanted],
            record_shapes=spec.record_shapes,
            with_stack=spec.with_stack,
            acc_events=False,
        )
        try:
            self._profile.start()
        except (RuntimeError, AssertionError) as error:
            raise ProfileError(f"torch's profiler does not begin: {error}") from error

    def write(self) -> str:
        """End, write the trace and return its path. Nothing of a trace that failed is left.

        Raises:
            ProfileError: It could not be written.
        """
        part = self.path.with_suffix(".part.json")
        try:
            self._profile.stop()
            self._profile.export_chrome_trace(str(part))
            if not is_whole(part):
                raise ProfileError(f"{self.path} could not be written whole; is the disk full?")
            os.replace(part, self.path)
        except (OSError, RuntimeError) as error:
            raise ProfileError(f"{self.path} could not be written: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return str(self.path)


def is_whole(path: Path) -> bool:
    """Tell whether a trace is there to its end: torch does not say when writing fails."""
    try:
        with path.open("rb") as file:
            file.seek(-min(TAIL_BYTES, path.stat().st_size), os.SEEK_END)
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False
