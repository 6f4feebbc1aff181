"""Jump-forward: the same tokens as without it, in fewer steps, whatever else a request asks for."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grammar_demo import Demo, Jump, Result, fixed, json_option

from dovetail.engine import replies
from dovetail.engine.admission import NewTokenRatio
from dovetail.engine.request import EngineRequest
from dovetail.messages import Finish, GrammarOption, SamplerParams, Submit

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
FIXED = "The quick brown fox jumps over the lazy dog, and it does so again and again, for as long as it may. " * 3
STEPS = [GrammarOption(backend="llguidance", kind="regex", source=LETTER), json_option(SCHEMA, max_whitespace=0)]


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
    original = replies.jump

    def counted(request: EngineRequest, tokens: list[int], step: int) -> list[int]:
        taken = original(request, tokens, step)
        jumps.append(len(taken))
        return taken

    with monkeypatch.context() as patch:
        patch.setattr("dovetail.engine.replies.jump", counted)
        jumping = engine.together(make())
        num_jumps = len(jumps)
        patch.setattr(replies, "MIN_JUMP", 1 << 30)
        stepping = engine.together(make())
    assert len(jumps) == num_jumps
    return jumping, stepping, jumps


@pytest.mark.first(1)
@pytest.mark.sampled
@pytest.mark.parametrize("step", STEPS, ids=["regex", "json"])
def test_the_text_is_the_same_in_fewer_steps(
    engine: Demo, monkeypatch: pytest.MonkeyPatch, step: GrammarOption
) -> None:
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
    assert min(jumps) >= replies.MIN_JUMP


@pytest.mark.sampled
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


@pytest.mark.sampled
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


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_retraction_and_abort_around_jumps(make_demo: Callable[..., Demo], overlap: bool) -> None:
    """With pages for few requests and others leaving midway, every text still matches, and no page is lost."""
    demo = make_demo(max_total_tokens=330, page_size=4, disable_radix_cache=True, overlap_on_cpu=overlap)
    step = GrammarOption(backend="llguidance", kind="regex", source=f"({LETTER}; [a-z]{{3}} ){{4}}")

    async def leaves(number: int) -> Result:
        result = Result()
        submit = Submit(
            rid=f"leaves-{number}",
            prompt_ids=demo.prompt("x"),
            params=SamplerParams(max_tokens=90, seed=number),
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
        stay = [demo.one(step, seed=i, max_tokens=120) for i in range(10)]
        results = await asyncio.gather(*stay, *(leaves(i) for i in range(3)))
        await demo.one(max_tokens=2)
        return list(results[:10]), await demo.client.control("stats")

    results, stats = demo.run(main())
    assert max(delta.num_retractions for result in results for delta in result.deltas) > 0
    for result in results:
        assert result.finish is not None
        if result.finish.reason == "stop":
            assert re.fullmatch(step.source, result.text)
        else:
            assert len(result.ids) == 120
    assert (stats["num_running"], stats["num_used_tokens"]) == (0, 0)


@pytest.mark.parametrize("num_texts", [1, 9])
def test_a_jump_takes_no_pages_beyond_the_length_limit(
    make_demo: Callable[..., Demo], jumps: list[Jump], num_texts: int
) -> None:
    """Forced text, also what would not fit the pool, is cut at `max_tokens`, at once, and evicts nobody for more."""
    demo = make_demo(max_total_tokens=112, page_size=4)
    prompt = demo.prompt("Name a river, please.")
    kept = demo.generate(prompt=prompt, max_tokens=30, ignore_eos=True)
    text = FIXED * num_texts
    assert len(demo.tokenizer.encode(text, add_special_tokens=False)) > 60
    cut = demo.generate(fixed(text), prompt=demo.prompt("x"), max_tokens=9)
    assert (len(cut.ids), cut.finish) == (9, Finish("length"))
    assert text.startswith(cut.text)
    assert [each.num for each in jumps] == [8]
    again = demo.generate(prompt=prompt + kept.ids, max_tokens=1)
    assert again.deltas[0].cached_tokens >= len(prompt) + 30 - 5


def test_forced_text_longer_than_a_step_is_computed_in_several(
    make_demo: Callable[..., Demo], jumps: list[Jump]
) -> None:
    """A string of 2,000 characters that a schema forces goes through small chunks, beside one that goes on."""
    demo = make_demo(chunked_prefill_size=64, overlap_on_cpu=True, dtype="float32")
    text = FIXED * 7 + '"\\\n\té😀\u007f/'
    schema = {
        "type": "object",
        "properties": {"text": {"const": text}, "n": {"enum": [1, 22]}},
        "required": ["text", "n"],
    }
    step = json_option({**schema, "additionalProperties": False}, max_whitespace=0)
    free = {"temperature": 0, "max_tokens": 25, "ignore_eos": True}
    alone = demo.generate(**free)
    long, beside = demo.together([demo.one(step, max_tokens=1900), demo.one(**free)])
    assert len(text) > 2000
    assert json.loads(long.text) in ({"text": text, "n": 1}, {"text": text, "n": 22})
    assert max(each.num for each in jumps) > 4 * 64
    assert beside.ids == alone.ids


@pytest.mark.full
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_retraction_between_jumps_changes_no_token(
    make_demo: Callable[..., Demo], monkeypatch: pytest.MonkeyPatch, jumps: list[Jump], overlap: bool
) -> None:
    """Greedy requests that jumped, were retracted and jumped again say together what each says alone."""
    monkeypatch.setattr(NewTokenRatio, "start", NewTokenRatio.floor)  # let in more than there is room for
    demo = make_demo(max_total_tokens=160, page_size=4, overlap_on_cpu=overlap, dtype="float32")
    source = "([a-f]{6}: the same letter as before, and nothing else; ){3}"
    step = GrammarOption(backend="llguidance", kind="regex", source=source)
    wanted = [{"prompt": demo.prompt(f"Say {number}."), "temperature": 0, "max_tokens": 80} for number in range(4)]
    crowded = demo.together([demo.one(step, **each) for each in wanted])
    assert any(a.rid == b.rid and a.num_retractions < b.num_retractions for a, b in itertools.combinations(jumps, 2)), (
        jumps
    )
    demo.run(demo.client.control("flush_cache"))
    alone = [demo.generate(step, **each) for each in wanted]
    assert max(result.deltas[-1].num_retractions for result in alone) == 0
    assert [result.ids for result in crowded] == [result.ids for result in alone]
    assert all(re.fullmatch(source, result.text) for result in crowded)


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.full), 64])
def test_text_of_jumps_is_a_prefix_like_any_other(
    make_demo: Callable[..., Demo], jumps: list[Jump], page_size: int
) -> None:
    """Whoever goes on behind a text that came by jumps finds it in the cache, and says what it would say without."""
    demo = make_demo(page_size=page_size, overlap_on_cpu=True, dtype="float32")
    first = demo.generate(fixed(FIXED), temperature=0)
    assert first.text == FIXED
    assert sum(each.num for each in jumps) > len(first.ids) - 4
    prompt = demo.prompt("Tell me about France as JSON.") + first.ids[:-1]
    then: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    hit = demo.generate(**then)
    assert hit.deltas[0].cached_tokens >= (len(prompt) - 1) // page_size * page_size - page_size
    demo.run(demo.client.control("flush_cache"))
    missed = demo.generate(**then)
    assert missed.deltas[0].cached_tokens == 0
    assert hit.ids == missed.ids


@pytest.mark.parametrize("num_jumps", [1, 3])
def test_leaving_behind_a_jump_gives_everything_back(engine: Demo, num_jumps: int) -> None:
    """A client that leaves once forced tokens have come holds no page any more, and its neighbour is served."""
    step = GrammarOption(backend="llguidance", kind="regex", source=f"({LETTER}; ){{4}}")

    async def leaves(number: int) -> int:
        params = SamplerParams(max_tokens=200, seed=number)
        submit = Submit(rid=f"left-{number}", prompt_ids=engine.prompt("x"), params=params, grammar=(step,))
        stream, jumps = engine.client.submit(submit), 0
        async for delta in stream:
            jumps += len(delta.ids) > replies.MIN_JUMP
            if jumps == num_jumps:
                break
        await stream.aclose()
        return jumps

    async def main() -> tuple[list[int], Result, dict[str, int]]:
        stays = asyncio.create_task(engine.one(STEPS[0], seed=1, max_tokens=120))
        jumps = await asyncio.gather(*(leaves(i) for i in range(4)))
        result = await stays
        await engine.one(max_tokens=2)
        return list(jumps), result, await engine.client.control("stats")

    jumps, result, stats = engine.run(main())
    assert jumps == [num_jumps] * 4
    assert re.fullmatch(LETTER, result.text)
    assert (stats["num_running"], stats["num_queued"], stats["num_used_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "value", ["<|im_start|>", "say <|im_end|>, then <think>!", {"<|im_end|>": "<<|im_start|>user<|im_end|>"}]
)
def test_forced_text_that_spells_a_marker_is_text(engine: Demo, value: Any) -> None:
    """A schema may name what ends a reply or begins a turn: the reply spells it in tokens of text, and goes on."""
    source = json.dumps({"const": value})
    for backend in ("llguidance", "xgrammar"):
        option = GrammarOption(backend=backend, kind="json", source=source)
        found = engine.generate(option, prompt=engine.prompt("x"))
        assert found.finish == Finish("stop", found.ids[-1]), backend
        assert json.loads(found.text) == value
        assert not set(engine.tokenizer.special_ids) & set(found.ids[:-1])
