"""Batches of requests that differ in everything: what each says does not depend on the others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from grammar_demo import Demo, Result, json_option

from dovetail.messages import GrammarOption, SamplerParams, Submit
from dovetail.runtime.device.penalties import TokenCounts

PATTERN = "[a-f]{4,12}-[0-9]{2}"
ENUM = {"type": "array", "items": {"enum": ["red", "green", 1, None]}, "minItems": 2, "maxItems": 5}


def kinds(demo: Demo) -> list[dict[str, Any]]:
    """Requests by their options: constrained by each backend or not, thinking or not, greedy or not."""
    question = demo.prompt("What is the capital of France?", thinking=True)
    return [
        {"steps": [GrammarOption(backend="llguidance", kind="regex", source=PATTERN)], "seed": 1},
        {"steps": [GrammarOption(backend="outlines", kind="regex", source=PATTERN)], "seed": 2},
        {"steps": [GrammarOption(backend="xgrammar", kind="regex", source=PATTERN)], "seed": 3},
        {"steps": [json_option(ENUM)], "seed": 4},
        {"steps": [GrammarOption(backend="outlines", kind="choice", source='["yes", "no"]')], "temperature": 0},
        {"steps": [], "seed": 5, "max_tokens": 25},
        {"steps": [], "temperature": 0, "max_tokens": 25, "logprobs": 1},
        {"steps": [], "seed": 6, "max_tokens": 40, "prompt": question, "thinking": demo.thinking("in", 3)},
        {"steps": [json_option(ENUM)], "seed": 7, "prompt": question, "thinking": demo.thinking("in", 4)},
        {"steps": [json_option(ENUM)], "seed": 8, "frequency_penalty": 0.7, "min_tokens": 5},
    ]


def one(demo: Demo, kind: dict[str, Any]) -> Any:
    options = dict(kind)
    return demo.one(*options.pop("steps"), **options)


def test_a_mixed_batch_says_what_each_says_alone(make_demo: Callable[..., Demo]) -> None:
    """Three backends, thinking budgets, penalties and free rows in one batch: each has the tokens it has alone."""
    pytest.importorskip("xgrammar")
    demo = make_demo(overlap_on_cpu=True, grammar_compile_timeout=30.0)
    wanted = kinds(demo)
    for kind in wanted:
        kind["temperature"] = 0  # draws may flip by the last bits of a batch's sums
    alone: list[Result] = [demo.run(one(demo, kind)) for kind in wanted]
    together = demo.together([one(demo, kind) for kind in wanted])
    for kind, first, second in zip(wanted, alone, together, strict=True):
        assert (first.ids, first.finish) == (second.ids, second.finish), kind
    assert all(re.fullmatch(PATTERN, result.text) for result in together[:3])


@pytest.mark.full
def test_seeded_draws_do_not_depend_on_company(make_demo: Callable[..., Demo]) -> None:
    """Seeded draws with grammars, thinking, forced text and penalties: alone as in a batch of small chunks.

    In float32, where logits of equal texts differ by less than a draw can notice (`docs/design/sampling.md`).
    """
    demo = make_demo(dtype="float32", overlap_on_cpu=True, chunked_prefill_size=24, max_running_requests=6, page_size=4)
    wanted = [kind for kind in kinds(demo) if all(step.backend == "llguidance" for step in kind["steps"])]
    forced = GrammarOption(backend="llguidance", kind="regex", source="[ab]{2} is what comes first, and then [cd]{2}")
    wanted += [{"steps": [forced], "seed": seed, "prompt": demo.prompt(f"{seed}?" * seed)} for seed in range(9, 11)]
    alone: list[Result] = [demo.run(one(demo, kind)) for kind in wanted]
    demo.run(demo.client.control("flush_cache"))
    together = demo.together([one(demo, kind) for kind in wanted])
    for kind, first, second in zip(wanted, alone, together, strict=True):
        assert (first.ids, first.finish) == (second.ids, second.finish), kind


def test_leaving_requests_do_not_disturb_a_crowded_batch(make_demo: Callable[..., Demo]) -> None:
    """With pages for a few requests and others leaving midway, every reply conforms, and no page is lost."""
    demo = make_demo(max_total_tokens=700, page_size=4, disable_radix_cache=True, grammar_compile_timeout=30.0)
    long = [GrammarOption(backend="llguidance", kind="regex", source="([ab][0-9]){40,44}z")]
    wanted = [{"steps": long, "max_tokens": 100, "seed": seed} for seed in range(8)] + kinds(demo)[3:6]

    async def leave(number: int) -> None:
        submit = Submit(
            rid=f"gone-{number}",
            prompt_ids=demo.prompt("x"),
            params=SamplerParams(max_tokens=150, seed=number),
            grammar=(json_option({"type": "array", "items": ENUM}),),
        )
        stream = demo.client.submit(submit)
        count = 0
        async for _ in stream:
            count += 1
            if count > 3 * number:
                break
        await stream.aclose()

    async def main() -> tuple[list[Result], dict[str, int]]:
        found = await asyncio.gather(*(one(demo, kind) for kind in wanted), *(leave(i) for i in range(2)))
        await demo.one(max_tokens=2)
        return found[:-2], await demo.client.control("stats")

    together, stats = demo.run(main())
    for kind, result in zip(wanted, together, strict=True):
        if kind["steps"] == long:
            assert re.fullmatch(long[0].source, result.text)
        elif kind["steps"] == [json_option(ENUM)]:
            jsonschema.validate(json.loads(result.text), ENUM)
        elif kind["steps"]:
            assert result.text in ("yes", "no")
    assert (stats["num_running"], stats["num_queued"], stats["num_used_tokens"]) == (0, 0, 0)


def test_a_request_that_ended_takes_no_counts_again(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table of counts for penalties is given back, also where a step under way is sampled after the end."""
    counts = {"take": 0, "release": 0}

    def counted(name: str) -> Any:
        inner = getattr(TokenCounts, name)

        def call(table: TokenCounts, *arguments: Any) -> Any:
            counts[name] += 1
            return inner(table, *arguments)

        return call

    for name in counts:
        monkeypatch.setattr(TokenCounts, name, counted(name))
    step = GrammarOption(backend="llguidance", kind="regex", source="[ab]{9}")
    longer = GrammarOption(backend="llguidance", kind="regex", source="[ab]{30}")
    stops = tuple(range(0, 4000, 3))
    wanted = [demo.one(step, frequency_penalty=0.5, seed=seed) for seed in range(4)]
    wanted += [demo.one(presence_penalty=0.5, seed=seed, stop_token_ids=stops, max_tokens=15) for seed in range(4)]
    demo.together([*wanted, demo.one(longer, repetition_penalty=1.1)])
    demo.together([demo.one() for _ in range(9)])  # a row is cleared when the next request takes it
    assert counts == {"take": 9, "release": 9}
