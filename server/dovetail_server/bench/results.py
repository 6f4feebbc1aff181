"""From what the clients saw of a workload to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail_server.bench.drive import Seen
from dovetail_server.bench.jobs import Record
from dovetail_server.bench.roofline import Roofline
from dovetail_server.bench.workloads import Workload

MAX_REASONS = 5
MANY_TOKENS = 4
"""Tokens per event beyond which a reader is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """One workload. Rates are per second over the whole run; None where it cannot be told.

    Attributes:
        ttft_ms: From sending a request to the first event with a token: p50, p90, p99 (streams only).
        itl_ms: Between tokens of one stream, the time of an event with several tokens spread over them: p50, p99.
        gap_ms: Between events of one stream: p50, p99. It and `itl_ms` are of streams that count tokens in each event.
        tpot_ms: Mean time per token after the first event, per stream: p50, p99.
        decode_tok_s: Tokens per second of a stream after its first event: p50.
        prompt_tok_s: Prompt tokens per second until the first token (p50), where requests come one at a time.
        floor_tok_s: Output tokens per second if every step took just the time to read weights and KV cache.
        of_floor: `output_tok_s / floor_tok_s`.
        decode_of_floor: The share for `decode_tok_s`.
        num_short: Replies with fewer tokens than asked for.
        concurrency: Requests in flight, on average.
        client_busy: Share of a core that the busiest client process used.
        sampling: How replies were sampled, in words.
        since_ready_s: From the moment that a server that was started here was ready to the workload's first request,
            warm-up included.
    """

    workload: Workload
    num_ok: int
    num_failed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_short: int
    output_tok_s: float
    total_tok_s: float
    requests_s: float
    concurrency: float
    e2e_ms: dict[str, float]
    ttft_ms: dict[str, float] | None = None
    itl_ms: dict[str, float] | None = None
    gap_ms: dict[str, float] | None = None
    tpot_ms: dict[str, float] | None = None
    decode_tok_s: float | None = None
    prompt_tok_s: float | None = None
    tokens_per_event: float | None = None
    floor_step_ms: float | None = None
    floor_tok_s: float | None = None
    of_floor: float | None = None
    decode_of_floor: float | None = None
    client_workers: int = 1
    client_busy: float = 0.0
    sampling: str = ""
    since_ready_s: float | None = None
    notes: list[str] = field(default_factory=list)


def percentiles(values: Sequence[float], points: Sequence[int]) -> dict[str, float] | None:
    """Return `p50` and the like of seconds, in milliseconds."""
    if not len(values):
        return None
    found = np.percentile(np.asarray(values), points) * 1000.0
    return {f"p{point}": float(value) for point, value in zip(points, found, strict=True)}


def results_of(workload: Workload, seen: Seen, roofline: Roofline, wanted_lens: Sequence[int]) -> WorkloadResult:
    """Compute everything.

    Args:
        workload: What was sent.
        seen: What came of it.
        roofline: What a step costs at least.
        wanted_lens: The tokens that each request asked for, by index.
    """
    good = [record for record in seen.records if record.error is None]
    start, end = min(r.start for r in seen.records), max(r.end for r in seen.records)
    duration = max(end - start, 1e-9)
    completion = sum(r.completion_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    latencies = [r.end - r.start for r in good]
    common: dict[str, Any] = {
        "workload": workload,
        "num_ok": len(good),
        "num_failed": len(seen.records) - len(good),
        "failures": reasons(seen.records),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": sum(r.cached_tokens for r in good),
        "num_short": sum(r.completion_tokens < wanted_lens[r.index] for r in good),
        "output_tok_s": completion / duration,
        "total_tok_s": (completion + prompt) / duration,
        "requests_s": len(good) / duration,
        "concurrency": sum(latencies) / duration,
        "e2e_ms": percentiles(latencies, (50, 99)) or {},
        "client_workers": seen.workers,
        "client_busy": seen.busy,
    }
    if not good:
        return WorkloadResult(**common)
    streamed = stream_results(workload, good) if workload.stream else {}
    floored = roofline_results(workload, common, streamed, roofline)
    return WorkloadResult(**common, **streamed, **floored, notes=notes(workload, common, seen))


def stream_results(workload: Workload, good: Sequence[Record]) -> dict[str, Any]:
    """Compute what only streams tell."""
    after = [(r.last - r.first, r.completion_tokens - r.tokens_at_first) for r in good]
    per_token = [seconds / num for seconds, num in after if num > 0 and seconds > 0]
    gaps = np.asarray([gap for r in good for gap in r.gaps])
    tokens = np.asarray([num for r in good for num in r.gap_tokens], dtype=np.int64)
    ttft = percentiles([r.first - r.start for r in good], (50, 90, 99))
    alone = workload.concurrency == 1 and ttft is not None
    return {
        "ttft_ms": ttft,
        "itl_ms": percentiles(np.repeat(gaps / tokens, tokens), (50, 99)) if len(gaps) else None,  # type: ignore[arg-type]
        "gap_ms": percentiles(gaps, (50, 99)),  # type: ignore[arg-type]
        "tpot_ms": percentiles(per_token, (50, 99)),
        "decode_tok_s": float(1 / np.median(per_token)) if per_token else None,
        "prompt_tok_s": float(np.median([r.prompt_tokens / (r.first - r.start) for r in good])) if alone else None,
        "tokens_per_event": sum(r.completion_tokens for r in good) / max(1, sum(r.num_events for r in good)),
    }


def roofline_results(
    workload: Workload, common: dict[str, Any], streamed: dict[str, Any], roofline: Roofline
) -> dict[str, Any]:
    """Compute the least time of a step at the run's concurrency and mean context, and the shares of it reached."""
    num = common["num_ok"]
    streams = min(workload.concurrency, num) if workload.concurrency is not None else common["concurrency"]
    context = common["prompt_tokens"] / num + common["completion_tokens"] / num / 2
    step = roofline.step_s(streams, context, workload.shared_prefix_len)
    if step is None:
        return {}
    decode = streamed.get("decode_tok_s")
    return {
        "floor_step_ms": 1000 * step,
        "floor_tok_s": streams / step,
        "of_floor": common["output_tok_s"] * step / streams,
        "decode_of_floor": decode * step if decode is not None else None,
    }


def reasons(records: Sequence[Record]) -> dict[str, int]:
    """Count the reasons of failures, the most frequent first."""
    found = Counter(record.error for record in records if record.error is not None)
    shown = dict(found.most_common(MAX_REASONS))
    if rest := found.total() - sum(shown.values()):
        shown["other reasons"] = rest
    return shown


def notes(workload: Workload, common: dict[str, Any], seen: Seen) -> list[str]:
    """Say what a reader should know before believing the figures."""
    found = []
    if common["num_short"]:
        found.append(f"{common['num_short']} replies are shorter than asked for")
    own = common["prompt_tokens"] - workload.shared_prefix_len * common["num_ok"]
    cached = common["cached_tokens"] - workload.shared_prefix_len * common["num_ok"]
    if cached > 0.02 * max(own, 1):
        found.append(f"{cached:,} of {own:,} prompt tokens were found in the prefix cache")
    events = sum(record.num_events for record in seen.records)
    if workload.stream and common["completion_tokens"] > MANY_TOKENS * events > 0:
        found.append(
            f"an event brings {common['completion_tokens'] / events:.1f} tokens: many have no text of their own, or "
            "are sent together; times of tokens are times of events"
        )
    if seen.busy > 0.9:
        found.append(f"a client process used {seen.busy:.0%} of a core and may be what limits; give more --workers")
    return found
