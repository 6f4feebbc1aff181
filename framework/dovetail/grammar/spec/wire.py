"""What travels between the engine and a compile process; see `dovetail.base.forks`."""

from __future__ import annotations

import time

import msgspec

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.messages import GrammarOption
from dovetail.plugins import PluginPlan

MIN_S = 0.1


class ChildStart(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a fork server: its copies compile grammars, or without a `plan` validate texts.

    Of the vocabulary `encode` stays behind. `max_bytes` is what a job may allocate beyond what was loaded.
    """

    plan: PluginPlan | None = None
    vocabulary: Vocabulary | None = None
    max_bytes: int = 0


class ChildJob(msgspec.Struct, frozen=True, kw_only=True):
    """Compile one grammar within `timeout_s` from `sent` on, a time of the clock `time.monotonic` of both processes."""

    option: GrammarOption
    timeout_s: float
    sent: float = 0.0


class ChildCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Validate finished texts by a JSON Schema within `timeout_s`; `sent` as above."""

    schema: str
    texts: list[str]
    timeout_s: float
    sent: float = 0.0


class ChildBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A process has taken its job and has what it needs: the job's time begins."""

    pid: int


class ChildReply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job. With neither `blob` nor `error` the grammar compiles, but its result cannot travel.

    `ignored` names what had to be left out of the source, as JSON pointers into it. `load_s` (of processor time) and
    `load_bytes` are what it takes to bring the result into another process.
    """

    blob: bytes | None = None
    ignored: tuple[str, ...] = ()
    load_s: float = 0.0
    load_bytes: int = 0
    error: str | None = None
    code: str | None = None
    validities: list[bool | None] = []


def time_left(job: ChildJob | ChildCheck) -> float:
    """Return the seconds that a job has left; enough to say so where there are none."""
    return max(MIN_S, job.timeout_s - (time.monotonic() - job.sent))


def spec_of(option: GrammarOption) -> GrammarSpec:
    """Return an option's spec.

    Raises:
        ValueError: Unknown kind: the client is of another release.
    """
    return GrammarSpec(
        kind=Kind(option.kind),
        source=option.source,
        max_whitespace=option.max_whitespace,
        whitespace=option.whitespace,
    )


def option_of(backend: str, spec: GrammarSpec, source: str | None = None, **flags: bool) -> GrammarOption:
    """Return a spec as data, for the backend of this name, with another source where one is given.

    Args:
        backend: It.
        spec: The spec.
        source: In place of its own.
        flags: `relax_schema` and `unasked` of `GrammarOption`.
    """
    return GrammarOption(
        backend=backend,
        kind=spec.kind.value,
        source=spec.source if source is None else source,
        max_whitespace=spec.max_whitespace,
        whitespace=spec.whitespace,
        **flags,
    )
