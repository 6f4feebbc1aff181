"""What a content part says of its image, in each form that APIs have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.text.chat.messages import place_of
from dovetail_server.media.refusals import MediaError

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
    fields = inner if isinstance(inner, Mapping) else {"url": inner, **part}
    url, file_id = fields.get("url"), fields.get("file_id")
    detail = fields.get("detail") or part.get("detail") or "auto"
    if detail not in DETAILS:
        raise _wrong(f"detail {str(detail)[:40]!r} is unknown; possible: {', '.join(DETAILS)}", param)
    if (url is None) == (file_id is None):
        raise _wrong(f"an {part['type']} part needs a URL (data:image/png;base64,…) or a file_id, and not both", param)
    if not isinstance(found := file_id if url is None else url, str) or not found.strip():
        raise _wrong("the URL or file_id of an image must be a text, and not an empty one", param)
    return ImageSource(param, url=(url or "").strip(), file_id=file_id or "")


def _wrong(message: str, param: str) -> RequestError:
    return MediaError(message, "invalid_value").at(param)
