"""What every speculator must do: guess for whom it was asked, within bounds, and stay quick for long requests."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from array import array
from collections.abc import Sequence
from typing import ClassVar

from dovetail.contracts.speculation import Speculator
from dovetail_testing.checks import check, fail, raised
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.growth import operations

LENS = (1, 2, 3, 7, 64, 129, 1000, 5000)
STEPS = 24
SLACK = 200
"""Lines of Python that a step may take more for a request sixteen times as long."""


class Drafted:
    """A request as a speculator sees it."""

    def __init__(self, ids: Sequence[int], num_prompt: int, most_drafts: int) -> None:
        """Without a memo."""
        self.ids: Sequence[int] = array("i", ids)
        self.num_prompt, self.most_drafts = num_prompt, most_drafts
        self.memo: object = None


class SpeculatorConformance(Conformance):
    """What every speculator must do.

    Attributes:
        seed: Of the texts that are made up.
    """

    kind = "speculator"
    seed: ClassVar[int] = 7

    def text(self, length: int, rng: random.Random) -> list[int]:
        """Make up tokens: of many or of few, at random or a phrase again and again, at times with a word between."""
        size = rng.choice((1, 2, 5, 1000))
        if rng.random() < 0.5:
            return [rng.randrange(size) for _ in range(length)]
        phrase = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
        found: list[int] = []
        while len(found) < length:
            found += phrase
            found += [rng.randrange(1000)] * (rng.random() < 0.2)
        return found[:length]

    def requests(self, rng: random.Random, num: int | None = None) -> list[Drafted]:
        """Make up requests of every length, some behind the first token of their reply."""
        made = []
        for length in LENS if num is None else rng.choices(LENS[:-1], k=num):
            ids = self.text(length, rng)
            made.append(Drafted(ids, rng.randrange(1, length + 1), rng.choice((1, 2, 5, 64))))
        return made

    def drafted(self, speculator: Speculator, requests: Sequence[Drafted]) -> Sequence[Sequence[int]]:
        """Call the speculator, and look at what it returns."""
        try:
            found = speculator.draft(requests)
        except Exception as error:  # a stranger's code; the message says what it did
            lens = ", ".join(str(len(request.ids)) for request in requests)
            fail(f"draft raised {raised(error)} for requests of {lens} tokens")
        check(len(found) == len(requests), f"for {len(requests)} requests it returned {len(found)} drafts")
        for request, ids in zip(requests, found, strict=True):
            what = f"a request of {len(request.ids)} tokens"
            check(
                len(ids) <= request.most_drafts,
                f"for {what} it returned {len(ids)} drafts; most_drafts is {request.most_drafts}",
            )
            wrong = [token for token in ids if isinstance(token, bool) or not hasattr(token, "__index__") or token < 0]
            check(not wrong, f"for {what} it drafts {wrong[:1]}, which is no token id")
        return found

    def test_drafts_are_within_bounds(self) -> None:
        """For requests of 1 to 5,000 tokens, together and alone, it returns token ids, no more than are of use."""
        speculator, rng = self.made(), random.Random(self.seed)
        self.drafted(speculator, [])
        for _ in range(4):
            self.drafted(speculator, self.requests(rng))
            for request in self.requests(rng):
                self.drafted(speculator, [request])

    def test_follows_requests_as_they_grow(self) -> None:
        """Steps in which requests say a token or several, come and go, and stand in another order: still within bounds.

        What a request said is what was drafted for it, or not, or more than that.
        """
        speculator, rng = self.made(), random.Random(self.seed)
        running = self.requests(rng)
        for _ in range(STEPS):
            found = self.drafted(speculator, running)
            for request, ids in zip(running, found, strict=True):
                held = list(ids)[: rng.randrange(len(ids) + 1)]
                said = [*held, *self.text(rng.choice((1, 1, 1, 4)), rng)]
                request.ids = array("i", [*request.ids, *said])
                request.most_drafts = rng.choice((1, 2, 5, 64))
            rng.shuffle(running)
            running = [*running[1:], *self.requests(rng, 1)]

    def test_each_request_has_its_own(self) -> None:
        """Drafts belong to the request at the same place: in another order, each request gets what it got before."""
        rng = random.Random(self.seed)
        requests = self.requests(rng) + self.requests(rng, 8)
        found = self.drafted(self.made(), copy.deepcopy(requests))
        order = rng.sample(range(len(requests)), len(requests))
        again = self.drafted(self.made(), [copy.deepcopy(requests[i]) for i in order])
        for i, ids in zip(order, again, strict=True):
            length = len(requests[i].ids)
            check(
                list(ids) == list(found[i]),
                f"a request of {length} tokens gets other drafts where the requests stand in another order",
            )

    def test_changes_nothing(self) -> None:
        """It changes nothing of a request but its memo, nor the list that it was given."""
        speculator, requests = self.made(), self.requests(random.Random(self.seed))
        before, facts = list(requests), [(list(r.ids), r.num_prompt, r.most_drafts) for r in requests]
        self.drafted(speculator, requests)
        check(requests == before, "draft changed the list of requests that it was given")
        now = [(list(r.ids), r.num_prompt, r.most_drafts) for r in requests]
        check(now == facts, "draft changed a request; only its memo is the speculator's")

    def test_keeps_no_requests(self) -> None:
        """What has been drafted for can go: what is kept of a request is in its memo."""
        speculator = self.made()
        requests = self.requests(random.Random(self.seed))
        first = weakref.ref(requests[0])
        self.drafted(speculator, requests)
        requests.clear()
        gc.collect()
        check(first() is None, "a request is still held after its end; keep what you need in its memo")

    def test_a_step_costs_the_same_for_long_requests(self) -> None:
        """One more token costs as much behind 16,000 as behind 1,000, counted in operations: it is done every step."""
        one, other = (self._cost(length) for length in (1000, 16_000))
        check(
            other <= 2 * one + SLACK,
            f"a step costs {one} operations for a request of 1,000 tokens, and {other} for one of 16,000",
        )

    def _cost(self, length: int) -> int:
        """Operations of a step, once the request is known."""
        speculator, rng = self.made(), random.Random(self.seed)
        request = Drafted([rng.randrange(50) for _ in range(length)], length // 2, 5)
        most = 0
        for _ in range(6):
            self.drafted(speculator, [request])
            request.ids = array("i", [*request.ids, rng.randrange(50)])
            most = max(most, operations(lambda: speculator.draft([request])))
        return most
