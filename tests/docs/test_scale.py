"""The simulation behind the page on scale: nothing is lost in it, and it tells policies apart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "benchmarks/cluster.py"


@pytest.fixture(scope="module")
def cluster() -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("cluster_bench", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_every_request_is_answered(cluster: Any) -> None:
    """By every policy, each with all of its tokens and no first token before it came; twice the same."""
    load = cluster.Load(3, seconds=4)
    for make in cluster.POLICIES.values():
        run = cluster.Cluster(load, make())
        figures = run.run()
        assert figures["answered"] == figures["requests"] == len(list(cluster.arrivals(load))) > 100
        assert all(one.done == one.output and one.end_s >= one.first_s > one.at for one in run.requests)
        assert all(not one.num and not one.is_stepping for one in run.replicas)
        assert cluster.Cluster(load, make()).run() == figures


def test_prefixes_are_found_by_who_looks_for_them(cluster: Any) -> None:
    """A router that follows prefixes finds more of them cached; of equal prompts all but the first are."""
    hits = {
        name: cluster.Cluster(cluster.Load(8, seconds=5), make()).run()["hit"]
        for name, make in cluster.POLICIES.items()
    }
    assert min(hits["prefix hash"], hits["cache aware"]) > 1.1 * max(hits["round robin"], hits["least loaded"])
    one = cluster.Cluster(cluster.Load(1, seconds=5, prefixes=1, tail=1), cluster.round_robin()).run()
    assert one["hit"] > 0.98


def test_a_replica_that_ends_takes_streams_along_or_not(cluster: Any) -> None:
    """Those that were begun are cut, unless they go on elsewhere; a surge ends sooner where replicas are added."""
    load = cluster.Load(3, seconds=6)
    cut, resumed = (
        cluster.Cluster(load, cluster.cache_aware(), kill_at=3.0, resumes=resumes).run() for resumes in (False, True)
    )
    assert cut["cut"] > 0
    assert cut["answered"] + cut["cut"] == cut["requests"]
    assert (resumed["cut"], resumed["answered"]) == (0, resumed["requests"])
    assert resumed["moved"] >= cut["cut"]
    surge = cluster.Load(1, rate=15, seconds=45, surge=(5, 40, 8.0))
    alone, more = (cluster.Cluster(surge, cluster.cache_aware(), scale_to=num).run() for num in (None, 4))
    assert more["p95, ms"] < alone["p95, ms"]
