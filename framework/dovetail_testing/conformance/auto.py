"""What `auto` does with a parser: whether its clues find the chat templates of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.plugins import Registry
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.records import PluginRecord
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.detection.detect import detect
from dovetail_testing.checks import check, fail

EXAMPLE = '"clues": [{"all": ["<r>"], "score": 1.0}]'


def check_auto(plugin: Any, record: PluginRecord | None, templates: Sequence[str]) -> None:
    """Check that `auto` chooses a parser for its own templates; skip, and say so, where nothing is stated.

    Args:
        plugin: The parser's class.
        record: What is installed of it; None: it is not.
        templates: Sources of chat templates of its models.
    """
    if hasattr(plugin, "detect"):
        fail(f"auto does not call `detect`: take it out, and state in the manifest which texts its templates hold: "
             f"{EXAMPLE}")  # fmt: skip
    if record is None:
        pytest.skip("not installed: its manifest is not read")
    label, facts = f"{KINDS[record.kind].label} auto", record.facts
    if not facts.clues and not facts.opens:
        pytest.skip(f"{label} never chooses it: its manifest states neither clues nor opens, such as {EXAMPLE}")
    if not templates:
        pytest.skip("no templates declared: auto_templates = [ChatTemplate's source, …]")
    registry = Registry.scan()
    for source in templates:
        ChatTemplate({"default": source})  # one that cannot be read is told as such
        found = detect(registry, TokenizerFiles(chat_templates={"default": source}))[record.kind]
        tried = ", ".join(f"{one.name} {one.score:.2f}" for one in found.scores) or "none"
        check(
            found.name == record.name,
            f"{label} chooses {found.name or 'none'} for the template {source!r}: {found.why}; tried: {tried}",
        )
