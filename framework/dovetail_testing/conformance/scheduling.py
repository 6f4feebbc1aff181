"""What every schedule policy must do: return whom it was given, starve nobody, and stay quick in a long queue."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dovetail.contracts.scheduling import SchedulePolicy, WaitingRequest
from dovetail_testing.checks import check, no_error
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.growth import grows_linearly

SIZES = (1, 2, 3, 7, 64, 129, 1000, 1025)


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request as a policy sees it; nothing of it can be changed."""

    priority: int
    arrival: int
    num_prompt: int
    num_output: int
    remaining_tokens: int
    owner: str = ""
    deadline: float = math.inf
    cached: int = 0


class FakeCache:
    """A `PrefixView` that knows every request's cached tokens."""

    def cached_tokens(self, requests: Sequence[WaitingRequest]) -> list[int]:
        """Return what each request says."""
        return [request.cached for request in requests if isinstance(request, Waiting)]


class SchedulePolicyConformance(Conformance):
    """What every schedule policy must do.

    Attributes:
        seed: Of the queues that are made up.
    """

    kind = "schedule_policy"
    seed: ClassVar[int] = 7

    def queue(self, num: int, rng: random.Random, *, background: bool = False) -> list[Waiting]:
        """Make up a queue's head as the engine gives it: by priority, then by arrival."""
        made = [
            Waiting(
                priority=-(1 << 30) if background else rng.choice((0, 0, 0, 1, 5)),
                arrival=arrival,
                num_prompt=rng.choice((1, 15, 16, 17, rng.randrange(1, 100_000))),
                num_output=rng.choice((0, 0, rng.randrange(1, 1000))),
                remaining_tokens=rng.randrange(1, 100_000),
                cached=rng.choice((0, 16, rng.randrange(0, 100_000))),
            )
            for arrival in rng.sample(range(1, 10 * num + 1), num)
        ]
        return sorted(made, key=lambda request: (-request.priority, request.arrival))

    def ordered(self, policy: SchedulePolicy, waiting: Sequence[Waiting]) -> Sequence[WaitingRequest]:
        """Call the policy."""
        with no_error("order", f" for {len(waiting)} waiting requests"):
            return policy.order(waiting, FakeCache())

    def test_returns_whom_it_was_given(self) -> None:
        """Whatever the queue's length, the order holds requests of the queue, each once at most, and at least one."""
        policy, rng = self.made(), random.Random(self.seed)
        for num in SIZES:
            for background in (False, True):
                waiting = self.queue(num, rng, background=background)
                before = list(waiting)
                found = self.ordered(policy, waiting)
                check(waiting == before, f"order changed the list of {num} waiting requests that it was given")
                check(len(found) > 0, f"of {num} waiting requests nobody is to be admitted")
                known = {id(request) for request in waiting}
                strange = [request for request in found if id(request) not in known]
                check(not strange, f"of {num} waiting requests it returned one that was not among them")
                check(len({id(r) for r in found}) == len(found), f"of {num} waiting requests it returned one twice")

    def test_starves_nobody(self) -> None:
        """If the first few are admitted again and again, everybody's turn comes."""
        policy, rng = self.made(), random.Random(self.seed)
        for num, step in ((1, 1), (40, 1), (300, 7)):
            waiting = self.queue(num, rng)
            for _ in range(num):
                gone = {id(request) for request in self.ordered(policy, waiting)[:step]}
                waiting = [request for request in waiting if id(request) not in gone]
            check(not waiting, f"{len(waiting)} of {num} requests are never among the first {step}")

    def test_keeps_no_requests(self) -> None:
        """What has been ordered can go: nothing of it is kept from step to step."""
        policy = self.made()
        waiting = self.queue(20, random.Random(self.seed))
        first = weakref.ref(waiting[0])
        self.ordered(policy, waiting)
        waiting.clear()
        gc.collect()
        check(first() is None, "a request that was ordered is still held; keep numbers, not requests")

    def test_work_grows_with_the_queue(self) -> None:
        """Ordering twice as many costs about twice the work, counted in operations: it is done in every step."""
        policy = self.made()
        whole = self.queue(1600, random.Random(self.seed))
        is_linear, one, two = grows_linearly(lambda num: self.ordered(policy, whole[:num]), 200)
        check(is_linear, f"ordering some requests costs {one} operations, twice as many {two}")

    def test_imports_no_torch(self) -> None:
        """Loading the policy imports neither torch nor transformers."""
        heavy = [name for name in self._child().heavy_after_load if name in ("torch", "transformers")]
        check(not heavy, f"loading it imports {', '.join(heavy)}, which takes seconds; a policy needs no tensors")
