"""How much of a prompt is found in the cache where states are copied, of all that could be: multiples of 64 tokens.

Requests come one after another, by the engine's own books, without a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from dovetail.contracts.cache import FULL, Recurrent
from dovetail.engine.device_rows import DeviceRows
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import EngineRequest
from dovetail.messages import SamplerParams, Submit

GRID, PAGE, CHUNK = 64, 16, 2048
Ids = tuple[int, ...]


class Cache:
    """A cache with room for so many copies of states, and what was asked of it and found in it.

    Attributes:
        num_found: Tokens of prompts that were cached.
        num_possible: Those that were in an earlier prompt or reply of the same beginning, and are not a prompt's last.
    """

    def __init__(self, num_copies: int, num_pages: int = 40_000, chunk: int = CHUNK) -> None:
        pages = [num_pages, num_copies]
        self.books = KVCacheManager(
            DeviceRows(4), page_size=PAGE, num_pages=pages, reaches=[FULL, Recurrent(GRID, in_place=True)]
        )
        self.num_found = self.num_possible = self.number = 0
        self.chunk, self._seen = chunk, set[Ids]()

    def ask(self, prompt: Ids, reply: Ids = ()) -> int:
        """Compute a request; returns the tokens that it found."""
        self.number += 1
        params = SamplerParams(max_tokens=len(reply) + 1)
        submit = Submit(rid="", handle=self.number, prompt_ids=list(prompt), params=params)
        request = EngineRequest.from_submit(submit, arrival=self.number, eos_ids=())
        self.books.match(request)
        self.books.admit(request)
        found = request.computed_len
        self.num_found += found
        self.num_possible += self._longest(prompt)
        while request.computed_len < len(prompt):
            num = min(self.chunk, len(prompt) - request.computed_len)
            if num < len(prompt) - request.computed_len:
                num = self.books.states.aligned(request.computed_len, num, self.chunk)
            assert self.books.provide(request, num) == num
            self.books.loaded()
            request.computed_len += num
            self.books.cache_prefix(request)
            assert self.books.check_counts([request])
            assert self.books.check_ownership([request])
        for token in reply:
            request.ids.append(token)
            if self.books.growing([request]):
                assert self.books.make_room_to_grow(1)
                self.books.allocate_page(request)
            request.computed_len += 1
        self.books.release(request)
        assert self.books.check_counts([])
        assert self.books.check_ownership([])
        self._seen.update(self._prefixes(prompt + reply))
        return found

    def _longest(self, prompt: Ids) -> int:
        return max((len(one) for one in self._prefixes(prompt[:-1]) if one in self._seen), default=0)

    def _prefixes(self, ids: Ids) -> Iterable[Ids]:
        return (ids[:end] for end in range(GRID, len(ids) + 1, GRID))


def draw(rng: random.Random, num: int) -> Ids:
    """Random tokens."""
    return tuple(rng.randrange(30_000) for _ in range(num))


def groups(seed: int, num: int, each: int, shared: int, own: int) -> Sequence[Ids]:
    """Prompts of groups that share a beginning, in turns: the first of every group, then the second."""
    rng = random.Random(seed)
    heads = [draw(rng, shared) for _ in range(num)]
    return [head + draw(rng, own) for _ in range(each) for head in heads]


def share(cache: Cache) -> float:
    """What was found of what could be."""
    return cache.num_found / cache.num_possible


@pytest.mark.parametrize(("num_copies", "own", "least"), [(250, 9, 1), (250, 40, 1), (250, 150, 0.95), (40, 40, 1)])
def test_groups_find_what_they_share(num_copies: int, own: int, least: float) -> None:
    """65 requests in 13 groups, as in the data-parallel test: the second of a group finds what the first one left."""
    cache = Cache(num_copies)
    for prompt in groups(1, 13, 5, 430, own):
        cache.ask(prompt)
    assert share(cache) >= least


def test_a_short_prompt_is_found_again() -> None:
    """200 tokens, and 65 of which the last one is computed."""
    rng, cache = random.Random(4), Cache(20)
    for length, found in ((200, 192), (65, 64), (64, 0)):
        prompt = draw(rng, length)
        assert [cache.ask(prompt), cache.ask(prompt)] == [0, found]


def test_conversations_go_on_where_copies_are_few() -> None:
    """24 copies for 16 of them: a later copy of a conversation takes the place of its earlier ones."""
    rng, cache = random.Random(2), Cache(24)
    said = [draw(rng, 300) for _ in range(16)]
    for turn in range(6):
        for i in range(16):
            prompt, reply = said[i] + draw(rng, 100), draw(rng, 100)
            found = cache.ask(prompt, reply)
            assert found >= (len(said[i]) - 101) // GRID * GRID or not turn  # all but the reply, which was decoded
            said[i] = prompt + reply


def test_busy_conversations_keep_their_copies() -> None:
    """Some are much busier than others, with one of four system prompts: of what is possible, most is found."""
    rng, cache = random.Random(7), Cache(24)
    system, said = [draw(rng, 1500) for _ in range(4)], dict[int, Ids]()
    for _ in range(600):
        i = min(int(rng.expovariate(1 / 12)), 60)
        begun = said[i] if i in said and len(said[i]) < 6000 else rng.choice(system)
        prompt, reply = begun + draw(rng, rng.randrange(20, 200)), draw(rng, rng.randrange(20, 300))
        cache.ask(prompt, reply)
        said[i] = prompt + reply
    assert share(cache) > 0.8


def test_a_long_prompt_leaves_others_their_copies() -> None:
    """Of 20 copies, a prompt of 40 chunks takes a few, and none that others go on from."""
    rng, cache = random.Random(3), Cache(20)
    short = [draw(rng, 200) for _ in range(12)]
    for prompt in short:
        cache.ask(prompt)
    cache.ask(draw(rng, 80_000))
    assert [cache.ask(prompt) for prompt in short] == [192] * 12
