"""Replicas behind a router, simulated.

    python tests/benchmarks/cluster.py [policies|scaling|failures|all] [--json FILE]

Each replica computes steps as our engine does: rows that decode, beside them chunks of prompts up to a budget; a prefix
that its cache holds is not computed again. What a step takes was measured (docs/benchmarks.md: Llama-3.1-8B in bfloat16
on one H200): 3.8 ms for one row, 5.9 for 64, 45,000 tokens of prompts a second. Requests come at random moments; which
of many prefixes one begins with follows a Zipf law. Simulated time, so any machine gives the same figures.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEP_S, ROW_S, TOKEN_S = 3.77e-3, 33e-6, 1 / 45_000
CHUNK, MAX_ROWS, CACHE_TOKENS = 8192, 256, 600_000
MERGED = 4
"""Decode steps without prompts that are simulated as one."""
START_S = 15.0
"""A replica's start: weights from a local disk."""
FAR = 32
"""Requests by which replicas may differ before a router follows loads rather than prefixes, as smg's default does."""


@dataclass(frozen=True)
class Load:
    """What is asked: so many requests a second for each replica of `size`, for some seconds."""

    size: int
    rate: float = 22.0
    seconds: float = 60.0
    prefixes: int = 200
    """For each replica."""
    zipf: float = 1.0
    prefix: int = 2048
    tail: int = 128
    output: int = 256
    surge: tuple[float, float, float] | None = None
    """From, to, and how many times the rate."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, where it is, and what became of it."""

    number: int
    at: float
    group: int
    tail: int
    output: int
    done: int = 0
    left: int = 0
    """Prompt tokens that are still to be computed."""
    first_s: float | None = None
    end_s: float | None = None
    num_moves: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """One engine."""

    index: int
    ready_at: float = 0.0
    is_gone: bool = False
    is_stepping: bool = False
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    computed: int = 0
    cached: int = 0

    @property
    def num(self) -> int:
        """Requests that it has."""
        return len(self.waiting) + len(self.running)

    def take(self, request: Request, prefix: int) -> None:
        """Queue a request; what its cache holds of it is known when it is admitted."""
        request.left = -prefix - request.tail - request.done
        self.waiting.append(request)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """Compute a step; returns when it ends and who is finished then."""
        budget, used = CHUNK, 0
        decoding = [one for one in self.running if one.left == 0]
        for one in self.running:
            if one.left:
                used += self._compute(one, budget - used)
        while self.waiting and used < budget and len(self.running) < MAX_ROWS:
            one = self.waiting.popleft()
            self._admit(one)
            self.running.append(one)
            used += self._compute(one, budget - used)
        merged = MERGED if used == 0 else 1
        end = now + merged * (STEP_S + ROW_S * len(decoding)) + TOKEN_S * used
        finished = []
        for one in decoding:
            one.done = min(one.output, one.done + merged)
        for one in self.running:
            if one.left == 0 and one.first_s is None:
                one.first_s = end
            if one.left == 0 and one.done >= one.output:
                one.end_s = end
                finished.append(one)
        self.running = [one for one in self.running if one.end_s is None]
        return end, finished

    def _admit(self, one: Request) -> None:
        need = -one.left
        held = self.cache.pop(one.group, 0)
        self.cached += held
        one.left = need - held
        self.cache[one.group] = need - one.tail - one.done
        while sum_of(self) > CACHE_TOKENS and len(self.cache) > 1:
            self.cache.popitem(last=False)

    def _compute(self, one: Request, budget: int) -> int:
        num = min(one.left, budget)
        one.left -= num
        self.computed += num
        return num


def sum_of(replica: Replica) -> int:
    """Tokens in a replica's cache: prefixes are equally long, and rows that run have the rest."""
    some = next(iter(replica.cache.values()), 0)
    return len(replica.cache) * some + sum(one.tail + one.done for one in replica.running)


Policy = Callable[[Request, list[Replica]], Replica]


def round_robin() -> Policy:
    """One after the other."""
    counter = itertools.count()
    return lambda request, replicas: replicas[next(counter) % len(replicas)]


def least_loaded() -> Policy:
    """Whoever has the fewest requests."""
    return lambda request, replicas: min(replicas, key=lambda one: (one.num, one.index))


def two_choices() -> Policy:
    """The better of two at random."""
    rng = random.Random(1)
    return lambda request, replicas: min(rng.choices(replicas, k=2), key=lambda one: one.num)


def prefix_hash() -> Policy:
    """Always the same one for a prefix, whatever it has to do."""
    return lambda request, replicas: replicas[hash((request.group, 17)) % len(replicas)]


def cache_aware() -> Policy:
    """Whoever had the prefix last, unless loads are far apart; as smg and SGLang's router do by default."""
    had: dict[int, Replica] = {}

    def choose(request: Request, replicas: list[Replica]) -> Replica:
        least = min(replicas, key=lambda one: (one.num, one.index))
        most = max(one.num for one in replicas)
        known = had.get(request.group)
        if (
            known is None
            or known.is_gone
            or known not in replicas
            or (most - least.num > FAR and known.num > least.num)
        ):
            known = least
        had[request.group] = known
        return known

    return choose


POLICIES: dict[str, Callable[[], Policy]] = {
    "round robin": round_robin,
    "least loaded": least_loaded,
    "two choices": two_choices,
    "prefix hash": prefix_hash,
    "cache aware": cache_aware,
}


def arrivals(load: Load, seed: int = 0) -> Iterator[Request]:
    """Requests in the order of their moments."""
    rng = random.Random(seed)
    groups = load.prefixes * load.size
    weights = list(itertools.accumulate(1 / (rank + 1) ** load.zipf for rank in range(groups)))
    now, number = 0.0, 0
    while True:
        surge = load.surge is not None and load.surge[0] <= now < load.surge[1]
        rate = load.rate * load.size * (load.surge[2] if surge and load.surge is not None else 1.0)
        now += rng.expovariate(rate)
        if now >= load.seconds:
            return
        [group] = rng.choices(range(groups), cum_weights=weights)
        yield Request(number, now, group, rng.randrange(1, 2 * load.tail), rng.randrange(1, 2 * load.output))
        number += 1


@dataclass
class Cluster:
    """A run: replicas, a router, and what happens meanwhile.

    Attributes:
        scale_to: Most replicas that an autoscaler may start, by requests that wait; None: there is none.
        kill_at: When a replica ends.
        resumes: Whether its streams go on elsewhere; else they are cut.
    """

    load: Load
    policy: Policy
    scale_to: int | None = None
    kill_at: float | None = None
    resumes: bool = True
    requests: list[Request] = field(default_factory=list)
    cut: list[Request] = field(default_factory=list)
    replica_s: float = 0.0

    def run(self) -> dict[str, float]:
        """Simulate until all is answered; returns figures."""
        self.replicas = [Replica(index) for index in range(self.load.size)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._coming = arrivals(self.load)
        self._next_arrival()
        if self.kill_at is not None:
            self._at(self.kill_at, self._kill)
        if self.scale_to is not None:
            self._at(1.0, self._scale)
        now = 0.0
        while self._events:
            before, (now, _, happen) = now, heapq.heappop(self._events)
            self.replica_s += (now - before) * sum(not one.is_gone for one in self.replicas)
            happen(now)
        return self._figures(now)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _next_arrival(self) -> None:
        request = next(self._coming, None)
        if request is not None:
            self._at(request.at, lambda now: self._arrive(request, now))

    def _arrive(self, request: Request, now: float) -> None:
        self.requests.append(request)
        self._send(request, now)
        self._next_arrival()

    def _send(self, request: Request, now: float) -> None:
        ready = [one for one in self.replicas if not one.is_gone and one.ready_at <= now]
        replica = self.policy(request, ready)
        replica.take(request, self.load.prefix)
        self._go_on(replica, now)

    def _go_on(self, replica: Replica, now: float) -> None:
        if replica.is_stepping or replica.is_gone or not replica.num:
            return
        replica.is_stepping = True
        end, _ = replica.step(now)

        def over(now: float) -> None:
            replica.is_stepping = False
            self._go_on(replica, now)

        self._at(end, over)

    def _kill(self, now: float) -> None:
        victim = self.replicas[0]
        victim.is_gone = True
        held = [*victim.running, *victim.waiting]
        self.replicas.append(Replica(len(self.replicas), ready_at=now + START_S))
        for request in held:
            if self.resumes or request.first_s is None:  # what was not begun any router sends elsewhere
                request.num_moves += 1
                self._send(request, now)
            else:
                self.cut.append(request)

    def _scale(self, now: float) -> None:
        alive = [one for one in self.replicas if not one.is_gone]
        waiting = sum(len(one.waiting) for one in alive)
        starting = sum(one.ready_at > now for one in alive)
        wanted = min(self.scale_to or 0, len(alive) + waiting // (4 * len(alive)))
        for _ in range(wanted - len(alive) if not starting else 0):
            self.replicas.append(Replica(len(self.replicas), ready_at=now + START_S))
        if now < self.load.seconds:
            self._at(now + 1.0, self._scale)

    def _figures(self, now: float) -> dict[str, float]:
        answered = [one for one in self.requests if one.end_s is not None]
        first = sorted((one.first_s or 0.0) - one.at for one in answered)
        computed, cached = (sum(getattr(one, name) for one in self.replicas) for name in ("computed", "cached"))
        moved = [(one.first_s or 0.0) - one.at for one in answered if one.num_moves]
        return {
            "requests": len(self.requests),
            "answered": len(answered),
            "cut": len(self.cut),
            "hit": cached / max(1, computed + cached),
            "first token p50, ms": 1000 * statistics.median(first),
            "p95, ms": 1000 * first[int(0.95 * len(first))],
            "p99, ms": 1000 * first[int(0.99 * len(first))],
            "tokens/s of each": sum(one.done for one in answered) / self.replica_s,
            "replica hours": self.replica_s / 3600,
            "moved": len(moved),
            "until all is answered, s": now,
        }


def policies(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Every policy at every size."""
    return [
        {"replicas": size, "policy": name} | Cluster(Load(size, seconds=60 if size < 100 else 20), make()).run()
        for size in sizes
        for name, make in POLICIES.items()
    ]


def scaling() -> list[dict[str, Any]]:
    """Seven times the load for two minutes: with what there is, with an autoscaler, and with what the surge needs."""
    surge = Load(4, rate=15, seconds=300, surge=(60, 180, 7.0))
    always = Load(12, rate=5, seconds=300, prefixes=67, surge=(60, 180, 7.0))
    return [
        {"case": "4 replicas"} | Cluster(surge, cache_aware()).run(),
        {"case": "4 to 12 by what waits"} | Cluster(surge, cache_aware(), scale_to=12).run(),
        {"case": "12 replicas"} | Cluster(always, cache_aware()).run(),
    ]


def failures() -> list[dict[str, Any]]:
    """A replica ends under load: of few replicas and of many, with streams that go on and without."""
    return [
        {"replicas": size, "streams": "go on" if resumes else "are cut"}
        | Cluster(Load(size, seconds=40), cache_aware(), kill_at=20, resumes=resumes).run()
        for size in (2, 8, 32)
        for resumes in (False, True)
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="all", choices=["policies", "scaling", "failures", "all"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 8, 32, 128])
    parser.add_argument("--json", type=Path)
    wish = parser.parse_args()
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "policies": lambda: policies(tuple(wish.sizes)),
        "scaling": scaling,
        "failures": failures,
    }
    found = {name: make() for name, make in parts.items() if wish.what in (name, "all")}
    for name, rows in found.items():
        show(name, rows)
    if wish.json is not None:
        wish.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
