"""Names: Dovetail's own series, and the same numbers under the names, labels and bounds of vLLM and SGLang.

Sources, for the peers' names, labels and bucket bounds: vLLM's `vllm/v1/metrics/loggers.py` and
`docs/design/metrics.md`; SGLang's `python/sglang/srt/metrics/collector.py` and its page "Production Metrics". What a
peer counts and Dovetail has no number for (LoRA, disaggregation) has no series here, rather than one that is always
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from dovetail.contracts.observers import LoadStats
from dovetail.contracts.tables import table
from dovetail_server.metrics.tally import CUT_OFF, Tally

Values = Mapping[tuple[str, ...], float]
"""By the values of a series' own labels."""

_DATA = table(__file__)
BOUNDS: dict[str, tuple[float, ...]] = {name: tuple(bounds) for name, bounds in _DATA["bounds"].items()}


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
_READERS: tuple[Callable[[Any], Any], ...] = (
    *(usage, drafted, accepted, encoded, acceptance, device_used, device_total),
    *(hit_rate, aborted, by_reason, by_vllm_reason, by_field),
)
_READS = {each.__name__: each for each in _READERS}


def _series(row: dict[str, Any], own: Mapping[str, Series]) -> Series:
    """Return the series of a row; `as` names one of our own, which it is but for what the row says beside that.

    `read` is a function above, or an attribute of the engine's `load` or of the `tally`.
    """
    fields = {**row}
    if "bounds" in row:
        fields["bounds"] = BOUNDS[row["bounds"]]
    if "labels" in row:
        fields["labels"] = tuple(row["labels"])
    if "read" in row:
        fields["read"] = _READS.get(row["read"]) or attrgetter(row["read"])
    if (name := fields.pop("as", None)) is not None:
        return replace(own[f"dovetail_{name}"], **{"text": f"As dovetail_{name}.", **fields})
    kind: type[Any] = {"load": Gauge, "tally": Count}.get(fields.pop("of", None), HistogramSpec)
    made: Series = kind(**fields)
    return made


STYLES: dict[str, Style] = {}
for _name, _style in _DATA["styles"].items():  # our own first
    _own = {series.name: series for series in STYLES["dovetail"].series} if STYLES else {}
    STYLES[_name] = Style(tuple(_series(row, _own) for row in _style["series"]), _style["labels"])
OWN, VLLM = STYLES["dovetail"], STYLES["vllm"]


def bounds_of(styles: list[Style]) -> dict[str, list[tuple[float, ...]]]:
    """Return for each quantity the sets of bounds that these styles count it in."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for style in styles:
        for series in style.series:
            if isinstance(series, HistogramSpec) and series.bounds not in found.setdefault(series.quantity, []):
                found[series.quantity].append(series.bounds)
    return found
