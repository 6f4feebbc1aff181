"""The bounds of a step."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.base.settings import EngineSettings
from dovetail.messages.step import ExecutorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of a step. With `cut_prompts` off, a prompt longer than `max_prefill_tokens` runs whole, alone.

    `max_places` are those at which drafts may have tokens drawn, the rows' own included; 0: no drafts.
    """

    max_running_requests: int
    max_prefill_tokens: int
    max_places: int = 0
    cut_prompts: bool = True


def limits_of(settings: EngineSettings, info: ExecutorInfo) -> StepLimits:
    """Return the bounds of an executor's steps. Prompts run whole where that is asked for, or nothing is cached."""
    chunk = info.chunk_size
    return StepLimits(
        max_running_requests=settings.max_running_requests,
        max_prefill_tokens=settings.max_prefill_tokens if chunk == -1 else chunk,
        max_places=settings.max_places,
        cut_prompts=chunk != -1 and bool(info.num_pages),
    )
