"""Profiles of steps: from when to when, in steps of the engine. What is recorded is the executor's affair."""

from __future__ import annotations

import logging
from typing import Any

from dovetail.messages import MAX_PROFILE_STEPS, ProfileSpec
from dovetail.messages.executor import Executor, ProfileError

logger = logging.getLogger(__name__)
NONE = "no profile is being recorded; POST /start_profile begins one. An engine that was started again has none"


class Profiling:
    """At most one profile at a time. `is_on` while one waits for its first step, or records."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._spec: ProfileSpec | None = None
        self._begun_at: int | None = None
        self._files: list[str] = []
        self.is_on = False

    def start(self, spec: ProfileSpec, step: int) -> dict[str, Any]:
        """Begin, now or with the step that it names; returns what the client is told.

        Args:
            spec: What to record, and where it is written.
            step: The engine's step counter.
        """
        if self.is_on:
            return {"error": "a profile is being recorded; POST /stop_profile ends it"}
        self._spec, self._begun_at, self._files = spec, None, []
        try:
            if spec.start_step is None or step >= spec.start_step:
                self._begin(spec, step)
        except ProfileError as error:
            return {"error": str(error)}
        self.is_on = True
        return {"step": step}

    def stop(self) -> dict[str, Any]:
        """End the profile, if it has not ended by itself; returns the files of the last one."""
        if self.is_on:
            error = self._end()
            if error is not None:
                return {"error": error}
        if not self._files:
            return {"error": NONE}
        files, self._files = self._files, []
        return {"files": files}

    def stepped(self, step: int) -> None:
        """A step was made while a profile is on: begin, or end, in its turn."""
        spec = self._spec
        if spec is None:
            return
        if self._begun_at is None:
            if spec.start_step is not None and step >= spec.start_step:
                try:
                    self._begin(spec, step)
                except ProfileError as error:
                    self.is_on = False
                    logger.error("The profile could not begin: %s", error)
        elif step - self._begun_at >= min(spec.num_steps or MAX_PROFILE_STEPS, MAX_PROFILE_STEPS):
            why = self._end()
            if why is not None:
                logger.error("The profile could not be written: %s", why)

    def _begin(self, spec: ProfileSpec, step: int) -> None:
        self._executor.start_profile(spec)
        self._begun_at = step

    def _end(self) -> str | None:
        """Write what was recorded; returns why that failed."""
        begun_at, self._begun_at, self.is_on = self._begun_at, None, False
        if begun_at is None:
            return "the profile had not begun: its start_step has not come"
        try:
            self._files = self._executor.stop_profile()
        except ProfileError as error:
            return str(error)
        logger.info("Profile written: %s", ", ".join(self._files))
        return None
