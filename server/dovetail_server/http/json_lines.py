"""JSON that stays one line wherever it is split.

RFC 8259 lets a text hold U+0085, U+2028 and U+2029 as they are, and Python's `str.splitlines` and JavaScript's older
parsers break lines there. Every other character that either takes for the end of a line is below U+0020, which JSON
escapes anyway.
"""

from __future__ import annotations

_ESCAPES = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def one_line(raw: bytes) -> bytes:
    """Return UTF-8 JSON with the characters escaped that end a line only for some readers; it means the same.

    Such a character can stand only in a text of the JSON, never between its tokens.
    """
    # Looking for one byte takes a twentieth of looking for two, and most events have neither.
    if (b"\xe2" in raw and b"\xe2\x80" in raw) or (b"\xc2" in raw and b"\xc2\x85" in raw):
        for found, escape in _ESCAPES:
            raw = raw.replace(found, escape)
    return raw
