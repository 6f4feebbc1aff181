"""Images in the engine: keys of the prefix cache, bad spans, and which images a step encodes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from test_scheduler import World

from dovetail.contracts.cache import FULL, Recurrent
from dovetail.engine import media
from dovetail.engine.media import RequestMedia, TowerSchedule, fault, keyed
from dovetail.messages.media import MediaSpan

SECRET = b"s" * 16


def span(start: int, num: int, name: int = 1, **changes: Any) -> MediaSpan:
    given = {"grid": (1, 1, num), "num_patches": 4 * num, "digest": bytes([name]) * 32, "file": "", "arrays": ()}
    return MediaSpan(start=start, num=num, **{**given, **changes})


def test_keys_follow_content_and_offset() -> None:
    """Equal images have equal keys at any place, others have others; text keeps its ids, but for the one before."""
    prompt = list(range(20))
    ids = keyed(prompt, [span(3, 4), span(10, 4), span(15, 4, name=2)], SECRET)
    assert [*ids[:2], *ids[7:9], ids[19]] == [0, 1, 7, 8, 19]
    assert ids[2:7] == ids[9:14]
    keys = [*ids[2:7], *ids[14:19]]
    assert max(keys) < 0
    assert len(set(keys)) == 10
    assert keyed(prompt, [span(3, 4)], b"other secret")[2:7] != ids[2:7]
    assert keyed(prompt, [span(0, 4)], SECRET)[:4] == ids[3:7]


def test_an_image_in_several_runs_has_the_keys_of_one() -> None:
    """A run that does not begin its image goes on with the image's keys, and the token before it stays."""
    whole = keyed(list(range(12)), [span(2, 6)], SECRET)
    parts = [span(2, 2, grid=(1, 1, 6)), span(5, 4, first=2, grid=(1, 1, 6))]
    found = keyed(list(range(12)), parts, SECRET)
    assert [*found[1:4], *found[5:9]] == list(whole[1:8])
    assert found[4] == 4


def test_the_model_gets_token_ids() -> None:
    """Keys are for the cache: of any stretch, the prompt's ids and what was generated are given back."""
    prompt = list(range(10))
    ids = keyed(prompt, [span(2, 3)], SECRET)
    ids.extend([77, 78])
    request = RequestMedia((span(2, 3),), prompt)
    assert request.restored(ids, 0) == array("i", [*prompt, 77, 78])
    assert request.restored(ids[3:11], 3) == array("i", [*prompt[3:], 77])
    assert request.restored(ids[10:], 10) == array("i", [77, 78])


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([span(2, 3), span(4, 2)], "images overlap"),
        ([span(8, 3)], "end behind the prompt of 10 tokens"),
        ([span(-1, 3)], "images overlap"),
        ([span(2, 0)], "an image has 0 embeddings"),
        ([span(2, 3, grid=(1, 2, 1))], "an image has 2 embeddings, and tokens for 0 to 3"),
        ([span(2, 3, first=1)], "tokens for 1 to 4"),
        ([span(2, 3, first=-1)], "tokens for -1 to 2"),
        ([span(2, 3, digest=b"x")], "a digest of 1 bytes"),
        ([span(0, 2), span(2, 3, name=2, num_patches=13)], "an image has 13 patches; at most 12 are possible here"),
        ([span(2, 3, grid=(1, 1, 4))], "of the last image, 3 embeddings have tokens"),
        ([span(2, 3, grid=(1, 1, 4)), span(6, 2, name=2)], "tokens for 0 to 2 after 3"),
        ([span(2, 2, grid=(1, 1, 4)), span(6, 2, name=2, first=2, grid=(1, 1, 4))], "tokens for 2 to 4 after 2"),
        ([span(2, 2, grid=(1, 1, 4)), span(6, 2, first=2, grid=(1, 2, 2))], "tokens for 2 to 4 after 2"),
        ([span(2, 2, grid=(1, 1, 4)), span(6, 2, first=1, grid=(1, 1, 4))], "tokens for 1 to 3 after 2"),
        ([span(2, 3, grid=(1, 1 << 40, 1 << 40))], "an image has 1208925819614629174706176 embeddings"),
    ],
)
def test_spans_that_lie_are_refused(spans: list[MediaSpan], why: str) -> None:
    """Whatever a message says of images, it is refused or within the prompt and the image."""
    assert why in str(fault(spans, 10, 12))


def test_right_spans_are_taken() -> None:
    """Images side by side, one in two runs, and to the very end; none by a model that reads text only."""
    spans = [
        span(0, 2),
        span(2, 3, name=2),
        span(6, 2, name=3, grid=(1, 1, 4)),
        span(8, 2, name=3, first=2, grid=(1, 1, 4)),
    ]
    assert fault(spans, 10, 16) is None
    assert fault(spans, 10, 0) == "the model reads text only, and the prompt has images"


def test_no_chunk_ends_within_an_image_that_sees_both_ways() -> None:
    """It ends before the image, or behind it where the step may have so many tokens; or there is none."""
    spans = (span(3, 4), span(7, 5, name=2), span(20, 6, name=3))
    cut, whole = (RequestMedia(spans, [0] * 30, is_cut=is_cut) for is_cut in (True, False))
    for start in range(30):
        for num in range(1, 31 - start):
            assert cut.uncut(start, num, num) == num
            for most in (num, 30):
                found = whole.uncut(start, num, most)
                assert not any(one.start < start + found < one.start + one.num for one in spans) or found == 0
                inside = next((one for one in spans if one.start < start + num < one.start + one.num), None)
                if inside is None:
                    assert found == num
                elif inside.start > start:
                    assert start + found == inside.start
                else:
                    end = inside.start + inside.num
                    assert found == (end - start if end - start <= most else 0)


@dataclass
class Plan:
    encode: list[MediaSpan] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)


def fit(tower: TowerSchedule, spans: list[MediaSpan], start: int, num: int, plan: Plan) -> int:
    return tower.fit(RequestMedia(tuple(spans), [0] * 100), start, num, plan)


@pytest.mark.parametrize(("most", "timed"), [(30, 0), (30, 900), (900, 30)])
def test_a_chunk_ends_before_an_image_beyond_the_budget(most: int, timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are encoded once, within the budget; what is known costs nothing; the first one is never too large."""
    monkeypatch.setattr(media, "MAX_STEP_PATCHES", most)
    monkeypatch.setattr(media, "MIN_IMAGE_PATCHES", 1)
    tower, plan = TowerSchedule(8, timed), Plan()
    spans = [span(5, 5), span(20, 5, name=2), span(40, 9, name=3)]
    assert fit(tower, spans, 0, 60, plan) == 20
    assert [one.digest[0] for one in plan.encode] == [1]
    plan = Plan()
    tower.begin(plan)
    assert fit(tower, spans, 20, 40, plan) == 20
    assert fit(tower, spans, 0, 30, plan) == 30
    assert [one.digest[0] for one in plan.encode] == [2]
    plan = Plan()
    tower.begin(plan)
    assert fit(tower, spans, 42, 3, plan) == 3
    assert [one.digest[0] for one in plan.encode] == [3]
    assert fit(tower, [span(0, 9, name=4)], 0, 5, plan) == 0
    assert fit(tower, spans, 49, 11, plan) == 11
    assert tower.num_encoded == 3


def test_least_recently_used_output_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept output stays within bytes, and no image of the step itself is dropped."""
    monkeypatch.setattr(media, "MAX_IMAGE_BYTES", 8 * 10)
    tower = TowerSchedule(8)
    a, b, c = span(0, 5), span(5, 5, name=2), span(10, 5, name=3)
    first = Plan()
    assert fit(tower, [a, b, c], 0, 20, first) == 10
    plan = Plan()
    tower.begin(plan)
    assert fit(tower, [a], 0, 5, plan) == 5
    assert fit(tower, [c], 10, 5, plan) == 5
    assert plan.dropped == [b.digest]
    plan = Plan()
    tower.begin(plan)
    big = span(0, 50, name=4)
    assert fit(tower, [big], 0, 50, plan) == 50
    assert sorted(plan.dropped) == [a.digest, c.digest]


def test_small_images_count_for_what_their_launches_take() -> None:
    """Thousands of tiny images are no step of thousands of tower runs: text beside them gets its tokens meanwhile."""
    tower = TowerSchedule(8)
    spans = [span(at, 1, name=at) for at in range(50)]
    each, done = [], 0
    while done < 50:
        plan = Plan()
        tower.begin(plan)
        done += fit(tower, spans, done, 50 - done, plan)
        each.append(len(plan.encode))
    assert each == [8, 8, 8, 8, 8, 8, 2]


def test_an_owner_pushes_out_output_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends one image after another does not have those of others encoded again."""
    monkeypatch.setattr(media, "MAX_IMAGE_BYTES", 8 * 10)
    tower = TowerSchedule(8)

    def sends(owner: str, name: int) -> Plan:
        plan = Plan()
        tower.begin(plan)
        request = RequestMedia((span(0, 2, name=name),), [0] * 10, owner)
        assert tower.fit(request, 0, 2, plan) == 2
        return plan

    sends("quiet", 1)
    dropped = [digest[0] for name in range(2, 40) for digest in sends("loud", name).dropped]
    assert dropped == list(range(2, 36))
    assert sends("quiet", 1).encode == []


def test_what_a_failed_step_was_to_do_is_done_again() -> None:
    """Nobody knows how far a failed step came: its images are dropped and encoded anew."""
    tower, plan = TowerSchedule(8), Plan()
    assert fit(tower, [span(0, 5)], 0, 5, plan) == 5
    tower.failed(plan)
    plan = Plan()
    tower.begin(plan)
    assert plan.dropped == [span(0, 5).digest]
    assert fit(tower, [span(0, 5)], 0, 5, plan) == 5
    assert len(plan.encode) == 1


def test_a_submit_with_images_travels() -> None:
    """Packed and unpacked, a span of a message is what it was."""
    one = span(3, 4, first=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=MediaSpan) == one


@pytest.mark.parametrize("both_ways", [True, False])
def test_others_use_what_a_chunk_before_an_image_leaves(both_ways: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is shortened before an image that is too much for the step; the next request's chunk fills the step."""
    world = World(num_pages=60, max_prefill_tokens=20)
    first, second = world.add(list(range(60)), 1), world.add(list(range(100, 160)), 1)
    if both_ways:
        first.media = RequestMedia((span(5, 30),), range(60), is_cut=False)
    else:
        monkeypatch.setattr(media, "MAX_STEP_PATCHES", 30)
        monkeypatch.setattr(media, "MIN_IMAGE_PATCHES", 1)
        world.scheduler.tower = TowerSchedule(8)
        first.media = RequestMedia((span(0, 5), span(5, 30, name=2)), range(60))
    steps = [[(chunk.request, chunk.num_new) for chunk in world.step().chunks] for _ in range(2)]
    assert steps[0] == [(first, 5), (second, 15)]
    assert steps[1][0] == (first, 30 if both_ways else 20)
    world.drain()
    assert world.done == [first, second] or world.done == [second, first]


def test_a_chunk_before_an_image_gets_on_beside_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that may have no second image computes what is before it, also within what states fold at once."""
    monkeypatch.setattr(media, "MAX_STEP_PATCHES", 30)
    monkeypatch.setattr(media, "MIN_IMAGE_PATCHES", 1)
    world = World(num_pages=60, max_prefill_tokens=32, reaches=(FULL, Recurrent(16)))
    world.scheduler.tower = TowerSchedule(8)
    first, second = world.add(list(range(60)), 1), world.add(list(range(100, 160)), 1)
    first.media = RequestMedia((span(0, 5), span(5, 30, name=2)), range(60))
    steps = [[(chunk.request, chunk.num_new) for chunk in world.step().chunks] for _ in range(2)]
    assert steps[0] == [(first, 5), (second, 16)]
    assert steps[1][0] == (first, 27)
    world.drain()
    assert len(world.done) == 2
