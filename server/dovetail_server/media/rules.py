"""What processes that load images are told, and what they ask their server."""

from __future__ import annotations

import msgspec


class MediaRules(msgspec.Struct, frozen=True, kw_only=True):
    """What images may be, and where they may come from.

    Attributes:
        folder: Where the arrays of loaded images are written: in a memory file system, of this server alone.
        revision: Tells the model's weights from others'.
        max_images: Of one request.
        domains: As `--allowed-media-domains`.
        local_path: As `--allowed-local-media-path`.
    """

    folder: str
    revision: str
    max_images: int
    domains: list[str] = []
    local_path: str | None = None


class MediaQuestion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process is about to load images.

    Attributes:
        files: Identifiers of uploaded files, each with its place in the request.
        fetches: Some are fetched from the network first, while the process computes nothing.
    """

    files: list[tuple[str, str]]
    fetches: bool


class MediaAnswer(msgspec.Struct, frozen=True):
    """It may; `paths` are those of the uploaded files."""

    paths: list[str]


class MediaFetched(msgspec.Struct, frozen=True, tag=True):
    """What had to be fetched is there; an empty `MediaAnswer` follows when the process may compute again."""
