"""A request that kills the engine is found, and refused alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from restarting import Reading, kill, make_engine, make_scripted, mixed, plain, ready

from dovetail.engine.streams import RequestEntry
from dovetail.messages import POISON, SamplerParams, Submit, TokenDelta
from dovetail_server.supervision.engine_process import Restarts
from dovetail_server.supervision.poison_isolation import (
    RestartLimit,
    has_got_on,
    is_poison_candidate,
    note_crash,
    to_try,
)

DEADLY = """
import os, sys
from dovetail_server.supervision import engine_main
from dovetail.engine import request

append = request.EngineRequest.append_token

def deadly(self, token):
    if self.rid == "deadly" and self.num_output >= 7:
        os._exit(0)
    append(self, token)

request.EngineRequest.append_token = deadly
sys.exit(engine_main.main(sys.argv[1:]))
"""
OFTEN = (("exit", "deadly"), ("hang", "prompt"))
CASES = [
    pytest.param(way, rid, marks=() if (way, rid) in OFTEN else pytest.mark.full)
    for way in ("exit", "crash", "kill", "hang")
    for rid in ("deadly", "prompt")
]


@pytest.mark.parametrize(("way", "rid"), CASES)
def test_a_request_that_kills_the_engine_is_refused_alone(way: str, rid: str) -> None:
    """Its neighbours, running and queued, finish as if nothing was; it ends with a code that says why."""

    async def main() -> None:
        client = make_scripted(Restarts(max_restarts=9, hang_s=0.6 if way == "hang" else 60.0))
        await client.start()
        try:
            submits = plain(40)
            want = await Reading(client, submits).end()
            reading = Reading(client, submits)
            await reading.reach(400)
            params = SamplerParams(max_tokens=60)
            bad = Reading(client, [Submit(rid=f"{rid}-{way}", prompt_ids=[99], params=params)])
            assert await reading.end() == want
            [(ids, *_, finish, _, _)] = await bad.end()
            assert (finish.reason, finish.code) == ("abort", POISON)
            assert len(ids) == (7 if rid == "deadly" else 0)
            assert (client.dead, client.entries) == (None, {})
            assert 3 <= client.num_restarts <= 7
            assert await Reading(client, submits[:2]).end() == want[:2]
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 200))


@pytest.mark.parametrize(
    ("way", "spread"), [("crash", 3), *(pytest.param(way, 0, marks=pytest.mark.full) for way in ("exit", "kill"))]
)
def test_many_poisoned_requests_do_not_end_the_server(way: str, spread: int) -> None:
    """Eight culprits at once, or some tokens apart, are found one by one within a limit of eight deaths.

    Each costs one death more, or two if they came apart, or three if the signal may have come from elsewhere.
    """

    async def main() -> None:
        client = make_scripted(Restarts(max_restarts=8))
        await client.start()
        try:
            submits = plain(6)
            want = await Reading(client, submits).end()
            reading = Reading(client, submits)
            await reading.reach(60)
            params = SamplerParams(max_tokens=60)
            bad = []
            for i in range(8):
                bad.append(Reading(client, [Submit(rid=f"deadly-{way}-{i}", prompt_ids=[i], params=params)]))
                await bad[-1].reach(spread and 1)
            assert await reading.end() == want
            assert [(await each.end())[0][3].code for each in bad] == [POISON] * 8
            each = {"exit": 1, "crash": 2, "kill": 3}[way]
            assert 8 <= client.num_restarts <= 8 * each + 4
            assert client.dead is None
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 280))


@pytest.mark.full
def test_a_real_engine_and_kills_from_elsewhere(tmp_path: Path) -> None:
    """With the demo model, and kills in between: eight poisoned requests alone are refused, nothing lost or doubled."""

    async def main() -> None:
        rng = random.Random(2)
        client = make_engine(Restarts(max_restarts=16), dtype="float32", max_running_requests=16)
        path = tmp_path / "deadly.py"
        path.write_text(DEADLY, encoding="utf-8")
        client.command = (str(path),)
        await client.start()
        try:
            submits = mixed(16, 300)
            want = await Reading(client, submits).end()
            params = SamplerParams(max_tokens=60, temperature=0, ignore_eos=True)
            reading = Reading(client, submits)
            bad = Reading(client, [Submit(rid="deadly", prompt_ids=[7, i], params=params) for i in range(8)])
            for _ in range(6):
                await asyncio.sleep(rng.uniform(0, 4))
                await kill(client)
                await ready(client)  # three starts in a row that fail end it, for good reason
            assert await reading.end() == want
            assert [finish.code for _, _, _, finish, *_ in await bad.end()] == [POISON] * 8
            print(f"{client.num_restarts} restarts, 6 kills from elsewhere")
        finally:
            await client.close()

    asyncio.run(main())


def entry(number: int, num_output: int = 0) -> RequestEntry:
    found = RequestEntry(Submit(rid=str(number), handle=number, prompt_ids=[1], params=SamplerParams(max_tokens=9)), 1)
    give(found, num_output)
    return found


def give(to: RequestEntry, num: int) -> None:
    if num:
        to.put(TokenDelta(handle=to.number, ids=[1] * num))


def test_who_gets_on_between_deaths_is_never_a_suspect() -> None:
    """Any number of deaths, each at another place, makes nobody a suspect."""
    a = entry(1)
    for _ in range(50):
        assert note_crash([a], None, from_outside=False) is None
        assert not is_poison_candidate(a)
        give(a, 1)


def test_two_deaths_at_one_place_make_a_suspect_and_a_third_alone_a_culprit() -> None:
    """The likely innocent are tried first; whoever gets on is none any more; a death during a trial convicts."""
    a, b, queued = entry(1, 3), entry(2, 5), entry(3)
    for _ in range(2):
        assert note_crash([a, b], None, from_outside=False) is None
    assert to_try([a, b, queued]) is a
    give(a, 4)
    assert has_got_on(a)
    assert to_try([a, b, queued]) is b
    assert note_crash([b], b, from_outside=False) is b


def test_a_trial_that_is_killed_from_outside_is_repeated() -> None:
    """A signal from elsewhere may hit anybody: three trials in a row must end so, without a token in between."""
    a, b = entry(1, 3), entry(2, 3)
    for _ in range(2):
        note_crash([a, b], None, from_outside=True)
    assert note_crash([a], to_try([a, b]), from_outside=True) is None
    assert to_try([a, b]) is a, "its trial has begun"
    give(a, 1)
    assert note_crash([a], a, from_outside=True) is None
    assert (a.num_crashes, is_poison_candidate(a)) == (1, False)
    for _ in range(2):
        assert note_crash([b], to_try([a, b]), from_outside=True) is None
    assert note_crash([b], to_try([a, b]), from_outside=True) is b


def test_after_a_refusal_one_death_makes_suspects() -> None:
    """Others like it are likely; a kill from elsewhere still needs two deaths."""
    a, b = entry(1, 3), entry(2, 5)
    note_crash([a, b], None, from_outside=True, is_alarmed=True)
    assert to_try([a, b]) is None
    give(a, 1), give(b, 9)
    note_crash([a, b], None, from_outside=False, is_alarmed=True)
    assert to_try([a, b]) is a
    assert note_crash([a], a, from_outside=False, is_alarmed=True) is a


def test_a_death_a_few_tokens_on_in_a_trial_convicts() -> None:
    """What a client knows of a request's place is some tokens behind: who dies alone before it has got on did it."""
    a, b = entry(1, 3), entry(2, 3)
    for _ in range(2):
        note_crash([a, b], None, from_outside=False)
    give(a, 2)
    assert note_crash([a], a, from_outside=False) is a
    give(b, 4)
    assert to_try([b]) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_culprit_among_many_is_always_found(seed: int) -> None:
    """Whatever else dies at random, the deaths that one request causes end with it, and nobody else is refused."""
    rng = random.Random(seed)
    entries = [entry(i, rng.randrange(9)) for i in range(30)]
    guilty, deadly_at = entries[rng.randrange(30)], 20
    refused: list[RequestEntry] = []
    for _ in range(400):
        live = [e for e in entries if e not in refused and len(e.output) < 60]
        tried = to_try(live)
        present = [tried] if tried is not None else live[:12]
        if not present:
            break
        is_killed = False
        for _ in range(rng.randrange(1, 30)):
            if guilty in present and len(guilty.output) >= deadly_at:
                is_killed = True
                break
            for each in present:
                give(each, 1)
            if tried is not None and has_got_on(tried):
                break
        if is_killed or (rng.random() < 0.1 and tried is None):
            poisoned_entry = note_crash(present, tried, from_outside=not is_killed)
            refused += [poisoned_entry] if poisoned_entry is not None else []
        elif tried is not None and has_got_on(tried):
            tried.num_crashes = tried.num_trials = 0
            tried.is_poison_candidate = False
    assert refused == [guilty]


def test_the_limit_of_restarts() -> None:
    """Deaths count within the window, failed starts in a row sooner, and those that a request explains not at all."""
    now = 0.0
    limit = RestartLimit(3, 60.0, lambda: now)
    assert [limit.died(was_ready=True) for _ in range(3)] == [None] * 3
    now = 61.0
    assert [limit.died(was_ready=True) for _ in range(3)] == [None] * 3
    assert limit.died(was_ready=True, num_explained=3) is None
    assert limit.died(was_ready=True, num_explained=3) is None, "what was explained is not explained again"
    assert [limit.died(was_ready=True) for _ in range(2)] == [None] * 2
    assert "died 4 times within 60 s" in str(limit.died(was_ready=True))
    starts = RestartLimit(99, 60.0, lambda: now)
    assert [starts.died(was_ready=False) for _ in range(2)] == [None] * 2
    assert starts.delay_s > 0
    assert starts.died(was_ready=True) is None
    assert starts.delay_s == 0
    assert [starts.died(was_ready=False) for _ in range(2)] == [None] * 2
    assert "did not get ready 3 times" in str(starts.died(was_ready=False))
    assert "restarts are off" in str(RestartLimit(0, 60.0).died(was_ready=True))
