"""Images of requests: keys that the prefix cache compares, and which of them the vision tower encodes in a step."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from dovetail.cache.by_owner import SharedSpace
from dovetail.messages.media import DIGEST_BYTES, MediaSpan, framed_digest
from dovetail.messages.step import MAX_IMAGE_BYTES, MAX_STEP_PATCHES

KEY_BITS = 31
MIN_IMAGE_PATCHES = 1024
"""An image of fewer patches counts for so many in a step: its tower run takes as long, as a GPU waits for launches."""


class RequestMedia:
    """Images of a request, and the token ids of its prompt as the model gets them.

    Attributes:
        spans: Where images stand.
        owner: Whose request it is.
        is_cut: Whether a step may compute a part of an image's tokens: not where they see both ways.
    """

    __slots__ = ("_prompt", "is_cut", "owner", "spans")

    def __init__(
        self, spans: tuple[MediaSpan, ...], prompt: Sequence[int], owner: str = "", *, is_cut: bool = True
    ) -> None:
        self.spans, self._prompt, self.owner, self.is_cut = spans, array("i", prompt), owner, is_cut

    def uncut(self, start: int, num: int, most: int) -> int:
        """Return how many of the tokens `start … start + num - 1` a chunk may have that ends within no image.

        That is fewer, or none; up to `most` where the chunk would have nothing but a part of its first image.
        """
        span = None if self.is_cut else self._around(start + num)
        if span is None:
            return num
        if span.start > start:
            return span.start - start
        whole = span.start + span.num - start
        return whole if whole <= most else 0

    def _around(self, place: int) -> MediaSpan | None:
        """Return the span that has tokens before a place and at it."""
        at = bisect_left(self.spans, place, key=lambda span: span.start) - 1
        return self.spans[at] if at >= 0 and place < self.spans[at].start + self.spans[at].num else None

    def restored(self, ids: array[int], start: int) -> array[int]:
        """Return known ids `start …` of the request with token ids in place of keys."""
        known = self._prompt[start : start + len(ids)]
        return known + ids[len(known) :]


def isolated(spans: tuple[MediaSpan, ...], salt: str) -> tuple[MediaSpan, ...]:
    """Return spans by whose digests requests with another salt find nothing; without a salt, those given."""
    if not salt:
        return spans
    return tuple(replace(span, digest=framed_digest(salt.encode(), span.digest)) for span in spans)


def keyed(prompt: Sequence[int], spans: Sequence[MediaSpan], secret: bytes) -> array[int]:
    """Return a prompt's ids with negative keys at images: equal images at equal offsets have equal keys.

    The token before an image gets a key of the image, too. So a page in which an image begins has at least two keys of
    it, 62 bits, unless it has none of the image's tokens. `secret` is the engine's: nobody can search for two images
    with equal keys.
    """
    ids = array("i", prompt)
    for span in spans:
        shake = hashlib.shake_256(secret + span.digest)
        stream = np.frombuffer(shake.digest(4 * (span.first + span.num + 1)), np.uint32)
        keys = -1 - (stream & (1 << KEY_BITS) - 1).astype(np.int64)
        if span.start > 0 and span.first == 0:
            ids[span.start - 1] = int(keys[0])
        own = keys[span.first + 1 :].astype(np.int32)
        ids[span.start : span.start + span.num] = array("i", own.tobytes())
    return ids


def fault(spans: Sequence[MediaSpan], num_prompt: int, max_patches: int) -> str | None:
    """Return why an engine cannot take images as a message has them; None if it can.

    `max_patches` are those of the largest image for which there is memory; 0: the model reads text only.
    """
    if not max_patches:
        return "the model reads text only, and the prompt has images"
    ends = [0, *(span.start + span.num for span in spans)]
    starts = [*(span.start for span in spans), num_prompt]
    if any(start < end for start, end in zip(starts, ends, strict=True)):
        return f"images overlap, or end behind the prompt of {num_prompt} tokens"
    done, last = 0, None  # embeddings of an image whose tokens have begun
    for span in spans:
        num, end = prod(span.grid), span.first + span.num
        is_next = span.first == done and (not done or last == (span.digest, span.grid))
        if not is_next or span.num < 1 or min(span.grid) < 1 or not end <= num <= num_prompt:
            return f"an image has {num} embeddings, and tokens for {span.first} to {end} after {done}"
        if len(span.digest) != DIGEST_BYTES or span.num_patches < 1:
            return f"an image has a digest of {len(span.digest)} bytes and {span.num_patches} patches"
        if span.num_patches > max_patches:
            return f"an image has {span.num_patches} patches; at most {max_patches} are possible here"
        done, last = end % num, (span.digest, span.grid)
    return f"of the last image, {done} embeddings have tokens, and the others none" if done else None


class EncodePlan(Protocol):
    """The images of a step: which are encoded before it, and which outputs are dropped."""

    encode: list[MediaSpan]
    dropped: list[bytes]


class TowerSchedule:
    """Says which images are encoded before a step, and knows whose output the devices have.

    The engine decides, so that all ranks have the same. An image that is encoded is used in the same step. Who sends
    many images pushes out output of their own first.

    Attributes:
        num_encoded: Images that were encoded so far.
    """

    def __init__(self, token_bytes: int, timed_patches: int = 0) -> None:
        """The devices have nothing.

        Args:
            token_bytes: Of the output for a token of an image.
            timed_patches: See `ServedModel`: a step with several images has no more.
        """
        self._token_bytes, self._max_patches = token_bytes, min(timed_patches or MAX_STEP_PATCHES, MAX_STEP_PATCHES)
        self._kept: SharedSpace[bytes] = SharedSpace()
        self._patches = 0
        self._in_use: set[bytes] = set()
        self._unsure: list[bytes] = []
        self.num_encoded = 0

    def begin(self, plan: EncodePlan) -> None:
        """Plan another step."""
        self._patches, self._in_use = 0, set()
        plan.dropped += self._unsure
        self._unsure.clear()

    def fit(self, media: RequestMedia, start: int, num: int, plan: EncodePlan) -> int:
        """Return how many of the tokens `start … start + num - 1` can be computed in the step, for all their images.

        The chunk ends before the first image that is too much for the step; the first image of a step never is.
        """
        for span in media.spans:
            if span.start + span.num <= start:
                continue
            if span.start >= start + num:
                break
            if not self._provide(span, media.owner, plan):
                return max(0, span.start - start)
        return num

    def failed(self, plan: EncodePlan) -> None:
        """A step was not computed: what it was to encode is encoded again, and what it was to drop dropped again."""
        for span in plan.encode:
            self._kept.remove(span.digest)
        self._unsure += [*plan.dropped, *(span.digest for span in plan.encode)]

    def _provide(self, span: MediaSpan, owner: str, plan: EncodePlan) -> bool:
        """Have an image's output on the devices in this step, if there is room."""
        kept, digest = self._kept, span.digest
        if digest in kept:
            kept.use(digest)
            self._in_use.add(digest)
            return True
        size, patches = prod(span.grid) * self._token_bytes, max(span.num_patches, MIN_IMAGE_PATCHES)
        if plan.encode and self._patches + patches > self._max_patches:
            return False
        if self._in_use and sum(map(kept.size, self._in_use)) + size > MAX_IMAGE_BYTES:
            return False
        while kept.total + size > MAX_IMAGE_BYTES and (last := kept.victim(owner, size, self._in_use)) is not None:
            kept.remove(last)
            plan.dropped.append(last)
        kept.add(digest, owner, size)
        self._in_use.add(digest)
        self._patches += patches
        self.num_encoded += 1
        plan.encode.append(span)
        return True
