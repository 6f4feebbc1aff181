"""What one request can ask of the engine, and what it gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
import transformers

from dovetail.contracts.errors import EngineDeadError
from dovetail.engine import recovery
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import collect, generate, make_client, make_core, tokens


def params(**changes: object) -> SamplerParams:
    """Greedy, 12 tokens, with changes."""
    return SamplerParams(**{"max_tokens": 12, "temperature": 0, **changes})  # type: ignore[arg-type]


def test_the_last_delta_carries_the_reason(qwen3: Path) -> None:
    """Length, a stop token (included in the ids) and `ignore_eos` end as they should."""
    [plain] = generate(qwen3, [[1, 2, 3]], params())
    assert len(tokens(plain)) == 12
    assert all(d.finish is None for d in plain[:-1])
    assert plain[-1].finish is not None
    assert plain[-1].finish.reason == "length"
    third = tokens(plain)[2]
    [stopped] = generate(qwen3, [[1, 2, 3]], params(stop_token_ids=(third,)))
    first = tokens(plain).index(third)
    assert tokens(stopped) == tokens(plain)[: first + 1]
    assert stopped[-1].finish is not None
    assert (stopped[-1].finish.reason, stopped[-1].finish.matched) == ("stop", third)
    [ignoring] = generate(qwen3, [[1, 2, 3]], params(ignore_eos=True, max_tokens=40))
    assert len(tokens(ignoring)) == 40


def test_a_context_that_is_full_ends_the_request(qwen3: Path) -> None:
    """A request is cut at the context length, and a prompt that fills it is refused with both numbers."""
    [cut] = generate(qwen3, [[1] * 50], params(max_tokens=1000, ignore_eos=True), context_length=64)
    assert len(tokens(cut)) == 14
    [refused] = generate(qwen3, [[1] * 64], params(), context_length=64)
    assert refused[-1].finish is not None
    assert refused[-1].finish.reason == "abort"
    assert "64" in (refused[-1].finish.message or "")


def test_ids_outside_the_vocabulary_are_refused_alone(qwen3: Path) -> None:
    """A bad prompt ends with a message; the request beside it is served."""
    bad, good = generate(qwen3, [[1, 10_000], [1, 2]], params())
    assert bad[-1].finish is not None
    assert "vocabulary" in (bad[-1].finish.message or "")
    assert len(tokens(good)) == 12


def test_seeds_reproduce_and_do_not_depend_on_the_batch(qwen3: Path) -> None:
    """A seeded request draws the same tokens alone, in a batch, with small chunks and without the cache."""
    mine = params(temperature=1.0, top_p=0.95, seed=11)
    other = params(temperature=1.3)
    prompt = [5, 6, 7] * 9
    [alone] = generate(qwen3, [prompt], mine)
    batch = generate(qwen3, [[9] * 30, prompt, [8, 8]], [other, mine, other], chunked_prefill_size=5)
    plain = generate(qwen3, [prompt, [1]], [mine, other], disable_radix_cache=True)
    assert tokens(batch[1]) == tokens(alone)
    assert tokens(plain[0]) == tokens(alone)
    [again] = generate(qwen3, [prompt], params(temperature=1.0, top_p=0.95, seed=12))
    assert tokens(again) != tokens(alone)


def test_a_random_seed_of_the_engine_makes_a_run_repeatable(qwen3: Path) -> None:
    """Requests without a seed repeat from run to run under `--random-seed`, and differ from each other."""
    hot = params(temperature=2.0)
    first = generate(qwen3, [[1, 2]] * 2, hot, random_seed=5)
    second = generate(qwen3, [[1, 2]] * 2, hot, random_seed=5)
    assert [tokens(d) for d in first] == [tokens(d) for d in second]
    assert tokens(first[0]) != tokens(first[1])


def test_prompt_and_output_logprobs_equal_transformers(qwen3: Path) -> None:
    """All log probabilities agree with transformers' forward pass, for any chunk size and after a cache hit."""
    prompt = [(13 * i) % 190 for i in range(40)]
    asked = params(prompt_logprobs=2, logprobs=3, max_tokens=5, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).eval()
    for changes in ({}, {"chunked_prefill_size": 7}, {"page_size": 4}):
        first, second = generate(qwen3, [prompt, prompt], asked, **changes)
        for deltas in (first, second):
            ids = prompt + tokens(deltas)
            want = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found = deltas[0].prompt_logprobs
            assert found is not None
            assert [x.token_id for x in found] == prompt
            assert found[0].logprob is None
            for place, item in enumerate(found[1:]):
                assert item.logprob == pytest.approx(want[place, item.token_id].item(), abs=1e-4)
                assert [t.token_id for t in item.top] == want[place].topk(2).indices.tolist()
            rows = [item for delta in deltas for item in delta.logprobs or []]
            assert [item.token_id for item in rows] == tokens(deltas)
            for place, item in enumerate(rows):
                assert item.logprob == pytest.approx(want[len(prompt) - 1 + place, item.token_id].item(), abs=1e-4)
                assert len(item.top) == 3


def test_the_prefix_cache_is_reported_and_can_be_flushed(qwen3: Path) -> None:
    """A repeated prompt reports its cached tokens in whole pages; after a flush, and under a salt, none."""

    async def main() -> list[int]:
        client = make_client(qwen3)
        await client.start()
        seen = []
        for i, (salt, flush) in enumerate([("", False), ("", False), ("tenant", False), ("", True)]):
            if flush:
                await client.control("flush_cache")
            submit = Submit(rid=str(i), prompt_ids=list(range(50)), params=params(), cache_salt=salt)
            seen.append((await collect(client, submit))[-1].cached_tokens)
        await client.close()
        return seen

    assert asyncio.run(main()) == [0, 48, 0, 0]


def test_leaving_a_stream_aborts_it_and_frees_its_pages(qwen3: Path) -> None:
    """Closing the iterator after some tokens, or before any, leaves no request and no page behind."""

    async def main() -> None:
        client = make_client(qwen3)
        await client.start()
        for num in (0, 1, 3):
            stream = client.submit(
                Submit(rid=f"r{num}", prompt_ids=[1] * 40, params=params(max_tokens=400, ignore_eos=True))
            )
            for _ in range(num):
                await anext(stream)
            await stream.aclose()
        other = await collect(client, Submit(rid="x", prompt_ids=[3], params=params()))
        assert len(tokens(other)) == 12
        stats = await client.control("stats")
        assert (stats["num_running"], stats["num_used_tokens"], client.entries) == (0, 0, {})
        await client.close()

    asyncio.run(main())


def test_abort_from_elsewhere_ends_the_stream(qwen3: Path) -> None:
    """`abort` ends a running stream with reason abort."""

    async def main() -> str:
        client = make_client(qwen3)
        await client.start()
        reason = ""
        stream = client.submit(Submit(rid="a", prompt_ids=[1], params=params(max_tokens=400, ignore_eos=True)))
        async for delta in stream:
            stream.abort()
            reason = delta.finish.reason if delta.finish else ""
        await client.close()
        return reason

    assert asyncio.run(main()) == "abort"


def test_a_lost_page_is_found_counted_and_given_back(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that leaks while the engine runs is free again a little later, and `stats` tells of it."""
    monkeypatch.setattr(recovery, "CHECK_INTERVAL", 8)
    core = make_core(qwen3)
    core.pages.allocators[0].allocate(3)
    core.handle(Submit(rid="a", prompt_ids=[1, 2, 3], params=params(ignore_eos=True, max_tokens=20)))
    while core.has_work:
        core.step()
    assert core.stats().num_repaired_pages == 3
    core.pages.flush()
    assert core.pages.allocators[0].num_free == core.pages.allocators[0].num_pages


@pytest.mark.parametrize("error", [SystemExit(0), MemoryError("none left")])
def test_a_dead_engine_thread_is_an_error_at_once(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever ends the thread of an engine in this process, who waits for tokens hears of it."""

    def die(core: EngineCore) -> None:
        raise error

    monkeypatch.setattr(EngineCore, "step", die)

    async def main() -> None:
        client = make_client(qwen3)
        await client.start()
        with pytest.raises(EngineDeadError):
            async for _ in client.submit(Submit(rid="a", prompt_ids=[1], params=params())):
                pass
        assert client.dead is not None
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 60))
