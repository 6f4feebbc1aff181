"""What is sent: lengths, counts and pace of requests, and the named sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Span = tuple[int, int]
"""Lowest and highest length, both included; each request draws one between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One load. Lengths are in tokens; `input_len` does not count the shared prefix.

    Attributes:
        concurrency: Requests in flight at once, the next one sent when one is answered; None where `request_rate`
            says when they are sent.
        request_rate: Requests a second, at random moments.
        warmup: Requests sent before the clock starts; None for as many as are in flight at once.
    """

    name: str
    about: str = ""
    num_prompts: int
    concurrency: int | None = None
    request_rate: float | None = None
    input_len: Span
    output_len: Span
    shared_prefix_len: int = 0
    stream: bool = True
    warmup: int | None = None

    @property
    def num_warmup(self) -> int:
        """Requests sent before the clock starts."""
        return self.warmup if self.warmup is not None else min(self.slots, self.num_prompts)

    @property
    def slots(self) -> int:
        """Requests in flight at once while warming up, and while measuring without a request rate."""
        return self.concurrency or 16


STANDARD = (
    Workload(
        name="single",
        about="one stream after another",
        num_prompts=5,
        concurrency=1,
        input_len=(36, 36),
        output_len=(512, 512),
    ),
    Workload(
        name="c16",
        about="16 streams",
        num_prompts=64,
        concurrency=16,
        input_len=(512, 512),
        output_len=(256, 256),
    ),
    Workload(
        name="c64",
        about="64 streams",
        num_prompts=256,
        concurrency=64,
        input_len=(512, 512),
        output_len=(256, 256),
    ),
    Workload(
        name="c256",
        about="256 streams",
        num_prompts=1024,
        concurrency=256,
        input_len=(512, 512),
        output_len=(256, 256),
    ),
    Workload(
        name="prefix",
        about="64 streams behind one prefix",
        num_prompts=256,
        concurrency=64,
        input_len=(32, 32),
        output_len=(64, 64),
        shared_prefix_len=2048,
    ),
    Workload(
        name="many",
        about="5,000 short requests, whole replies",
        num_prompts=5000,
        concurrency=512,
        input_len=(30, 50),
        output_len=(128, 128),
        stream=False,
    ),
    Workload(
        name="long",
        about="one long prompt after another",
        num_prompts=3,
        concurrency=1,
        input_len=(16000, 16000),
        output_len=(8, 8),
    ),
)
"""What servers are compared by: one stream, many streams, a common prefix, a flood of short requests, a long prompt."""

SUITES: Mapping[str, tuple[Workload, ...]] = {"standard": STANDARD}
