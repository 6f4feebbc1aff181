"""What a part of a request says of its image: where it is. `data:` URLs are read here."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dovetail.contracts.errors import RequestError
from dovetail.text.chat.messages import place_of
from dovetail_server.media.refusals import MAX_IMAGE_BYTES, MediaError, shown, too_large

# What a content part says of its image, in each form that APIs have.

DETAILS = ("auto", "low", "high", "original")
ImageKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image is: a URL, or the identifier of an uploaded file."""

    param: str
    url: str = ""
    file_id: str = ""

    @property
    def key(self) -> ImageKey:
        """What it is the same image by."""
        return self.url, self.file_id


def source_of(part: Mapping[str, Any], param: str) -> ImageSource:
    """Return where the image of a part is.

    Forms: `image_url` with an object or a text, `input_image` with `image_url` or `file_id`, and `image` with `image`.
    `detail` is checked and changes nothing: the model's processor decides how large it sees an image.

    Args:
        part: The part.
        param: Its place, unless the part says otherwise.

    Raises:
        RequestError: It says nothing of an image, or two things.
    """
    param = place_of(part, param)
    inner = part.get("image" if part["type"] == "image" else "image_url")
    places = inner if isinstance(inner, Mapping) else {"url": inner}, part
    details = [place["detail"] for place in places if place.get("detail") is not None]
    for detail in details:
        if detail not in DETAILS:
            raise _wrong(f"detail {str(detail)[:40]!r} is unknown; possible: {', '.join(DETAILS)}", param)
    given = [(key, place[key]) for place in places for key in ("url", "file_id") if place.get(key) is not None]
    if len(given) != 1:
        raise _wrong(f"an {part['type']} part needs a URL (data:image/png;base64,…) or a file_id, one alone", param)
    [(key, found)] = given
    if not isinstance(found, str) or not found.strip():
        raise _wrong("the URL or file_id of an image must be a text, and not an empty one", param)
    return ImageSource(param, url=found.strip()) if key == "url" else ImageSource(param, file_id=found)


def _wrong(message: str, param: str) -> RequestError:
    return MediaError(message, "invalid_value").at(param)


# Images in files of this machine, below the one directory that the operator allows.

NOT_FOUND = "image_file_not_found"


def read_local(url: str, root: Path | None) -> bytes:
    """Return what a `file://` URL names.

    Args:
        url: The URL.
        root: The directory, as `--allowed-local-media-path`; None: no file may be read.

    Raises:
        MediaError: The file may not be read, or is not there. What is outside gets one error, there or not.
    """
    if root is None:
        text = "file:// addresses are not read here; send the image as a data: URL, or have the operator allow its "
        raise MediaError(f"{text}directory (--allowed-local-media-path)", "invalid_image_url")
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise MediaError(
            f"{shown(url)} is no URL; send one such as file:///images/cat.png", "invalid_image_url"
        ) from None
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in path:
        text = f"{shown(url)} names no file of this machine; send one such as file:///images/cat.png"
        raise MediaError(text, "invalid_image_url")
    top = os.path.realpath(root)
    real = os.path.realpath(path)
    if os.path.commonpath((top, real)) != top or real == top:
        text = f"{shown(url)} is outside of the directory that the operator allows (--allowed-local-media-path)"
        raise MediaError(f"{text}; send the image as a data: URL", "invalid_image_url")
    try:
        return read_regular(_open_below(top, os.path.relpath(real, top).split(os.sep)), shown(url))
    except OSError:
        raise MediaError(f"{shown(url)} cannot be read; check its path and permissions", NOT_FOUND) from None


def _open_below(top: str, names: list[str]) -> int:
    """Open a file by the names of its path, none of which may have become a link since it was checked."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # A pipe that nobody writes to would block without `O_NONBLOCK`; regular files do not mind it.
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def read_regular(handle: int, what: str) -> bytes:
    """Return what an open file holds, and close it.

    Args:
        handle: The file's descriptor.
        what: Names it in errors.

    Raises:
        MediaError: It is no regular file, or has too many bytes.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise MediaError(f"{what} is no regular file; name one that holds an image", "invalid_image_url")
    with os.fdopen(handle, "rb", buffering=0) as file:
        data = bytearray()
        while len(data) <= MAX_IMAGE_BYTES and (chunk := file.read(MAX_IMAGE_BYTES + 1 - len(data))):
            data += chunk
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(what)
    return bytes(data)


MAX_HEAD = 256
"""Characters before the comma of a `data:` URL."""
REFUSED = ("video", "audio")
_SPACE = dict.fromkeys(map(ord, " \t\n\f\r"))


def data_of(url: str) -> bytes:
    """Return what a `data:` URL holds. Its media type is looked at for videos and sound only: the bytes tell.

    A fragment is left out, as browsers do.

    Raises:
        MediaError: It is not base64, too large, or says that it is no image.
    """
    url = url.partition("#")[0]
    head, comma, _ = url[: MAX_HEAD + 5].partition(",")
    if not comma:
        raise _invalid("the data: URL has no comma before its data; send data:image/png;base64,…")
    kinds = [kind.strip() for kind in head[5:].lower().split(";")]
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
