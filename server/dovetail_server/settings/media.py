"""Settings that say what images requests may have, and where these may come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode

from dovetail.base.settings import Settings, setting
from dovetail.processing.text_settings import read_object
from dovetail_server.settings.types import Hosts

MOST = 1024
"""Images that an operator may allow a request."""
MAX_IMAGES = 16
"""Of a request, where the operator says nothing."""
KINDS = ("image", "video", "audio")


def check_limits(limits: dict[str, int]) -> dict[str, int]:
    """Refuse limits of what is not there, and of videos and sound others than 0."""
    for kind, most in limits.items():
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is unknown; possible: {', '.join(KINDS)}")
        if kind != "image" and most:
            raise ValueError(f"{kind} is not read here; give it 0, or leave it out")
        if not 0 <= most <= MOST:
            raise ValueError(f"{kind} is {most}; possible: 0 to {MOST}")
    return limits


def check_folder(path: Path | None) -> Path | None:
    """Refuse what is no directory: a typing mistake would refuse every request."""
    if path is not None and not path.is_dir():
        raise ValueError(f"{path} is no directory; give one that is there, with images below it")
    return path


Limits = Annotated[dict[str, int], NoDecode, BeforeValidator(read_object), AfterValidator(check_limits)]


class MediaSettings(Settings):
    """Images of requests."""

    limit_mm_per_prompt: Limits = setting(default_factory=lambda: {"image": MAX_IMAGES})
    """Maximum number of images in a request: {"image": N}; 0: none."""
    image_cache_bytes: int = setting(512 << 20, ge=0)
    """Maximum memory for decoded images that are kept for later requests; 0: none is."""
    allowed_media_domains: Hosts = setting(default_factory=list)
    """Hosts whose images at http and https URLs are fetched, such as img.example.org,*.cdn.example, comma-separated; *
    allows any. Only public addresses are connected to. Default: none.
    """
    allowed_local_media_path: Annotated[Path | None, AfterValidator(check_folder)] = setting(None)
    """Directory below which images at file:// URLs are read. Default: none."""
