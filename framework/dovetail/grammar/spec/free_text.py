"""Free text beside tool calls: with `tool_choice` auto it must not hold calls that the grammar knows nothing of.

A format's parser is tolerant: it reads a call also where the section's marker is missing, or where an answer begins
with a bracket. A grammar of free text in which a trigger opens a call knows that trigger alone, so all other ways to
begin a call are taken out of the free text: what the parser reads as a call, the grammar has held to its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser

_SPACE = r"[ \t\r\n]"


def auto_grammar(
    parser: ToolParser, tools: Sequence[Mapping[str, Any]], strict: bool, parallel: bool
) -> GrammarSpec | None:
    """Return a format's grammar for `tool_choice` auto, with no other call in the free text than its own."""
    spec = parser.grammar(tools, "auto", strict, parallel)
    found = parser.extend(FormatSpec(), tools).tools
    if spec is None or spec.kind is not Kind.STRUCTURAL or found is None:
        return spec
    root = json.loads(spec.source)
    node = root.get("format")
    if not isinstance(node, dict) or node.get("type") != "triggered_tags":
        return spec
    openers = [text for text in (found.start, *found.also) if text]
    if found.bare and (calls := parser.grammar(tools, "required", strict, parallel)) is not None:
        node = {"type": "or", "elements": [*_texts(found.bare, openers), json.loads(calls.source)["format"]]}
    else:
        node["excludes"] = [*node.get("excludes", []), *_untriggered(openers, node.get("triggers", []))]
    return replace(spec, source=json.dumps({**root, "format": node}, ensure_ascii=False))


def _untriggered(openers: Sequence[str], triggers: Sequence[str]) -> list[str]:
    """Return the texts that neither begin with a trigger nor a trigger with them."""
    return [text for text in openers if not any(text.startswith(each) or each.startswith(text) for each in triggers)]


def _texts(bare: str, openers: Sequence[str]) -> list[dict[str, Any]]:
    """Describe answers that do not begin with a call: nothing, or text that does not begin with its bracket."""
    first = rf"{_SPACE}*[^{re.escape(bare)} \t\r\n]"
    # The first character may be an opener's own.
    excludes = [part for text in openers for part in (text, text[1:]) if part]
    rest: dict[str, Any] = {"type": "any_text", **({"excludes": excludes} if excludes else {})}
    return [
        {"type": "regex", "pattern": f"{_SPACE}*"},
        {"type": "sequence", "elements": [{"type": "regex", "pattern": first}, rest]},
    ]
