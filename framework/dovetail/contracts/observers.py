"""What hook plugins return to be told about requests and load: `RequestObserver` and `StatLogger`.

Both are called directly in the `api` process, never per token, and must not block: hand work to a thread of your own.
One that raises five times in a row is removed, which the log and `GET /health` say. Importing this takes no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStart:
    """A generation request was admitted. `num_prompt_tokens` sums over its prompts."""

    request_id: str
    num_choices: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """It is over, whatever ended it.

    Attributes:
        request_id: As in `RequestStart`.
        num_prompt_tokens: As in `RequestStart`.
        num_completion_tokens: Generated tokens that count, of all choices.
        finish_reasons: One per choice; "" for a choice that was cut off (the client left, or an error).
        seconds: From submission to the end.
    """

    request_id: str
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reasons: tuple[str, ...]
    seconds: float


class RequestObserver:
    """Is told when requests begin and end. Override what you need; new methods arrive with defaults."""

    def request_started(self, request: RequestStart) -> None:
        """A request was admitted; runs on the server's event loop."""

    def request_ended(self, request: RequestEnd) -> None:
        """It is over; called once for each `request_started`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStats:
    """The engine's load at one moment. Tokens unless it says otherwise; `gen_throughput` in tokens per second."""

    step: int
    num_running: int
    num_queued: int
    num_used_tokens: int
    num_cached_tokens: int
    max_total_tokens: int
    gen_throughput: float


class StatLogger(ABC):
    """Is given the engine's load every `interval_s` seconds."""

    interval_s: float = 10.0

    @abstractmethod
    def log(self, stats: LoadStats) -> None:
        """Take one snapshot; runs on the server's event loop."""
