"""Jump-forward: the same tokens as without it, in fewer steps, whatever else a request asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grammar_demo import Demo, Result, json_step

from dovetail.engine.messages import GrammarStep, SamplingParams, Submit
from dovetail.engine.request import Request
from dovetail.grammar import jump

LETTER = (
    r"Dear (Sir|Madam), thank you very much for your letter of [0-9]{2} May[.] We are (happy|sorry) to hear from you"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "the_name_of_the_customer": {"enum": ["Alexander the Great", "nobody at all"]},
        "the_number_of_the_invoice": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["the_name_of_the_customer", "the_number_of_the_invoice"],
    "additionalProperties": False,
}
STEPS = [GrammarStep(backend="llguidance", kind="regex", source=LETTER), json_step(SCHEMA, max_whitespace=0)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Demo]:
    """An engine that overlaps its steps with the host's work, or not."""
    made = Demo(overlap_on_cpu=request.param)
    yield made
    made.close()


def both_ways(
    engine: Demo, monkeypatch: pytest.MonkeyPatch, make: Callable[[], list[Any]]
) -> tuple[list[Result], list[Result], list[int]]:
    """Results with jumps, and without; and how many tokens each jump took."""
    jumps: list[int] = []

    def counted(request: Request, tokens: list[int]) -> list[int]:
        taken = jump.jump(request, tokens)
        jumps.append(len(taken))
        return taken

    with monkeypatch.context() as patch:
        patch.setattr("dovetail.engine.core.jump", counted)
        jumping = engine.together(make())
        num_jumps = len(jumps)
        patch.setattr(jump, "MIN_JUMP", 1 << 30)
        stepping = engine.together(make())
    assert len(jumps) == num_jumps
    return jumping, stepping, jumps


@pytest.mark.parametrize("step", STEPS, ids=["regex", "json"])
def test_the_text_is_the_same_in_fewer_steps(engine: Demo, monkeypatch: pytest.MonkeyPatch, step: GrammarStep) -> None:
    """Seeded draws, greedy ones, with constrained and free neighbours: equal tokens, some come several at a time."""

    def make() -> list[Any]:
        bound = [engine.one(step, seed=i, max_tokens=120, temperature=1.0) for i in range(4)]
        greedy = engine.one(step, temperature=0, max_tokens=120)
        free = engine.one(seed=3, max_tokens=30, ignore_eos=True)
        return [*bound, greedy, free]

    jumping, stepping, jumps = both_ways(engine, monkeypatch, make)
    for one, other in zip(jumping, stepping, strict=True):
        assert one.ids == other.ids
        assert one.finish == other.finish
    assert len(jumps) >= 5
    assert min(jumps) >= jump.MIN_JUMP


@pytest.mark.parametrize("max_tokens", [1, 9, 30])
def test_a_length_limit_holds_within_forced_tokens(
    engine: Demo, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """`max_tokens` cuts at the same token, and so does a stop token among those that are forced."""

    def make() -> list[Any]:
        stop = engine.tokenizer.encode(" much", add_special_tokens=False)[-1]
        return [
            engine.one(STEPS[0], seed=1, max_tokens=max_tokens, min_tokens=max_tokens),
            engine.one(STEPS[0], seed=1, max_tokens=60, stop_token_ids=(stop,)),
            engine.one(STEPS[0], seed=1, max_tokens=60, stop_token_ids=(stop,), min_tokens=30),
        ]

    jumping, stepping, _ = both_ways(engine, monkeypatch, make)
    for one, other in zip(jumping, stepping, strict=True):
        assert (one.ids, one.finish) == (other.ids, other.finish)
    assert len(jumping[0].ids) == max_tokens


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}], ids=str)
def test_what_needs_every_token_sampled_does_not_jump(
    engine: Demo, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """With log probabilities or penalties each token comes by itself, with what belongs to it."""

    def make() -> list[Any]:
        return [engine.one(STEPS[0], seed=2, max_tokens=80, **params)]

    [one], [other], jumps = both_ways(engine, monkeypatch, make)
    assert one.ids == other.ids
    assert not jumps
    if "logprobs" in params:
        assert sum(len(delta.logprobs or ()) for delta in one.deltas) == len(one.ids)


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_and_abort_around_jumps(make_demo: Callable[..., Demo], overlap: bool) -> None:
    """With pages for few requests and others leaving midway, every text still matches, and no page is lost."""
    demo = make_demo(max_total_tokens=330, page_size=4, disable_radix_cache=True, overlap_on_cpu=overlap)
    step = GrammarStep(backend="llguidance", kind="regex", source=f"({LETTER}; [a-z]{{3}} ){{3}}")

    async def leaves(number: int) -> Result:
        result = Result()
        submit = Submit(
            rid=f"leaves-{number}",
            prompt_ids=demo.prompt("x"),
            params=SamplingParams(max_tokens=90, seed=number),
            grammar=(step,),
        )
        stream = demo.client.submit(submit)
        async for _ in stream:
            if number < len(result.deltas):
                break
            result.deltas.append(_)
        await stream.aclose()
        return result

    async def main() -> tuple[list[Result], dict[str, int]]:
        stay = [demo.one(step, seed=i, max_tokens=120) for i in range(5)]
        results = await asyncio.gather(*stay, *(leaves(i) for i in range(3)))
        await demo.one(max_tokens=2)
        return list(results[:5]), await demo.client.control("stats")

    results, stats = demo.run(main())
    assert max(delta.num_retractions for result in results for delta in result.deltas) > 0
    for result in results:
        assert result.finish is not None
        if result.finish.reason == "stop":
            assert re.fullmatch(step.source, result.text)
        else:
            assert len(result.ids) == 120
    assert (stats["num_running"], stats["num_used_tokens"]) == (0, 0)
