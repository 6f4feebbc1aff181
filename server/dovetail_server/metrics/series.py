"""Names: Dovetail's own series, and the same numbers under the names, labels and bounds of vLLM and SGLang.

Sources, for the peers' names, labels and bucket bounds: vLLM's `vllm/v1/metrics/loggers.py` and
`docs/design/metrics.md`; SGLang's `python/sglang/srt/metrics/collector.py` and its page "Production Metrics". What a
peer counts and Dovetail has no number for (LoRA, disaggregation) has no series here, rather than one that is always
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dovetail.contracts.observers import LoadStats
from dovetail_server.metrics.tally import CUT_OFF, Tally

Values = Mapping[tuple[str, ...], float]
"""By the values of a series' own labels."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
GAP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5, 30)
REQUEST_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))

VLLM_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
VLLM_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
SGLANG_FIRST_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
SGLANG_GAP_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200, 0.400),
    *(0.600, 0.800, 1.000, 2.000, 4.000, 6.000, 8.000),
)
SGLANG_REQUEST_S = (*SGLANG_FIRST_S, 600, 1200, 1800, 2400)
SGLANG_QUEUE_S = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200),
    *(300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number of the engine's load; None where there is none yet. A counter begins again with the engine."""

    name: str
    text: str
    read: Callable[[LoadStats], float | None]
    kind: Literal["counter", "gauge"] = "gauge"


@dataclass(frozen=True, slots=True)
class Count:
    """A number that grows, written with `_total`; or one that is made of such and does not."""

    name: str
    text: str
    read: Callable[[Tally], float | Values]
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge"] = "counter"


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """A histogram of one of the tally's quantities."""

    name: str
    text: str
    quantity: str
    bounds: tuple[float, ...]


Series = Gauge | Count | HistogramSpec


@dataclass(frozen=True, slots=True)
class Style:
    """Everything that one project's dashboards look for; `labels` are on each series, beside `model_name`."""

    series: tuple[Series, ...]
    labels: Mapping[str, str]


def usage(load: LoadStats) -> float:
    """Return the part of the KV cache that running requests hold."""
    return load.num_used_tokens / load.max_total_tokens if load.max_total_tokens else 0.0


def drafted(load: LoadStats) -> int | None:
    """Return the drafts that were verified; None where nobody drafts."""
    return load.num_drafted_tokens or None


def accepted(load: LoadStats) -> int | None:
    """Return those of them that held."""
    return load.num_accepted_tokens if load.num_drafted_tokens else None


def encoded(load: LoadStats) -> int | None:
    """Return the images that the vision tower has encoded; None where it has not."""
    return load.num_encoded_images or None


def acceptance(load: LoadStats) -> float | None:
    """Return the part of all drafts that held."""
    return load.num_accepted_tokens / load.num_drafted_tokens if load.num_drafted_tokens else None


def device_used(load: LoadStats) -> int | None:
    """Return the device's memory in use; None where the device is the host."""
    return load.device_used_bytes if load.device_total_bytes else None


def device_total(load: LoadStats) -> int | None:
    """Return the device's memory; None where the device is the host."""
    return load.device_total_bytes or None


def hit_rate(tally: Tally) -> float:
    """Return the part of all prompt tokens that the prefix cache held."""
    return tally.num_cached_tokens / tally.num_prompt_tokens if tally.num_prompt_tokens else 0.0


def aborted(tally: Tally) -> int:
    """Return the choices that were aborted or cut off."""
    return tally.finished["abort"] + tally.finished[CUT_OFF]


def by_reason(tally: Tally) -> Values:
    """Return ended choices by reason; the usual ones are there from the start."""
    return {(reason,): tally.finished[reason] for reason in dict.fromkeys((*USUAL, *tally.finished))}


def by_vllm_reason(tally: Tally) -> Values:
    """As `by_reason`, in vLLM's three words."""
    found = {"stop": 0, "length": 0, "abort": 0}
    for reason, count in tally.finished.items():
        found[{"length": "length", "abort": "abort", CUT_OFF: "abort"}.get(reason, "stop")] += count
    return {(reason,): count for reason, count in found.items()}


def by_field(tally: Tally) -> Values:
    """Return how often each unknown field was left out."""
    return {(name,): count for name, count in tally.unknown_fields().items()}


USUAL = ("stop", "length", "tool_calls", "abort", CUT_OFF)
_REASON = ("reason",)

OWN = Style(
    (
        Gauge("dovetail_requests_running", "Requests that the engine computes.", lambda load: load.num_running),
        Gauge("dovetail_requests_queued", "Requests that wait in the engine.", lambda load: load.num_queued),
        Gauge("dovetail_kv_used_tokens", "Tokens of KV cache that requests hold.", lambda load: load.num_used_tokens),
        Gauge(
            "dovetail_kv_cached_tokens",
            "Tokens of KV cache that are kept for prefixes and can be given up.",
            lambda load: load.num_cached_tokens,
        ),
        Gauge("dovetail_kv_max_tokens", "Tokens that the KV cache holds.", lambda load: load.max_total_tokens),
        Gauge("dovetail_kv_usage_ratio", "Part of the KV cache that requests hold, 0 to 1.", usage),
        Gauge("dovetail_generation_tokens_per_second", "Recent rate; 0 when idle.", lambda load: load.gen_throughput),
        Gauge("dovetail_drafted_tokens", "Tokens that a speculator guessed and steps verified.", drafted, "counter"),
        Gauge("dovetail_accepted_draft_tokens", "Those of them that were right.", accepted, "counter"),
        Gauge("dovetail_encoded_images", "Images that the vision tower has encoded.", encoded, "counter"),
        Gauge("dovetail_device_memory_used_bytes", "Memory in use on the first device, by any process.", device_used),
        Gauge("dovetail_device_memory_total_bytes", "Memory of that device.", device_total),
        Gauge("dovetail_engine_step", "The engine's step counter, its heartbeat.", lambda load: load.step),
        Count("dovetail_requests", "Generation requests admitted.", lambda tally: tally.num_requests),
        Count("dovetail_choices_finished", "Choices that ended, by why.", by_reason, _REASON),
        Count("dovetail_prompt_tokens", "Prompt tokens of admitted requests.", lambda tally: tally.num_prompt_tokens),
        Count(
            "dovetail_cached_prompt_tokens",
            "Prompt tokens that the prefix cache held.",
            lambda tally: tally.num_cached_tokens,
        ),
        Count("dovetail_generation_tokens", "Tokens generated.", lambda tally: tally.num_generated_tokens),
        Count(
            "dovetail_retractions",
            "Times that a request gave its pages up and waited again.",
            lambda tally: tally.num_retractions,
        ),
        Count(
            "dovetail_unknown_fields",
            "Requests with an unknown field, which was ignored; `other` beyond 100 names.",
            by_field,
            ("field",),
        ),
        HistogramSpec(
            "dovetail_time_to_first_token_seconds", "From submission to the first token.", "first_token", SECONDS
        ),
        HistogramSpec("dovetail_inter_token_seconds", "Between a choice's successive tokens.", "gap", GAP_S),
        HistogramSpec("dovetail_request_seconds", "From submission to the end.", "request", REQUEST_S),
        HistogramSpec("dovetail_queue_seconds", "From submission to a choice's first step.", "queue", REQUEST_S),
        HistogramSpec("dovetail_prefill_seconds", "From there to its first token.", "prefill", REQUEST_S),
        HistogramSpec("dovetail_decode_seconds", "From there to its last token.", "decode", REQUEST_S),
        HistogramSpec("dovetail_request_prompt_tokens", "Prompt tokens per request.", "prompt", TOKENS),
        HistogramSpec("dovetail_request_generation_tokens", "Generated tokens per request.", "output", TOKENS),
    ),
    {},
)
_OF_OWN = {series.name: series for series in OWN.series}


def _as(name: str, own: str, **others: Any) -> Series:
    """Give a number of our own a peer's name; `others` is what differs beside it."""
    return replace(_OF_OWN[f"dovetail_{own}"], name=name, **{"text": f"As dovetail_{own}.", **others})


VLLM = Style(
    (
        _as("vllm:num_requests_running", "requests_running"),
        _as("vllm:num_requests_waiting", "requests_queued"),
        _as("vllm:kv_cache_usage_perc", "kv_usage_ratio"),
        _as("vllm:spec_decode_num_draft_tokens", "drafted_tokens"),
        _as("vllm:spec_decode_num_accepted_tokens", "accepted_draft_tokens"),
        _as("vllm:prefix_cache_queries", "prompt_tokens"),
        _as("vllm:prefix_cache_hits", "cached_prompt_tokens"),
        _as("vllm:num_preemptions", "retractions"),
        _as("vllm:prompt_tokens", "prompt_tokens"),
        _as("vllm:generation_tokens", "generation_tokens"),
        _as("vllm:request_success", "choices_finished", read=by_vllm_reason, labels=("finished_reason",)),
        _as("vllm:time_to_first_token_seconds", "time_to_first_token_seconds", bounds=VLLM_FIRST_S),
        _as("vllm:inter_token_latency_seconds", "inter_token_seconds", bounds=VLLM_GAP_S),
        HistogramSpec("vllm:time_per_output_token_seconds", "The older name of the same.", "gap", VLLM_GAP_S),
        _as("vllm:e2e_request_latency_seconds", "request_seconds", bounds=VLLM_REQUEST_S),
        _as("vllm:request_queue_time_seconds", "queue_seconds", bounds=VLLM_REQUEST_S),
        _as("vllm:request_prefill_time_seconds", "prefill_seconds", bounds=VLLM_REQUEST_S),
        _as("vllm:request_decode_time_seconds", "decode_seconds", bounds=VLLM_REQUEST_S),
        HistogramSpec("vllm:request_inference_time_seconds", "Prefill and decode.", "inference", VLLM_REQUEST_S),
        _as("vllm:request_prompt_tokens", "request_prompt_tokens"),
        _as("vllm:request_generation_tokens", "request_generation_tokens"),
    ),
    {"engine": "0"},
)
SGLANG = Style(
    (
        _as("sglang:num_running_reqs", "requests_running"),
        _as("sglang:num_queue_reqs", "requests_queued"),
        _as("sglang:num_used_tokens", "kv_used_tokens"),
        _as("sglang:token_usage", "kv_usage_ratio"),
        _as("sglang:max_total_num_tokens", "kv_max_tokens"),
        _as("sglang:gen_throughput", "generation_tokens_per_second"),
        Gauge("sglang:spec_accept_rate", "Right part of all drafted tokens since the engine started.", acceptance),
        Count("sglang:cache_hit_rate", "Cached part of all prompt tokens since the start.", hit_rate, kind="gauge"),
        _as("sglang:prompt_tokens", "prompt_tokens"),
        _as("sglang:generation_tokens", "generation_tokens"),
        _as("sglang:cached_tokens", "cached_prompt_tokens"),
        _as("sglang:num_requests", "requests"),
        Count("sglang:num_aborted_requests", "Choices aborted or cut off.", aborted),
        _as("sglang:num_retracted_requests", "retractions"),
        _as("sglang:time_to_first_token_seconds", "time_to_first_token_seconds", bounds=SGLANG_FIRST_S),
        _as("sglang:inter_token_latency_seconds", "inter_token_seconds", bounds=SGLANG_GAP_S),
        _as("sglang:queue_time_seconds", "queue_seconds", bounds=SGLANG_QUEUE_S),
        _as("sglang:e2e_request_latency_seconds", "request_seconds", bounds=SGLANG_REQUEST_S),
    ),
    {},
)
STYLES = {"dovetail": OWN, "vllm": VLLM, "sglang": SGLANG}


def bounds_of(styles: list[Style]) -> dict[str, list[tuple[float, ...]]]:
    """Return for each quantity the sets of bounds that these styles count it in."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for style in styles:
        for series in style.series:
            if isinstance(series, HistogramSpec) and series.bounds not in found.setdefault(series.quantity, []):
                found[series.quantity].append(series.bounds)
    return found
