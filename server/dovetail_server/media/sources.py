"""What a part of a request says of its image: where it is. `data:` URLs are read here."""

from __future__ import annotations

import base64
import binascii

from dovetail_server.media.refusals import MAX_IMAGE_BYTES, MediaError, too_large

MAX_HEAD = 256
"""Characters before the comma of a `data:` URL."""
REFUSED = ("video", "audio")


def data_of(url: str) -> bytes:
    """Return what a `data:` URL holds. Its media type is looked at for videos and sound only: the bytes tell.

    Raises:
        MediaError: It is not base64, too large, or says that it is no image.
    """
    head, comma, _ = url[: MAX_HEAD + 5].partition(",")
    if not comma:
        raise _invalid("the data: URL has no comma before its data; send data:image/png;base64,…")
    kinds = head[5:].lower().split(";")
    if (kind := kinds[0].partition("/")[0]) in REFUSED:
        raise MediaError(f"{kind} is not read here; possible: images and text", "unsupported_image_media_type")
    if "base64" not in kinds[1:]:
        raise _invalid("the data: URL is not base64; send data:image/png;base64,…")
    return of_base64(url[len(head) + 1 :])


def of_base64(text: str) -> bytes:
    """Return what base64 holds, as Anthropic's API and Ollama's send images.

    Raises:
        MediaError: It is not base64, or holds too much.
    """
    if len(text) > (MAX_IMAGE_BYTES + 2) // 3 * 4 + 4:
        raise too_large("the image")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(
            "the image is no valid base64; send the standard alphabet (A-Z a-z 0-9 + /) with padding"
        ) from None


def _invalid(message: str) -> MediaError:
    return MediaError(message, "invalid_base64_image")
