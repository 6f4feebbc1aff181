r"""`Either`: a section in which a model writes calls in one of two ways; the first characters tell."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.contracts.output import ToolBody, ToolEvent


class Either(ToolBody):
    """Looks at the first character that is not to be skipped, and reads the section in that way."""

    def __init__(
        self, first: str, one: Callable[[], ToolBody], other: Callable[[], ToolBody], skipped: str = "[ \t\r\n"
    ) -> None:
        """Prepare; `one` reads a section that begins with a character of `first`, `other` any other.

        `skipped` tell nothing: by default spaces, and the bracket of a list.
        """
        self._first, self._one, self._other, self._skipped = first, one, other, skipped
        self._lead: list[str] = []
        self._body: ToolBody | None = None
        self._is_doubtful = self._doubts_names = False

    def doubt(self) -> None:
        """Its calls are in doubt."""
        self._is_doubtful = True

    def doubt_names(self) -> None:
        """Its first call must name a tool."""
        self._doubts_names = True

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        if self._body is None:
            self._lead.append(text)
            if not text.strip(self._skipped):
                return []
            text = "".join(self._lead)
            self._body = self._one() if text.lstrip(self._skipped)[0] in self._first else self._other()
            if self._is_doubtful:
                self._body.doubt()
            if self._doubts_names:
                self._body.doubt_names()
        events = self._body.feed(text)
        self.left = self._body.left
        return events

    def close(self) -> list[ToolEvent]:
        """End the section."""
        return self._finish(is_cut=False)

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short."""
        return self._finish(is_cut=True)

    def _finish(self, *, is_cut: bool) -> list[ToolEvent]:
        if self._body is None:
            self.left = ("".join(self._lead), "") if self._is_doubtful else None
            return []
        events = self._body.cut() if is_cut else self._body.close()
        self.left = self._body.left
        return events

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._body is not None and self._body.inside_value
