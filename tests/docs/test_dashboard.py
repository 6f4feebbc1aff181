"""The Grafana dashboard shows metrics that exist, and none that is published is forgotten."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dovetail.contracts.observers import ChoiceTimes, HttpEnd, LoadStats, RequestEnd, RequestProgress, RequestStart
from dovetail_server.metrics.exposition import Metrics

FOLDER = Path(__file__).parents[2] / "docs/deploy/grafana"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds when it scrapes."""
UNSHOWN = ("virtual_memory_bytes", "start_time_seconds", "open_fds", "max_fds")
LEFT_OUT = {
    "dovetail_encoded_images_total": "of models that see alone; it says little without the images that were sent",
    "process_virtual_memory_bytes": "what is mapped says little of what is used",
    "process_start_time_seconds": "the engine's restarts are shown; the server's are whoever starts it's affair",
    "process_open_fds": "the server bounds its connections by what it may open",
    "process_max_fds": "as above",
    **{f"dovetail_engine_process_{name}": "as the server's" for name in UNSHOWN},
}
"""Published families that no panel shows, each with the reason."""
FUNCTIONS = frozenset(
    ["sum", "max", "count", "rate", "increase", "changes", "histogram_quantile", "by", "label_values"]
)


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dovetail.json").read_text())
    return found


@pytest.fixture(scope="module")
def published() -> dict[str, set[str]]:
    """Every sample that a server writes once it has served something, with its labels."""
    metrics = Metrics("dovetail", "m", {"task": 1}, engine_pid=os.getpid)
    load = LoadStats(
        step=1, num_running=1, num_queued=1, num_used_tokens=1, num_cached_tokens=1, max_total_tokens=9,
        gen_throughput=1.0, num_drafted_tokens=2, num_accepted_tokens=1, num_encoded_images=1, device_used_bytes=1,
        device_total_bytes=2,
    )  # fmt: skip
    metrics.load.log(load)
    tally = metrics.tally
    tally.request_started(RequestStart(request_id="r", num_choices=1, num_prompt_tokens=1))
    tally.request_progressed(RequestProgress(request_id="r", num_tokens=2, first_token_s=0.1, gaps_s=[0.1]))
    end = RequestEnd(
        request_id="r", num_prompt_tokens=1, num_completion_tokens=2, finish_reasons=("stop",), seconds=1.0,
        choices=(ChoiceTimes(queued_s=0.1, prefill_s=0.1),),
    )  # fmt: skip
    tally.request_ended(end)
    tally.http_ended(HttpEnd(request_id="r", method="GET", route="/", status=200, seconds=0.1))
    text = metrics.render("text/plain")[0].decode()
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """All that is asked of Prometheus: by panels, variables and annotations."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (each["definition"] for each in dashboard["templating"]["list"] if "definition" in each)
    yield from (each["expr"] for each in dashboard["annotations"]["list"])


def used(dashboard: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Each metric that is asked for, with the labels that it must have."""
    for expression in expressions(dashboard):
        grouped = {name for found in re.findall(r"\bby \(([^)]*)\)", expression) for name in found.split(", ")}
        values = re.findall(r"label_values\(.*, (\w+)\)", expression)
        plain = re.sub(r"\bby \([^)]*\)|label_values\(|\[[^\]]*\]|, \w+\)$", " ", expression)
        for name, inside in re.findall(r"\b([a-z_]+)(\{[^}]*\})?", re.sub(r'"[^"]*"', '""', plain)):
            if name in FUNCTIONS or not (inside or name.startswith(("dovetail", "process"))):
                continue
            yield name, {*re.findall(r"(\w+)=", inside), *grouped, *values}


def test_every_metric_and_label_exists(dashboard: dict[str, Any], published: dict[str, set[str]]) -> None:
    """A name that is written wrong is an empty panel, which nobody notices until it is needed."""
    found = list(used(dashboard))
    assert len(found) > 30
    for name, labels in found:
        assert name in published, name
        assert labels <= published[name] | SCRAPED, (name, labels - published[name] - SCRAPED)


def test_every_family_is_shown_or_left_out_with_a_reason(
    dashboard: dict[str, Any], published: dict[str, set[str]]
) -> None:
    """A new metric gets a panel, or a line here."""
    shown = {family_of(name) for name, _ in used(dashboard)}
    families = {family_of(name) for name in published}
    assert families - shown == set(LEFT_OUT)


def family_of(sample: str) -> str:
    return re.sub(r"_(bucket|sum|count|created)$", "", sample)


def test_legends_name_labels_that_their_series_have(dashboard: dict[str, Any]) -> None:
    """Else a legend is a blank."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {name for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in found.split(", ")}
            assert wanted <= grouped | (SCRAPED if " by " not in target["expr"] else set()), target


def test_it_can_be_provisioned(dashboard: dict[str, Any]) -> None:
    """It has an identifier of its own, a data source that is chosen, panels side by side, and no other ids twice."""
    assert dashboard["uid"] == "dovetail"
    assert "id" not in dashboard
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(x, y) for b in boxes for x in range(b["x"], b["x"] + b["w"]) for y in range(b["y"], b["y"] + b["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    text = json.dumps(dashboard)
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"} == variables
    (provider,) = yaml.safe_load((FOLDER / "provisioning.yaml").read_text())["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")
