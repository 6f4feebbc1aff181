"""Which graphs serve a step, and when they are captured. Replaying them: `tests/runtime/test_captured_engine.py`."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from dovetail.engine.request import PromptChunk, StepPlan
from dovetail.engine.step_builder import DECODE_PATIENCE, PREFILL_PATIENCE, STAND_IN_PATIENCE, GraphChooser
from dovetail.messages.step import DecodeGraph, GraphKey, PrefillGraph, PrepareResult

SIZES = [PrefillGraph(8, 1), PrefillGraph(16, 1), PrefillGraph(24, 5), PrefillGraph(40, 5)]
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
SHARING = (4, 8, 16, 32, 64)


class World:
    """Graphs that are there once somebody wants them, unless there is no memory for them."""

    def __init__(self, *, prefix_group: int = 4, memory: bool = True, first: tuple[GraphKey, ...] = ()) -> None:
        keys = [*map(DecodeGraph, ROWS), *SIZES]
        keys += [DecodeGraph(rows, shares=True) for rows in SHARING] if prefix_group else []
        self.memory = memory
        self.tries: list[GraphKey] = []
        first = first or (DecodeGraph(1), DecodeGraph(8), *SIZES[:2])
        info: Any = Mock(
            graphs=tuple(keys), prefix_group=prefix_group, page_size=16, prepared=PrepareResult(captured=first)
        )
        self.chooser = GraphChooser(info, self.prepare)

    def prepare(self, key: GraphKey) -> PrepareResult:
        """Capture one."""
        self.tries.append(key)
        return PrepareResult(captured=(key,) if self.memory else ())

    def there(self, *keys: GraphKey) -> None:
        """These were captured in an idle moment."""
        self.chooser.prepared(PrepareResult(captured=keys))

    def rows(self, num: int) -> int | None:
        """Rows of the graph that serves so many."""
        found = self.chooser.decode_graph_for(num)
        return None if found is None else found.rows

    def prefill(self, *chunks: PromptChunk) -> PrefillGraph | None:
        """The graph for some chunks."""
        return self.chooser.choose(StepPlan([], list(chunks)))[1]


def chunk(start: int, num_new: int, *, logprobs: bool = False, media: object = None) -> PromptChunk:
    """Of a request in row 7 and the pages 20, 21 … in this order."""
    request = Mock(prompt_logprobs=[] if logprobs else None, pool=None, media=media)
    return PromptChunk(request, start, num_new, samples=True)


def behind(num: int, prefix: int = 2048, own: int = 64) -> list[Any]:
    """Requests behind one prefix, in pages of 16 tokens."""
    tokens = prefix + own
    return [
        Mock(pages=[[*range(1, prefix // 16 + 1), *range(1000 * i, 1000 * i + own // 16)]], computed_len=tokens, row=i)
        for i in range(9, 9 + num)
    ]


def test_the_smallest_captured_bucket_serves_a_batch() -> None:
    """Captured sizes are served at once; beyond the largest bucket nothing is replayed."""
    world = World()
    world.there(DecodeGraph(4))
    assert [world.rows(n) for n in (1, 2, 3, 8)] == [1, 4, 4, 8]
    assert world.rows(97) is None


def test_a_missing_bucket_is_stood_in_for_until_it_is_worth_capturing() -> None:
    """Without its graph a batch runs eagerly, or in a larger one; after enough such steps the graph is captured."""
    world = World()
    assert world.rows(12) is None
    world.there(DecodeGraph(24))
    assert [world.rows(12) for _ in range(DECODE_PATIENCE - 1)] == [24] * (DECODE_PATIENCE - 1)
    assert world.rows(12) == 12
    assert world.tries == [DecodeGraph(12)]


def test_a_bucket_without_memory_is_not_tried_again() -> None:
    """Its batches run eagerly, or in a larger graph; the failure is no failure of the step."""
    world = World(memory=False)
    assert [world.rows(12) for _ in range(3 * DECODE_PATIENCE)] == [None] * 3 * DECODE_PATIENCE
    assert world.tries == [DecodeGraph(12)]
    assert [world.rows(3) for _ in range(3 * DECODE_PATIENCE)] == [8] * 3 * DECODE_PATIENCE
    assert world.tries == [DecodeGraph(12), DecodeGraph(4)]


def test_rows_behind_a_prefix_get_the_graph_that_shares_it() -> None:
    """Until it is captured, after enough steps, the plain one serves in the order given; others get the plain one."""
    world = World()
    requests = behind(6)[::-1]

    def choose(requests: list[Any]) -> tuple[DecodeGraph | None, list[Any]]:
        plan = StepPlan(list(requests), [])
        return world.chooser.choose(plan)[0], plan.decode

    for _ in range(DECODE_PATIENCE):
        assert choose(requests) == (DecodeGraph(8), requests)
    assert choose(requests) == (DecodeGraph(8, shares=True), requests[::-1])
    assert choose(requests[:2]) == (DecodeGraph(8), requests[:2])  # too little is saved, and not yet captured
    assert choose(behind(6, prefix=0))[0] == DecodeGraph(8)
    assert DecodeGraph(4, shares=True) not in world.tries


def test_a_missing_graph_is_no_graph() -> None:
    """Where neither the sharing nor a plain graph is there, the step is eager; nor beyond the largest bucket."""
    world = World()
    assert world.chooser.choose(StepPlan(behind(12), [])) == (None, None)
    assert world.chooser.choose(StepPlan(behind(97), [])) == (None, None)
    world.there(DecodeGraph(16, shares=True))
    assert world.chooser.choose(StepPlan(behind(12), []))[0] == DecodeGraph(16, shares=True)


def test_larger_sharing_buckets_end_where_plain_ones_do() -> None:
    """Between the largest sharing bucket and the largest bucket, the plain graph serves."""
    world = World()
    world.there(DecodeGraph(96))
    assert world.chooser.choose(StepPlan(behind(80), []))[0] == DecodeGraph(96)


def test_a_backend_that_shares_nothing_changes_no_order() -> None:
    """With `prefix_group` 0 requests stay as they are."""
    world, requests = World(prefix_group=0), behind(8)[::-1]
    plan = StepPlan(list(requests), [])
    assert world.chooser.choose(plan)[0] == DecodeGraph(8)
    assert plan.decode == requests


def test_both_halves_of_a_step_are_replayed_or_none() -> None:
    """Decode rows without a graph make a step with a captured prefill eager, and the other way round."""
    world = World()
    rows = behind(1, prefix=0)
    assert world.chooser.choose(StepPlan(rows, [chunk(0, 8)])) == (DecodeGraph(1), SIZES[0])
    assert world.chooser.choose(StepPlan(behind(12, prefix=0), [chunk(0, 8)])) == (None, None)
    assert world.chooser.choose(StepPlan(rows, [chunk(0, 41)])) == (None, None)


def test_without_graphs_steps_are_eager() -> None:
    """As on CPU, where none can be captured."""
    info: Any = Mock(graphs=(), prefix_group=0, page_size=16, prepared=PrepareResult())
    chooser = GraphChooser(info, Mock(side_effect=AssertionError))
    for _ in range(2 * DECODE_PATIENCE):
        assert chooser.choose(StepPlan(behind(2), [])) == (None, None)
        assert chooser.choose(StepPlan([], [chunk(0, 8)])) == (None, None)


def test_the_smallest_size_that_is_there_serves() -> None:
    """By tokens and chunks; nothing serves prompts that want all their tokens' logits, or that have images."""
    world = World()
    assert world.prefill(chunk(0, 8)) == PrefillGraph(8, 1)
    assert world.prefill(chunk(5, 9)) == PrefillGraph(16, 1)
    assert world.prefill(chunk(0, 8), chunk(0, 8, logprobs=True)) is None
    assert world.prefill(chunk(0, 8), chunk(0, 8, media=object())) is None
    assert world.prefill(*[chunk(0, 1)] * 6) is None
    assert world.prefill(chunk(0, 41)) is None


def test_a_missing_size_is_captured_when_it_has_been_missed_often() -> None:
    """Without a larger one that is not much larger, soon; else later."""
    world, two = World(), [chunk(0, 8), chunk(0, 9)]
    assert [world.prefill(*two) for _ in range(PREFILL_PATIENCE)] == [None] * PREFILL_PATIENCE
    assert world.prefill(*two) == SIZES[2]
    world = World()
    world.there(SIZES[3])
    assert [world.prefill(*two) for _ in range(STAND_IN_PATIENCE)] == [SIZES[3]] * STAND_IN_PATIENCE
    assert world.prefill(*two) == SIZES[2]


def test_a_larger_size_stands_in_if_it_is_not_much_larger() -> None:
    """Graphs of one chunk always may; others up to twice the tokens."""
    world = World(first=(SIZES[1],))
    assert world.prefill(chunk(0, 1)) == SIZES[1]
    world = World(first=(SIZES[3],))
    assert world.prefill(chunk(0, 1)) is None
    assert world.prefill(chunk(0, 20)) == SIZES[3]


def test_a_size_without_memory_is_not_tried_again() -> None:
    """A larger size that is there serves, or none; the failure is no failure of the step."""
    world, two = World(memory=False), [chunk(0, 8), chunk(0, 9)]
    assert [world.prefill(*two) for _ in range(PREFILL_PATIENCE + 1)] == [None] * (PREFILL_PATIENCE + 1)
    assert world.tries == [SIZES[2]]
    for _ in range(3 * STAND_IN_PATIENCE):
        world.prefill(*two)
    assert world.tries == [SIZES[2], SIZES[3]]


def test_missing_graphs_are_counted_by_size() -> None:
    """Steps of another size do not bring a size nearer to its capture."""
    world = World()
    for _ in range(DECODE_PATIENCE):
        assert world.rows(12) is None
        assert world.rows(20) is None
    assert world.tries == []
    assert world.rows(12) == 12
