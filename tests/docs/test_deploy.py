"""The files under `docs/deploy` name flags, variables, routes, metrics and files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.base.distribution import DISTRIBUTION
from dovetail_server.cli.gateway import FIELDS, split_workers
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.settings.serve import ServeSettings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/deploy"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((FOLDER / "kubernetes/dovetail.yaml").read_text()))
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [one for one in KUBERNETES if one["kind"] == kind]
    return found


CONTAINER = of_kind("Deployment")["spec"]["template"]["spec"]["containers"][0]


def variables() -> Iterator[str]:
    """Every variable of Dovetail that a file sets."""
    yield from re.findall(r"\b(DOVETAIL_\w+)=", DOCKERFILE)
    for service in COMPOSE["services"].values():
        yield from (name for name in service.get("environment", {}) if name.startswith("DOVETAIL_"))
    yield from (entry["name"] for entry in CONTAINER["env"])


def test_compose_is_valid() -> None:
    """By the schema of its specification."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*command, FOLDER / "compose.yaml"], check=True, capture_output=True)


@pytest.mark.parametrize("name", sorted(set(variables())))
def test_a_variable_is_a_setting(name: str) -> None:
    """Under its name in capitals."""
    assert name.removeprefix("DOVETAIL_").lower() in ServeSettings.model_fields


def test_arguments_are_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the deployment are read as any command line."""
    flags = parse_flags([arg.replace("/models/model", str(tmp_path)) for arg in CONTAINER["args"][1:]])
    assert isinstance(flags, dict)
    settings = load_settings(flags)
    assert settings.metrics_style == "vllm"
    assert settings.open_metrics
    grace = of_kind("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.drain_timeout + settings.drain_grace
    assert re.fullmatch(r"\d+m", COMPOSE["x-worker"]["stop_grace_period"])


def test_probes_ask_routes_that_exist() -> None:
    """At the port that the image opens."""
    routes = (ROOT / "docs/security.md").read_text() + (ROOT / "docs/metrics.md").read_text()
    assert {CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")} == {"/readyz"}
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert all(f"`{path}`" in routes or f"GET {path}" in routes for path in ("/readyz", "/livez"))
    [port] = CONTAINER["ports"]
    assert f"EXPOSE {port['containerPort']}" in DOCKERFILE
    assert f"DOVETAIL_PORT={port['containerPort']}" in DOCKERFILE
    pool = yaml.safe_load((FOLDER / "kubernetes/inference-pool.yaml").read_text())
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    assert pool["spec"]["selector"] == of_kind("Deployment")["spec"]["selector"]
    assert of_kind("Service")["spec"]["ports"][0]["targetPort"] == port["name"]


def test_replicas_follow_a_metric_that_is_published() -> None:
    """The autoscaler's, by its name on `/metrics`."""
    [metric] = of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert f"`{metric['pods']['metric']['name']}`" in (ROOT / "docs/metrics.md").read_text()


def test_services_fit_together() -> None:
    """Gateway and Prometheus name the workers; every file that is mounted is there."""
    workers = {name for name in COMPOSE["services"] if name.startswith("worker-")}
    assert len(workers) == 2
    command, *given = COMPOSE["services"]["gateway"]["command"]
    assert command == "gateway"
    urls, others = split_workers(given)
    assert {f"http://{name}:30000" for name in workers} == set(urls)
    flags = parse_flags(others)
    assert isinstance(flags, dict)
    assert load_settings(flags).model_fields_set <= FIELDS
    scraped = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"]
    assert {f"{name}:30000" for name in workers} == set(scraped[0]["targets"])
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    assert all((FOLDER / volume.split(":")[0]).is_file() for volume in mounted if volume.startswith("./"))
    assert all(volume.split(":")[0] in COMPOSE["volumes"] for volume in mounted if not volume.startswith("./"))
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_image_installs_what_there_is() -> None:
    """Extras of the package, and the gateway that is tested."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [named] = re.findall(DISTRIBUTION + r"\[([\w,-]+)\]", DOCKERFILE)
    assert set(named.split(",")) <= set(extras)
    assert "gateway" in named.split(",")
    built = {service["build"]["target"] for service in COMPOSE["services"].values() if "build" in service}
    assert built == {"dovetail"}
    assert set(re.findall(r"AS (\w+)", DOCKERFILE)) == {"wheel", "dovetail"}
