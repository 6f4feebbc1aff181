"""How many JSON values a body holds, found before it is parsed.

An empty object is two bytes of JSON and 72 of memory, so a body of nothing else would become 24 times its size. Text
costs what it is, and numbers little more. What is counted are commas and opening brackets: in the whole body first,
which is an upper bound and takes as long as reading it; outside its strings where that is too many.
"""

from __future__ import annotations

import re

from dovetail.contracts.errors import RequestError

MAX_VALUES = 1 << 20
"""Parsing holds Python's lock, and with it the event loop: so many numbers take 50 ms."""
FREE_OBJECTS = 1 << 16
BYTES_PER_OBJECT = 16
MAX_OBJECTS = 1 << 17
"""Objects and lists may be as many as `FREE_OBJECTS`, and one more for each so many bytes, but no more than that:
parsing these takes 50 ms, too."""
_WINDOW = 1 << 16
"""Matching holds Python's lock too, so nothing is matched in larger pieces."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRINGS = re.compile(rb'(?:[^"]*+"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_STRING_PIECE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def check_density(raw: bytes, most_objects: int = MAX_OBJECTS) -> None:
    """Refuse a body of very many values.

    Args:
        raw: The body.
        most_objects: Objects and lists that it may have at most, however large it is.

    Raises:
        RequestError: It would take much more memory than it has bytes, or stop the server while it is parsed.
    """
    most_objects = min(FREE_OBJECTS + len(raw) // BYTES_PER_OBJECT, most_objects)
    counts = _count(raw, 0, len(raw))
    if counts[0] <= most_objects and sum(counts) <= MAX_VALUES:
        return
    num_objects, num_commas = _count_outside_strings(raw, most_objects)
    if num_objects > most_objects:
        text = f"a body of {len(raw)} bytes may hold {most_objects} objects and lists, and this one holds more"
        raise RequestError(text, code="body_too_dense")
    if num_objects + num_commas > MAX_VALUES:
        text = f"the body holds more than {MAX_VALUES} values; send several requests"
        raise RequestError(text, code="body_too_dense")


def _count(raw: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the opening brackets and the commas between two places."""
    return raw.count(b"{", start, end) + raw.count(b"[", start, end), raw.count(b",", start, end)


def _count_outside_strings(raw: bytes, most_objects: int) -> tuple[int, int]:
    """As `_count` for all that is not in strings; stops where it is too many."""
    objects = commas = at = 0
    while at < len(raw) and objects <= most_objects and objects + commas <= MAX_VALUES:
        strings = _STRINGS.match(raw, at, at + _WINDOW)
        end = at if strings is None else strings.end()
        rest = _STRING.sub(b"", raw[at:end])
        quote = raw.find(b'"', end)  # of a string that is longer than the window, if there is one
        last = len(raw) if quote < 0 else quote
        for piece, start, stop in ((rest, 0, len(rest)), (raw, end, last)):
            found = _count(piece, start, stop)
            objects, commas = objects + found[0], commas + found[1]
        at = len(raw) if quote < 0 else _end_of_string(raw, quote + 1)
    return objects, commas


def _end_of_string(raw: bytes, at: int) -> int:
    """Return the place behind a string that begins at `at`; the body's end where it has none."""
    while True:
        match = _STRING_PIECE.match(raw, at, at + _WINDOW)
        end = at if match is None else match.end()
        if raw[end : end + 1] == b'"':
            return end + 1
        if end == at:
            return len(raw)
        at = end
