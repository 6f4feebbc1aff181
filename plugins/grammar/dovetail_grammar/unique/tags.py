"""`uniqueItems` in structural grammars: which tags hold JSON in which items differ, and a reader that finds them.

The reader knows tags by the text that begins them, and looks for these between the JSON and the free text of other tags
only. That is exact where such a text stands nowhere else: `watched_tags` looks at the whole grammar for that, and
watches nothing where it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dovetail_grammar.unique.locations import ValueShape, shape_of, unique_places
from dovetail_grammar.unique.scan import Mode, Scan

Node = Mapping[str, Any]
_BLANK = re.compile(r"(?:[\s*+?{},0-9()|\[\]]|\\[tnr])*")
"""Expressions of whitespace only."""
_PLAIN = frozenset(b"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_OUTSIDE = frozenset(" \t\r\n{}[],:+-.0123456789eEtrufalsn")
"""Characters of JSON outside of strings."""
_INNER = {
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content",),
    "tag": ("content",),
    "tags_with_separator": ("tags",),
    "triggered_tags": ("tags",),
}
_FIXED = ("value", "end", "separator")


@dataclass(frozen=True, slots=True)
class Tag:
    """A text that begins a tag, and what follows it: JSON of a shape, or free text up to where `end` first appears."""

    begin: bytes
    shape: ValueShape | None = None
    end: bytes = b""


@dataclass(slots=True)
class _Found:
    """What stands in a structural grammar."""

    tags: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Schemas of JSON by what begins it, and their places."""
    texts: dict[str, str] = field(default_factory=dict)
    """Ends of free texts by what begins them."""
    fixed: list[str] = field(default_factory=list)
    triggers: list[str] = field(default_factory=list)
    has_json: bool = False
    """Whether there is JSON that no tag of its own holds."""
    is_known: bool = True

    def read(self, node: Node, pointer: str) -> None:
        """Go through a format."""
        kind = node.get("type")
        if kind == "regex":
            self.is_known &= _BLANK.fullmatch(node["pattern"]) is not None
        elif kind == "json_schema" and node.get("style", "json") == "json":
            self.has_json = True
        elif kind not in _INNER and kind != "const_string":
            self.is_known = False
        self.fixed += [node[key] for key in _FIXED if isinstance(node.get(key), str)]
        self.triggers += node.get("triggers", ())
        for key in _INNER.get(str(kind), ()):
            inner = node[key]
            parts = enumerate(inner) if isinstance(inner, list) else [(None, inner)]
            for index, part in parts:
                place = f"{pointer}/{key}" if index is None else f"{pointer}/{key}/{index}"
                if key == "tags" or part.get("type") == "tag":
                    self._tag(part, place)
                elif kind != "tag":
                    self.read(part, place)
        if kind == "tag" and pointer == "/format":
            self._tag(node, pointer)

    def _tag(self, tag: Node, pointer: str) -> None:
        begin, content, end = tag["begin"], tag["content"], tag["end"]
        if not isinstance(begin, str) or not isinstance(end, str) or not begin:
            self.is_known = False
            return
        self.fixed += [begin, end]
        kind = content.get("type")
        if _is_text(content) and end:
            self.is_known &= self.texts.setdefault(begin, end) == end and begin not in self.tags
        elif kind == "json_schema" and content.get("style", "json") == "json":
            held = (f"{pointer}/content/json_schema", content["json_schema"])
            self.is_known &= self.tags.setdefault(begin, held)[1] == held[1] and begin not in self.texts
        elif kind == "tag":
            self._tag(content, f"{pointer}/content")
        else:
            self.read(content, f"{pointer}/content")

    def is_exact(self) -> bool:
        """Whether what begins a tag stands nowhere else."""
        begins = (*self.tags, *self.texts)
        if not self.is_known or (self.has_json and not all(map(_is_no_json, begins))):
            return False
        if self.triggers and not all(any(each.startswith(t) for t in self.triggers) for each in begins):
            return False  # it could stand in the free text between tags
        return not any(_meets(each, begin) for begin in begins for each in set(self.fixed))


def watched_tags(root: Any) -> tuple[list[list[Any]], frozenset[str]]:
    """Return what `tags_of` reads, and pointers of the `uniqueItems` of a structural grammar that it enforces."""
    node = root.get("format") if isinstance(root, dict) else None
    if not isinstance(node, dict):
        return [], frozenset()
    found = _Found()
    found.read(node, "/format")
    if not found.tags or not found.is_exact():
        return [], frozenset()
    tags: list[list[Any]] = [[begin, None, end] for begin, end in found.texts.items()]
    mended: set[str] = set()
    shown = {begin: unique_places(schema) for begin, (_, schema) in found.tags.items()}
    for begin, (watched, _) in shown.items():
        tags.append([begin, watched, ""])
    for pointer, schema in _held(node, "/format"):
        mended.update(pointer + place for place in unique_places(schema)[1])
    return (tags, frozenset(mended)) if mended else ([], frozenset())


def _is_text(content: Node) -> bool:
    """Whether a tag's content is text that ends where the tag's end first appears."""
    if content.get("type") == "or":
        return all(map(_is_text, content["elements"]))
    return content.get("type") == "any_text" or content.get("style") == "text"


def _held(node: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON schemas that are the contents of tags, with their places."""
    if isinstance(node, list):
        for index, part in enumerate(node):
            yield from _held(part, f"{pointer}/{index}")
    elif isinstance(node, dict):
        content = node.get("content")
        if "begin" in node and isinstance(content, dict) and "json_schema" in content:
            yield f"{pointer}/content/json_schema", content["json_schema"]
            return
        for key in ("content", "elements", "tags"):
            yield from _held(node.get(key), f"{pointer}/{key}")


def tags_of(written: Sequence[Sequence[Any]]) -> list[Tag]:
    """Read what `watched_tags` returned."""
    return [
        Tag(begin.encode(), None if watched is None else shape_of(watched), end.encode())
        for begin, watched, end in written
    ]


def _is_no_json(text: str) -> bool:
    """Whether a text cannot stand in JSON: between quotes has something that strings have not, and only they have."""
    return any(any(char < " " for char in part) and not _OUTSIDE.issuperset(part) for part in text.split('"'))


def _meets(text: str, begin: str) -> bool:
    """Whether what begins a tag could be found where a fixed text is, or goes over into what follows."""
    if text == begin:
        return False
    return begin in text or any(begin.startswith(text[-size:]) for size in range(1, min(len(text), len(begin) - 1) + 1))


class TaggedScan(Scan):
    """Reads text with tags: JSON in those that hold it, as `Scan` does, and nothing of the rest."""

    __slots__ = ("_begins", "_end", "_is_open", "_longest", "_seen", "_tags")
    copied: ClassVar[tuple[str, ...]] = (*Scan.copied, *__slots__)

    def __init__(self, tags: Sequence[Tag]) -> None:
        """Start at the beginning of a text."""
        super().__init__(None)
        self._tags = tags
        self._begins = tuple(tag.begin for tag in tags)
        self._longest = max(map(len, (*self._begins, *(tag.end for tag in tags))))
        self._leave()

    def feed(self, data: bytes) -> int:
        """Read on. Stops at an item that repeats an earlier one."""
        place, size = 0, len(data)
        while place < size and not self.repeats:
            if not self._is_open:
                self._look(data[place : place + 1])
                place += 1
            elif self.frame is None and self.mode is Mode.PLAIN and data[place] not in _PLAIN:
                self._leave()
            elif self.frame is None and self.mode is Mode.PLAIN:
                place += 1
            else:
                place += super().feed(data[place:] if self.frame is not None else data[place : place + 1])
                if self.frame is None and self.mode is Mode.AFTER:
                    self._leave()
        return place

    def _leave(self) -> None:
        """Be outside of JSON."""
        self._is_open, self._seen, self._end = False, b"", b""
        self.mode, self.text = Mode.AFTER, b""

    def _look(self, char: bytes) -> None:
        self._seen = (self._seen + char)[-self._longest :]
        if self._end:
            if self._seen.endswith(self._end):
                self._seen, self._end = b"", b""
            return
        if not self._seen.endswith(self._begins):
            return
        tag = next(tag for tag in self._tags if self._seen.endswith(tag.begin))
        self._seen, self._end = b"", tag.end
        if not tag.end:
            self._is_open, self._shape, self.mode, self.wide = True, tag.shape, Mode.VALUE, 0
