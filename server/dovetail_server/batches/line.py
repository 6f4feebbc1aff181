"""A line of a batch's input file."""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct):
    """A line of an input file; `body` stays as it is written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


decode_line = msgspec.json.Decoder(Line).decode
