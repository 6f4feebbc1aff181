"""What processes that load images are told, and what they ask their server."""

from __future__ import annotations

import msgspec

from dovetail.processing.images import PreparedImage


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
