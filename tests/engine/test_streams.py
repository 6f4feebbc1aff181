"""What waits for a stream's reader: merged, bounded, and never lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.errors import EngineDeadError
from dovetail.engine import streams
from dovetail.engine.streams import StreamClient
from dovetail.messages import (
    Abort,
    Finish,
    SamplerParams,
    StepDeltas,
    Submit,
    ToEngine,
    TokenDelta,
    TokenLogprob,
    TopLogprob,
)


class Loopback(StreamClient):
    """A client whose engine is the test."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self.sent: list[ToEngine] = []

    def send_to_engine(self, message: ToEngine) -> None:
        self.sent.append(message)

    def tick(self, *deltas: TokenDelta) -> None:
        self.receive(StepDeltas(step=1, deltas=list(deltas)))

    def lose(self) -> None:
        self.engine_died("gone")


def submit(rid: str = "a") -> Submit:
    return Submit(rid=rid, prompt_ids=[1], params=SamplerParams(max_tokens=8))


def delta(*ids: int, top: int | None = None, finish: Finish | None = None, **more: Any) -> TokenDelta:
    rows = None if top is None else [TokenLogprob(i, -0.5, [TopLogprob(i, -0.5)] * top) for i in ids]
    return TokenDelta(**{"handle": 1, "ids": list(ids), "logprobs": rows, "finish": finish, **more})


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=30), seed=st.integers(0, 1 << 16), top=st.booleans())
def test_whatever_gathers_adds_up_to_the_same(sizes: list[int], seed: int, top: bool) -> None:
    """However the reader keeps up, ids, log probabilities and facts together are those that were sent."""
    chance = random.Random(seed)
    ids = iter(range(1000))
    sent = [
        delta(
            *[next(ids) for _ in range(size)],
            top=2 if top else None,
            cached_tokens=7,
            num_retractions=i // 10,
            prompt_logprobs=[TokenLogprob(1, None, [])] if i == 0 else None,
            finish=Finish("length") if i == len(sizes) - 1 else None,
        )
        for i, size in enumerate(sizes)
    ]
    expected = [(list(each.ids), list(each.logprobs or ())) for each in sent]

    async def main() -> list[TokenDelta]:
        client, got = Loopback(), list[TokenDelta]()
        stream = client.submit(submit(), every=chance.choice([1, 1, 2, 5]))
        reader = asyncio.create_task(read(stream, got))
        for each in sent:
            client.tick(each)
            if chance.random() < 0.4:
                await asyncio.sleep(0)
        await reader
        assert client.entries == {}
        assert not any(isinstance(message, Abort) for message in client.sent)
        return got

    got = asyncio.run(main())
    assert [i for each in got for i in each.ids] == [i for ids_, _ in expected for i in ids_]
    assert [row for each in got for row in each.logprobs or ()] == [row for _, rows in expected for row in rows]
    assert [each.finish for each in got] == [None] * (len(got) - 1) + [Finish("length")]
    assert [each.prompt_logprobs is not None for each in got] == [True] + [False] * (len(got) - 1)
    assert (got[-1].cached_tokens, got[-1].num_retractions) == (7, (len(sizes) - 1) // 10)


async def read(stream: streams.EngineTokenStream, into: list[TokenDelta]) -> None:
    async for each in stream:
        into.append(each)


def test_nothing_waits_for_company() -> None:
    """A reader that keeps up gets every delta by itself, at once."""

    async def main() -> None:
        client = Loopback()
        stream = client.submit(submit())
        for i in range(5):
            client.tick(delta(i))
            assert (await asyncio.wait_for(anext(stream), 60)).ids == [i]

    asyncio.run(main())


def test_an_interval_gathers_tokens_after_the_first() -> None:
    """With `every`, the first token and the last come at once, the others in groups."""

    async def main() -> list[list[int]]:
        client, got = Loopback(), list[TokenDelta]()
        reader = asyncio.create_task(read(client.submit(submit(), every=4), got))
        for i in range(11):
            client.tick(delta(i, finish=Finish("length") if i == 10 else None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await reader
        return [each.ids for each in got]

    assert asyncio.run(main()) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


@pytest.mark.parametrize("top", [None, 20])
def test_a_reader_too_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch, top: int | None) -> None:
    """What waits is bounded: beyond that the request is aborted, and the reader is told why."""
    monkeypatch.setattr(streams, "MAX_WAITING", 1000)

    async def main() -> None:
        client = Loopback()
        stream = client.submit(submit())
        count = 0
        while not any(isinstance(message, Abort) for message in client.sent):
            client.tick(delta(1, top=top))
            count += 1
        assert count == 1001 if top is None else count == 1000 // 22 + 1
        client.tick(delta(2))
        last = await anext(stream)
        assert (last.ids, last.logprobs) == ([], None)
        assert last.finish is not None
        assert (last.finish.reason, last.finish.code) == ("abort", "slow_reader")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert client.sent.count(Abort(1)) == 1

    asyncio.run(main())


def test_what_waits_comes_before_the_news_of_death() -> None:
    """The tokens that arrived are given out, then the error."""

    async def main() -> None:
        client = Loopback()
        stream = client.submit(submit(), every=9)
        client.tick(delta(1))
        await anext(stream)
        client.tick(delta(2))
        client.lose()
        assert (await anext(stream)).ids == [2]
        with pytest.raises(EngineDeadError):
            await anext(stream)

    asyncio.run(main())


def test_a_client_sets_seeds_and_keeps_them() -> None:
    """A request without a seed gets one of the client's, which it has in the next engine, too; handles are all new."""

    async def main() -> list[Submit]:
        client = Loopback(seed=11)
        streams_ = [client.submit(submit()) for _ in range(3)]
        for each in list(client.entries.values()):
            client.renumber(each)
            client.dispatch(each)
        assert len(streams_) == 3
        return [message for message in client.sent if isinstance(message, Submit)]

    sent = asyncio.run(main())
    assert [each.handle for each in sent] == [1, 2, 3, 4, 5, 6]
    seeds = [each.params.seed for each in sent]
    assert None not in seeds
    assert len(set(seeds)) == 3
    assert seeds[:3] == seeds[3:]
    assert [each.again for each in sent] == [False] * 3 + [True] * 3
    assert [each.params.seed for each in asyncio.run(main())] == seeds[:3] * 2
