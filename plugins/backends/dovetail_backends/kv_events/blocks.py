"""What routers read of a prefix cache, in vLLM's words: a *block* is a page, named by a hash of all its prefix.

A batch is a msgpack array `[ts, events, data_parallel_rank]`; an event is a map whose `type` is its name:

    {"type": "BlockStored", "block_hashes": [17], "parent_block_hash": null, "token_ids": [1, 2], "block_size": 2,
     "lora_id": null, "medium": "GPU", "lora_name": null}
    {"type": "BlockRemoved", "block_hashes": [17], "medium": "GPU"}
    {"type": "AllBlocksCleared"}

Defined by vLLM's `distributed/kv_events.py` (0.33); SGLang's events have the same form.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from dovetail.contracts import CacheEvent

MEDIUM = "GPU"
"""Where a block is kept: with the model."""
HASH_MASK = (1 << 63) - 1
"""Readers take a hash for a signed or for an unsigned number: it is neither too large for one nor negative."""


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """Base of events."""


class BlockStored(Event, kw_only=True):
    """Blocks that follow each other, and all of their tokens."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(Event, kw_only=True):
    """Blocks that are gone."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    """Nothing is cached any more."""


class EventBatch(msgspec.Struct, array_like=True):
    """What one step of the engine changed."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class BlockNames:
    """Names the pages that are cached. Equal prefixes of equal salts have equal names, in every server."""

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all pages."""
        self._hashes.clear()

    def translate(self, events: Sequence[CacheEvent]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return events in vLLM's words; pages of which nothing is known, for events were lost, are left out."""
        new_events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        for event in events:
            if event.token_ids is None:
                gone = [self._hashes.pop(page) for page in event.pages if page in self._hashes]
                if gone:
                    new_events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM))
            elif event.parent is None or event.parent in self._hashes:
                new_events.append(self._stored(event, event.token_ids))
        return new_events

    def _stored(self, event: CacheEvent, token_ids: list[int]) -> BlockStored:
        parent = None if event.parent is None else self._hashes[event.parent]
        size = len(token_ids) // len(event.pages)
        before, hashes = parent, []
        for at, page in enumerate(event.pages):
            before = block_hash(before, token_ids[at * size : (at + 1) * size], event.cache_salt)
            self._hashes[page] = before
            hashes.append(before)
        salted: list[tuple[str, ...] | None] = [(event.cache_salt,), *[None] * (len(hashes) - 1)]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=salted if event.cache_salt and parent is None else None,
        )


def block_hash(parent: int | None, token_ids: Sequence[int], salt: str) -> int:
    """Return the name of a block; the salt goes into the first one, and through it into all that follow."""
    ids = array("i", token_ids).tobytes()
    before = b"\0" + salt.encode("utf-8", "replace") if parent is None else b"\1" + parent.to_bytes(8, "little")
    digest = hashlib.blake2b(len(ids).to_bytes(8, "little") + ids + before, digest_size=8).digest()
    return int.from_bytes(digest, "little") & HASH_MASK
