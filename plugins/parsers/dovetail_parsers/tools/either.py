r"""`Either`: a section in which a model writes calls in one of two ways; the first characters tell."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.contracts.output import ToolBody, ToolEvent


class Either(ToolBody):
    """Looks at the first character behind spaces and an opening bracket, and reads the section in that way."""

    def __init__(self, first: str, one: Callable[[], ToolBody], other: Callable[[], ToolBody]) -> None:
        """Prepare; `one` reads a section that begins with a character of `first`, `other` any other."""
        self._first, self._one, self._other = first, one, other
        self._lead: list[str] = []
        self._body: ToolBody | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        if self._body is None:
            self._lead.append(text)
            if not text.strip("[ \t\r\n"):
                return []
            text = "".join(self._lead)
            self._body = self._one() if text.lstrip("[ \t\r\n")[0] in self._first else self._other()
        return self._body.feed(text)

    def close(self) -> list[ToolEvent]:
        """End the section."""
        return [] if self._body is None else self._body.close()

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short."""
        return [] if self._body is None else self._body.cut()

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._body is not None and self._body.inside_value
