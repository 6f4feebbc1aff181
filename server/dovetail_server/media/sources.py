"""What a part of a request says of its image: where it is. `data:` URLs are read here."""

from __future__ import annotations

import base64
from urllib.parse import unquote

from dovetail_server.media.refusals import MAX_IMAGE_BYTES, MediaError, too_large

MAX_HEAD = 256
"""Characters before the comma of a `data:` URL."""
REFUSED = ("video", "audio")
_SPACE = dict.fromkeys(map(ord, " \t\n\f\r"))


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
    text = url[len(head) + 1 :]
    return of_base64(unquote(text) if "%" in text else text)


def of_base64(text: str) -> bytes:
    """Return what base64 holds. Line breaks are skipped and padding may be missing, as in a browser's `data:` URLs.

    Raises:
        MediaError: It is not base64, or holds too much.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        text = text.translate(_SPACE)
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except ValueError:
            raise _invalid(f"the image is no valid base64; {_hint(text)}") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large("the image")
    return data


def _hint(text: str) -> str:
    if text[:5].lower() == "data:":
        return "it begins with data:; send what follows its comma"
    if "-" in text or "_" in text:
        return "it has the URL-safe alphabet (- and _); send the standard one (+ and /)"
    return "send the standard alphabet (A-Z a-z 0-9 + /)"


def _invalid(message: str) -> MediaError:
    return MediaError(message, "invalid_base64_image")
