"""Who goes next where a few may go at a time."""

from __future__ import annotations

import asyncio

from dovetail_server.reading.turns import Turns


def order_of(wishes: list[tuple[str, bool]], most: int) -> list[str]:
    """Return in which order wishes of owners, some of them in the background, are fulfilled."""
    told: list[str] = []

    async def wish(turns: Turns, owner: str, is_background: bool) -> None:
        async with turns.turn(owner, is_background=is_background):
            told.append(owner)
            await asyncio.sleep(0)

    async def main() -> None:
        turns = Turns(most)
        async with asyncio.timeout(30):
            await asyncio.gather(*(wish(turns, *each) for each in wishes))
        assert turns.num_waiting == 0

    asyncio.run(main())
    return told


def test_turns_are_taken_owner_by_owner() -> None:
    """However many wait of one, the next is another's; background work goes last."""
    wishes = [("a", False)] * 4 + [("b", False), ("c", True), ("c", True), ("d", False)]
    assert order_of(wishes, 1) == ["a", "a", "b", "d", "a", "a", "c", "c"]


def test_background_work_leaves_a_place_free() -> None:
    """Of two places it takes one; of one, that."""

    async def main() -> None:
        turns, release = Turns(2), asyncio.Event()

        async def hold(is_background: bool) -> None:
            async with turns.turn("a", is_background=is_background):
                await release.wait()

        tasks = [asyncio.create_task(hold(True)) for _ in range(3)]
        await asyncio.sleep(0)
        assert turns.num_waiting == 2
        tasks.append(asyncio.create_task(hold(False)))
        await asyncio.sleep(0)
        assert turns.num_waiting == 2
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert turns.num_waiting == 1
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_an_owner_with_nothing_going_takes_the_spare_place() -> None:
    """The work of one does not keep another from going; a second one of his waits, and so does background work."""

    async def main() -> list[str]:
        turns, release, going = Turns(2, spare=1), asyncio.Event(), []

        async def hold(name: str, is_background: bool = False) -> None:
            async with turns.turn(name[0], is_background=is_background):
                going.append(name)
                await release.wait()

        async with asyncio.TaskGroup() as group:
            for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
                group.create_task(hold(name))
            group.create_task(hold("d1", is_background=True))
            for _ in range(4):
                await asyncio.sleep(0)
            found = list(going)
            release.set()
        assert len(going) == 7
        return found

    assert asyncio.run(main()) == ["a1", "a2", "b1"]


def test_who_leaves_as_his_turn_comes_gives_it_on() -> None:
    """Cancelled between the call and the turn, nothing is lost."""

    async def main() -> None:
        turns = Turns(1)
        first = turns.turn("a", is_background=False)
        await first.__aenter__()

        async def one() -> None:
            async with turns.turn("b", is_background=False):
                pass

        task = asyncio.create_task(one())
        await asyncio.sleep(0)
        await first.__aexit__(None, None, None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10), turns.turn("c", is_background=False):
            pass

    asyncio.run(main())


def test_one_owner_leaves_room_for_others_to_wait() -> None:
    """Alone he may fill all places; as soon as another comes, each has a share, and what waits already stays."""

    async def run() -> list[bool]:
        turns = Turns(1)
        turns.join("a", False)
        for _ in range(6):
            turns.join("a", False)
        found = [turns.has_room("a", 6), turns.has_room("b", 6)]
        for _ in range(3):
            turns.join("b", True)
        found += [turns.has_room("b", 6), turns.has_room("a", 6), turns.has_room("c", 6)]
        return found

    assert asyncio.run(run()) == [False, True, False, False, True]
