"""Random operations on scheduler, pages and tree against plain sets: who owns a page, and what was cut stays gone.

DOVETAIL_BOOKS is the number of operations, 5,000 if not given; 100,000 take some minutes.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.cache import FULL, Chunk, Reach, Recurrent, Window
from dovetail.engine.request import EngineRequest, StepPlan
from dovetail.messages import BACKGROUND, Finish

spec = importlib.util.spec_from_file_location("books_world", Path(__file__).parent / "test_scheduler.py")
assert spec is not None
assert spec.loader is not None
_scheduler = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_scheduler)
World: Any = _scheduler.World
POLICIES: tuple[str, ...] = _scheduler.POLICIES

GROUPS: tuple[tuple[Reach, ...], ...] = (
    (FULL,),
    (FULL, Window(7)),
    (FULL, Window(3), Chunk(8)),
    (FULL, Recurrent()),
    (FULL, Window(5), Recurrent(3), Recurrent(2)),
)
NUM_OPERATIONS = int(os.environ.get("DOVETAIL_BOOKS", "5000"))


class Books:
    """A world whose steps may turn out broken, or fail; pages are followed one by one.

    `spoilt` are pages with something that is not finite: written by a broken request since its step, or by whoever read
    such a page. A page is clean again once it was zeroed. `contents` says of each page, by offset, for which tokens its
    keys and values were computed: a hash of all from the first on. `rows` and `copies` have the same hash for states of
    recurrent groups, and whether it is spoilt.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        size = rng.choice([1, 2, 4])
        self.reaches = GROUPS[seed % len(GROUPS)]
        self.world = World(
            num_pages=rng.randrange(60, 140) // size + 30,
            page_size=size,
            reaches=self.reaches,
            policy=rng.choice(POLICIES),
            depth=rng.randrange(2),
            max_running_requests=rng.choice([3, 8]),
            max_prefill_tokens=rng.choice([5, 24]),
            num_copies=rng.choice([2, 3, 9]),
        )
        self.recurrent = [g for g, reach in enumerate(self.reaches) if isinstance(reach, Recurrent)]
        self.rows: dict[tuple[int, int], tuple[int, bool]] = {}
        self.copies: dict[tuple[int, int], tuple[int, bool]] = {}
        self.saves: list[list[int]] = []
        self.num_loaded = 0
        self.spoilt: set[tuple[int, int]] = set()
        self.broken: dict[int, set[EngineRequest]] = {}
        self.num_broken = self.num_emitted = 0
        self.contents: dict[tuple[int, int], dict[int, int]] = {}
        self.world.pages.rows.zero_pages = self.zero_pages
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in self.reaches]

    def zero_pages(self, group: int, pages: list[int]) -> None:
        """Zero pages."""
        for page in pages:
            self.spoilt.discard((group, page))
            self.contents.pop((group, page), None)
            self.copies.pop((group, page), None)

    def step(self, *, breaks: bool, fails: bool) -> None:
        """Plan a step and launch it, or let that fail; then read what is under way beyond the depth."""
        world, scheduler = self.world, self.world.scheduler
        scheduler.ratio.value = 0.0
        plan = scheduler.schedule()
        if plan.requests and fails:
            scheduler.launching(plan)
            while world.flying:
                self.read(world.flying.pop(0))
            scheduler.discard(plan, plan.requests)
            self.check()
            return
        if plan.requests:
            scheduler.launching(plan)
            self.flush_tables()
            self.write(plan, breaks)
            scheduler.launched(plan)
            world.flying.append(plan)
        while len(world.flying) > (world.depth if plan.requests else 0):
            self.read(world.flying.pop(0))
        self.check()

    def flush_tables(self) -> None:
        """Send page table entries, as the device gets them: cleared rows first."""
        changes = self.world.pages.rows.drain()
        cleared = set(changes.cleared.tolist())
        for table in self.tables:
            for place in [place for place in table if place[0] in cleared]:
                del table[place]
        for group, row, column, page in changes.tables.T.tolist():
            self.tables[group][row, column] = page
        for group, copy, row in changes.loads.T.tolist():
            self.rows[group, row] = self.copies[group, copy] if copy else (0, False)
            self.num_loaded += copy != 0
        self.saves = changes.saves.T.tolist()

    def write(self, plan: StepPlan, breaks: bool) -> None:
        """Compute, as the device does: reads and writes pages in order; one request may go wrong by itself."""
        poisoned_entry = self.rng.choice(plan.requests) if breaks else None
        spans = [(r, r.computed_len, r.computed_len + 1) for r in plan.decode]
        spans += [(c.request, c.start, c.start + c.num_new) for c in plan.chunks]
        size = self.world.pages.page_size
        found = set()
        for request, start, stop in spans:
            is_bad = request is poisoned_entry
            for g, reach in enumerate(self.reaches):
                own = request.pages[g]
                if isinstance(reach, Recurrent):
                    is_bad |= self.rows[g, request.row][1]
                    continue
                is_bad |= any((g, page) in self.spoilt for page in own[reach.start(start) // size : -(-start // size)])
            self.compute(request, start, stop)
            self.fold(request, start, stop, is_bad)
            if is_bad:
                found.add(request)
                for g, own in enumerate(request.pages):
                    self.spoilt.update((g, page) for page in own[start // size : -(-stop // size)] if page)
        if poisoned_entry is not None:
            self.num_broken += 1
        self.broken[plan.number] = found

    def compute(self, request: EngineRequest, start: int, stop: int) -> None:
        """Read what stands before `start`, which must be of the same tokens, and write from there on."""
        size, seen = self.world.pages.page_size, 0
        for place in range(stop):
            token = request.ids[place] if place < len(request.ids) else 1  # what will be sampled
            seen = hash((seen, token))
            for g, reach in enumerate(self.reaches):
                if isinstance(reach, Recurrent) or place < reach.start(start):
                    continue
                page = request.pages[g][place // size]
                assert page, "a request sees a page that it has given back"
                assert self.tables[g].get((request.row, place // size)) == page, "the device has another page"
                content = self.contents.setdefault((g, page), {})
                if place >= start:
                    content[place % size] = seen
                else:
                    assert content.get(place % size) == seen, "a request reads what was not computed for it"

    def fold(self, request: EngineRequest, start: int, stop: int, is_bad: bool) -> None:
        """Fold tokens into the row's states, which have taken in all before `start`, and copy them where asked."""
        for g in self.recurrent:
            asked = {length: copy for group, row, length, copy in self.saves if (group, row) == (g, request.row)}
            assert all(start < length <= stop for length in asked), "a copy that no chunk passes"
            seen = 0
            for place in range(stop):
                if place == start:
                    assert self.rows[g, request.row][0] == seen, "a state has taken in other tokens"
                seen = hash((seen, request.ids[place] if place < len(request.ids) else 1))
                if place + 1 in asked:
                    self.copies[g, asked[place + 1]] = seen, is_bad
            self.rows[g, request.row] = seen, is_bad

    def read(self, plan: StepPlan) -> None:
        """Account for a step as the engine does."""
        scheduler = self.world.scheduler
        scheduler.step_finished(plan)
        written = {request for request, _, _ in plan.writes}
        broken = [request for request in plan.requests if request in self.broken[plan.number] and request in written]
        if broken:
            scheduler.discard(plan, broken)
            for request in broken:
                if request.finish is None:
                    request.finish = Finish("abort")
                    scheduler.end(request)
        scheduler.counted(plan)
        for request in plan.decode + [chunk.request for chunk in plan.chunks if chunk.samples]:
            if request.finish is None and plan.number > request.void_step:
                assert request not in self.broken[plan.number], "a token was made from what is not finite"
                self.num_emitted += 1
                request.append_token(1)
                if request.finish is not None:
                    scheduler.end(request)

    def check(self) -> None:
        """Every page has one owner; what nobody has to read any more, or was read and found broken, is clean."""
        pages, running = self.world.pages, self.world.scheduler.running
        for g, allocator in enumerate(pages.allocators):
            held = [page for r in running for page in r.pages[g][r.num_tree_pages :] if page]
            cached = [page for node in pages.tree.nodes() for page in node.pages[g] if page]
            owners = Counter([*held, *cached, *allocator.free_pages])
            assert set(owners) == set(range(1, allocator.num_pages + 1))
            assert max(owners.values()) == 1
            if g in self.recurrent:
                begun = {r.pages[g][r.num_tree_pages - 1] for r in pages._loading if r.num_tree_pages}
                pinned = pages.tree.num_pages(g) - pages.tree.num_free_to_go(g)
                assert pinned == len(begun), "a copy is pinned behind the step that loads it"
                continue
            seen = {page for r in running for page in r.pages[g][: r.num_tree_pages] if page}
            assert pages.tree.num_pages(g) - pages.tree.num_free_to_go(g) == len(seen)
        assert pages.check_counts(running)
        assert pages.check_ownership(running)
        if not self.world.flying:
            assert not self.spoilt, "a page of a step that was read is still spoilt"

    def random_operation(self) -> None:
        """Add, abort, flush or step."""
        rng, world = self.rng, self.world
        choice = rng.random()
        room = world.pages.allocators[0].num_pages * world.pages.page_size
        if choice < 0.25 and len(world.scheduler.waiting) < 20:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))][: room - 20]
            world.add(prompt, rng.randrange(1, 20), rng.choice([0, 0, 1, BACKGROUND]))
        elif choice < 0.3 and world.scheduler.has_work:
            gone = rng.choice([*world.scheduler.waiting, *world.scheduler.running])
            gone.finish = Finish("abort")
            world.scheduler.end(gone)
        elif choice < 0.31:
            world.pages.flush()
        else:
            world.now += rng.choice([0, 0, 0, 1])
            self.step(breaks=rng.random() < 0.08, fails=rng.random() < 0.03)


@pytest.mark.timeout(3600)
def test_random_operations_keep_the_books_right() -> None:
    """Hits on tentative pages, cuts, failures, retractions, aborts: no token comes of a wrong page, none is lost."""
    done = emitted = broken = loaded = seed = 0
    while done < NUM_OPERATIONS:
        books = Books(seed)
        for _ in range(500):
            books.random_operation()
        for _ in range(3000):
            if not books.world.scheduler.has_work and not books.world.flying:
                break
            books.world.now += 1
            books.step(breaks=False, fails=False)
        assert not books.world.scheduler.has_work
        assert books.world.pages.num_used == 0
        done, seed = done + 500, seed + 1
        emitted, broken = emitted + books.num_emitted, broken + books.num_broken
        loaded += books.num_loaded
    assert emitted > NUM_OPERATIONS / 4
    assert broken > NUM_OPERATIONS / 100
    assert loaded > NUM_OPERATIONS / 100
