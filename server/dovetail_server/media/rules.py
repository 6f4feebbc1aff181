"""What processes that load images are told, what they ask their server, and which sizes of images they refuse."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.processor import ImageLayout, ImageProcessor
from dovetail.processing.images import PreparedImage

STEP = 0.9
"""Of each size that is tried for a hint to the next one."""
NEAR = 0.05
"""By how much the shape of a hint may differ: whole pixels of a tiny image are of any shape."""


class MediaRules(msgspec.Struct, frozen=True, kw_only=True):
    """What images may be, and where they may come from.

    Attributes:
        folder: Where the arrays of loaded images are written: in a memory file system, of this server alone.
        revision: Tells the model's weights from others'.
        max_images: Of one request.
        max_patches: Of one image; None: as many as its processor makes.
        max_tokens: Of one image: the context length.
        domains: As `--allowed-media-domains`.
        local_path: As `--allowed-local-media-path`.
        keeps: The server keeps images for later requests.
    """

    folder: str
    revision: str
    max_images: int
    max_patches: int | None = None
    max_tokens: int | None = None
    domains: list[str] = []
    local_path: str | None = None
    keeps: bool = False


class MediaQuestion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process is about to load images.

    Attributes:
        files: Identifiers of uploaded files, each with its place in the request.
        fetches: Some are fetched from the network first, while the process computes nothing.
    """

    files: list[tuple[str, str]]
    fetches: bool


class MediaAnswer(msgspec.Struct, frozen=True):
    """It may.

    Attributes:
        paths: Those of the uploaded files.
        image: What the server has of an image that was sought; None: the process makes it.
    """

    paths: list[str] = []
    image: PreparedImage | None = None


class MediaFetched(msgspec.Struct, frozen=True, tag=True):
    """What had to be fetched is there; an empty `MediaAnswer` follows when the process may compute again."""


class MediaSought(msgspec.Struct, frozen=True, tag=True):
    """The process has an image's bytes, and asks whether it is kept. `key` is their `source_digest`."""

    key: bytes


class MediaMade(msgspec.Struct, frozen=True, tag=True):
    """What was sought was made; an empty `MediaAnswer` follows."""

    image: PreparedImage


MediaMessage = MediaQuestion | MediaFetched | MediaSought | MediaMade


def layout_of(
    processor: ImageProcessor,
    width: int,
    height: int,
    param: str,
    max_patches: int | None = None,
    max_tokens: int | None = None,
) -> ImageLayout:
    """Return an image's layout; what the processor refuses names the part of the request.

    Raises:
        RequestError: The model takes no image of this size, or it has more patches than `max_patches`, or more tokens
            than `max_tokens`, the context length.
    """
    try:
        found = processor.layout(width, height)
    except RequestError as error:
        raise RequestError(f"{param}: {error.message}", param=param, code=error.code or "invalid_image") from None

    def beyond(made: ImageLayout) -> str | None:
        if max_patches is not None and made.num_patches > max_patches:
            return f"{made.num_patches} patches for this model; possible: {max_patches} (--max-image-patches)"
        if max_tokens is not None and len(made.ids) > max_tokens:
            return f"{len(made.ids)} tokens for this model; possible: {max_tokens}, its context length"
        return None

    if (why := beyond(found)) is None:
        return found
    smaller = _that_fits(processor, width, height, lambda made: beyond(made) is None)
    text = f"{param}: an image of {width} x {height} pixels has {why}; {smaller}"
    raise RequestError(text, param=param, code="image_too_large")


def _that_fits(processor: ImageProcessor, width: int, height: int, fits: Callable[[ImageLayout], bool]) -> str:
    """Say how large an image of this shape may be, or that its size does not matter."""
    scale = STEP
    while min(width, height) * scale >= 1:
        wide, high = int(width * scale), int(height * scale)
        scale *= STEP
        if abs(wide * height - high * width) <= NEAR * high * width:
            with suppress(RequestError):
                if fits(processor.layout(wide, high)):
                    return f"shrink it to {wide} x {high}"
    return "send an image of another shape"
