"""What the manifest says of the built-in parsers, beside what their classes declare."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.contracts.output import FormatSpec
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.registry import Registry
from dovetail.text.detection.candidates import CandidateVocabulary
from dovetail.text.parsing.stream import NoTemplate
from dovetail_testing.parsers import BytesTokenizer

KEYS = [
    (kind, entry.name)
    for kind in ("reasoning_parser", "tool_parser")
    for entry in entry_points(group=KINDS[kind].entry_point_group)
    if entry.value.startswith("dovetail_parsers.")
]
OF_TEMPLATES = {("reasoning_parser", "template"), ("tool_parser", "template")}
"""`auto` takes these where no other parser is known."""
BY_NAME = {("reasoning_parser", "minimax-m2-append-think")}
"""`auto` never takes these: another parser reads the same format."""
OTHERS = {
    ("reasoning_parser", "muse"): "to=self<|message|>",
    ("tool_parser", "llama3"): '{"name": "',
}
"""What opens thinking or calls of formats that are made of headers, or of JSON without a marker."""
REGISTRY = Registry.scan()


def opened(kind: str, name: str) -> str:
    """What a parser declares to open thinking or calls."""
    (entry,) = entry_points(group=KINDS[kind].entry_point_group, name=name)
    plugin: Any = entry.load()()
    if isinstance(plugin, ReasoningParser):
        markers = plugin.spec(BytesTokenizer(), NoTemplate(), ParserRequest()).reasoning
        return "" if markers is None else markers.start
    section = plugin.extend(FormatSpec(), []).tools
    return "" if section is None else section.start


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(key))
def test_the_manifest_says_what_the_class_declares(key: tuple[str, str]) -> None:
    """`opens` is the marker that the class declares, and every parser that `auto` may take has clues."""
    facts = REGISTRY.resolve(key[0], f"dovetail-llm:{key[1]}").facts
    if key in OF_TEMPLATES | BY_NAME:
        assert (facts.clues, facts.opens) == ((), "")
        return
    assert facts.opens == OTHERS.get(key, opened(*key))
    assert facts.clues or facts.opens


@pytest.mark.parametrize("listed", [7, [1], "x", {"a": {}}, {"5": 3}, {"5": {"content": "<a>"}}])
def test_whatever_a_folder_lists_as_added_tokens_is_looked_at(listed: Any) -> None:
    """`auto` comes before the tokenizer is read, which refuses what it cannot use."""
    files: Any = SimpleNamespace(tokenizer_config={"added_tokens_decoder": listed})
    assert CandidateVocabulary(files).added_tokens == ({"<a>": 5} if listed == {"5": {"content": "<a>"}} else {})
