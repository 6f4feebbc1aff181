"""Requests with grammars through a real engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable

import jsonschema
import pytest
from grammar_demo import Demo, json_option

from dovetail.messages import GrammarOption, SamplerParams, Submit

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_text_conforms_and_ends_by_itself(demo: Demo, seed: int) -> None:
    """A sampled reply matches its schema, its finish reason is stop, and the step in force is reported."""
    result = demo.generate(json_option(PERSON), seed=seed)
    jsonschema.validate(json.loads(result.text), PERSON)
    assert result.finish is not None
    assert result.finish.reason == "stop"
    assert {delta.grammar_option for delta in result.deltas} == {0}


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[a-c]{3,5}x", r"[a-c]{3,5}x"),
        ("choice", '["yes", "no way", "\\u00e9\\""]', 'yes|no way|é"'),
        ("ebnf", 'root ::= "x" [0-9]{2} "y"', r"x[0-9]{2}y"),
        ("lark", 'start: "a" b\nb: /[0-9]{1,3}/ "!"', r"a[0-9]{1,3}!"),
        ("json_object", "", r"(?s)\{.*\}"),
    ],
)
def test_every_kind(demo: Demo, kind: str, source: str, pattern: str) -> None:
    """Each kind of grammar constrains the text as it says."""
    result = demo.generate(GrammarOption(backend="llguidance", kind=kind, source=source))
    assert re.fullmatch(pattern, result.text), result.text


def test_a_wrong_grammar_ends_one_request_with_its_code(demo: Demo) -> None:
    """A grammar that cannot be compiled ends its request as the client's fault; its neighbour is served."""
    bad, good = demo.together(
        [demo.one(GrammarOption(backend="llguidance", kind="regex", source="(")), demo.one(json_option(PERSON))]
    )
    assert bad.finish is not None
    assert (bad.finish.reason, bad.finish.code, bad.ids) == ("abort", "invalid_grammar", [])
    jsonschema.validate(json.loads(good.text), PERSON)


def test_neighbours_are_not_constrained(demo: Demo) -> None:
    """A greedy request says the same alone and beside constrained ones."""
    alone = demo.generate(temperature=0, max_tokens=30)
    mixed = demo.together(
        [demo.one(json_option(PERSON)), demo.one(temperature=0, max_tokens=30), demo.one(json_option({}))]
    )
    assert mixed[1].ids == alone.ids


def test_a_seeded_request_repeats(demo: Demo) -> None:
    """The same seed gives the same constrained text, compiled afresh or from the cache, alone or in a batch."""
    schema = {"type": "array", "items": {"enum": [1, 2, 3, "x"]}, "minItems": 4, "maxItems": 6}
    first = demo.generate(json_option(schema), seed=5)
    again = demo.together([demo.one(json_option(schema), seed=5) for _ in range(3)])
    assert {tuple(result.ids) for result in again} == {tuple(first.ids)}


def test_minimum_length_gives_way_to_the_end_of_the_grammar(demo: Demo) -> None:
    """`min_tokens` holds while the grammar allows more, and yields when it is complete."""
    longer = demo.generate(GrammarOption(backend="llguidance", kind="regex", source="a+"), min_tokens=20, max_tokens=40)
    assert len(longer.ids) >= 20
    short = demo.generate(GrammarOption(backend="llguidance", kind="choice", source='["yes"]'), min_tokens=20)
    assert short.text == "yes"
    assert short.finish is not None
    assert short.finish.reason == "stop"


def test_the_grammars_end_ends_a_request_that_ignores_eos(demo: Demo) -> None:
    """`ignore_eos` cannot make a complete text longer."""
    result = demo.generate(GrammarOption(backend="llguidance", kind="choice", source='["no"]'), ignore_eos=True)
    assert result.text == "no"
    assert result.finish is not None
    assert result.finish.reason == "stop"


def test_length_cuts(demo: Demo) -> None:
    """`max_tokens` ends a request within its grammar, and what there is of the text is a prefix of a match."""
    result = demo.generate(GrammarOption(backend="llguidance", kind="regex", source="[ab]{500}"), max_tokens=7)
    assert result.finish is not None
    assert result.finish.reason == "length"
    assert re.fullmatch("[ab]+", result.text)


def test_logprobs_are_the_models_own(demo: Demo) -> None:
    """Log probabilities are those before the mask: rivals may be tokens that the grammar forbids."""
    free = demo.generate(temperature=0, logprobs=3, max_tokens=1)
    bound = demo.generate(
        GrammarOption(backend="llguidance", kind="regex", source="[xyz]+"), temperature=0, logprobs=3, max_tokens=1
    )
    assert free.deltas[0].logprobs is not None
    assert bound.deltas[0].logprobs is not None
    assert [t.token_id for t in free.deltas[0].logprobs[0].top] == [t.token_id for t in bound.deltas[0].logprobs[0].top]
    assert bound.deltas[0].logprobs[0].logprob < free.deltas[0].logprobs[0].logprob


def test_penalties_and_bias_cannot_lift_the_mask(demo: Demo) -> None:
    """A bias for a forbidden token and strong penalties leave the text within its grammar."""
    forbidden = demo.tokenizer.encode("Z", add_special_tokens=False)[0]
    result = demo.generate(
        GrammarOption(backend="llguidance", kind="regex", source="[ab]{9}"),
        logit_bias={forbidden: 100.0},
        frequency_penalty=2.0,
        repetition_penalty=1.8,
        top_k=3,
        min_p=0.1,
    )
    assert re.fullmatch("[ab]{9}", result.text)


@pytest.mark.full
def test_retraction_keeps_the_place_in_the_grammar(make_demo: Callable[..., Demo]) -> None:
    """Requests that are retracted for want of pages go on where they were, and still match."""
    demo = make_demo(max_total_tokens=600, page_size=4, disable_radix_cache=True)
    step = GrammarOption(backend="llguidance", kind="regex", source="([ab][0-9]){100,110}z")
    results = demo.together([demo.one(step, seed=i, max_tokens=230) for i in range(5)])
    assert max(delta.num_retractions for result in results for delta in result.deltas) > 0
    for result in results:
        assert re.fullmatch("([ab][0-9]){100,110}z", result.text)


def test_an_aborted_request_is_forgotten_while_it_compiles(demo: Demo) -> None:
    """Leaving a stream before its grammar is compiled frees its pages."""

    async def main() -> dict[str, int]:
        submit = Submit(
            rid="leaves",
            prompt_ids=demo.prompt("x"),
            params=SamplerParams(max_tokens=50),
            grammar=(json_option({"enum": [f"value {i}" for i in range(800)]}),),
        )
        stream = demo.client.submit(submit)
        await asyncio.sleep(0)
        await stream.aclose()
        await demo.one(max_tokens=3)
        stats: dict[str, int] = await demo.client.control("stats")
        return stats

    stats = demo.run(main())
    assert (stats["num_running"], stats["num_queued"], stats["num_used_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("state", ["open", "in"])
def test_the_grammar_starts_after_thinking(demo: Demo, state: str) -> None:
    """The reply thinks freely, then says nothing but what matches, newlines in between allowed."""
    result = demo.generate(
        json_option(PERSON),
        prompt=demo.prompt("What is the capital of France? Answer as JSON.", thinking=True),
        thinking=demo.thinking(state),
        temperature=0,
    )
    thought, end, answer = demo.tokenizer.decode(result.ids, skip_special_tokens=True).partition("</think>")
    assert end
    assert thought
    jsonschema.validate(json.loads(answer), PERSON)


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("constrained", [True, False])
def test_a_thinking_budget_is_kept(demo: Demo, budget: int, constrained: bool) -> None:
    """After so many tokens of thinking the end marker follows, with a grammar and without."""
    steps = [json_option(PERSON)] if constrained else []
    result = demo.generate(
        *steps,
        prompt=demo.prompt("What is the capital of France?", thinking=True),
        thinking=demo.thinking("in", budget),
        temperature=0,
    )
    assert result.ids.index(demo.tokenizer.added_tokens["</think>"]) <= budget


def test_no_budget_for_thinking_means_none(demo: Demo) -> None:
    """With a budget of 0 a model that may open thinking does not."""
    result = demo.generate(
        prompt=demo.prompt("What is the capital of France?", thinking=True), thinking=demo.thinking("open", 0)
    )
    assert demo.tokenizer.added_tokens["<think>"] not in result.ids
