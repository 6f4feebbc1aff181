"""Refusals of images, one line each: what was given, what is possible, what to do. Codes are OpenAI's."""

from __future__ import annotations

import re

from dovetail.contracts.errors import RequestError

MAX_IMAGE_BYTES = 20 << 20
"""Of one image, as it is sent, fetched or read."""
SHOWN = 80
"""Characters of an address that an error repeats."""
_USER = re.compile(r"(?<=//)[^/?#]*@")


class MediaError(Exception):
    """An image cannot be had, or is none. Who knows its place in the request makes a `RequestError` of it."""

    def __init__(self, message: str, code: str) -> None:
        """Keep the line, and the error's code."""
        super().__init__(message)
        self.message = " ".join(message.split())
        self.code = code

    def at(self, param: str) -> RequestError:
        """Return the refusal of the request whose part at `param` has this image."""
        return RequestError(f"{param}: {self.message}", param=param, code=self.code)


def shown(text: str) -> str:
    """Return an address as errors show it: short, quoted, without control characters, user name and password."""
    text = _USER.sub("…@", text)
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def too_large(what: str) -> MediaError:
    """Return the refusal of an image by the size of its file."""
    text = f"{what} has more than {MAX_IMAGE_BYTES >> 20} MiB, the most that an image may have; send a smaller one"
    return MediaError(text, "image_file_too_large")
