"""Grammars of every kind in the form that the llguidance library reads.

A structural grammar (`{"type": "structural_tag", "format": …}`, as xgrammar defines it) becomes a Lark grammar. Text
in it that is an added token of the vocabulary (`<tool_call>`) becomes that token: parsers know it by its id only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.grammar.structural import formats_of
from dovetail_grammar.choices import read_choices
from dovetail_grammar.gbnf import to_lark
from dovetail_grammar.llguidance_schema import prepare_value
from dovetail_grammar.patterns import strip_anchors


def to_llguidance(library: Any, spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Return the grammar as the library's own serialised form.

    Raises:
        ValueError: It cannot be read.
    """
    matcher = library.LLMatcher
    if spec.kind in (Kind.JSON, Kind.JSON_OBJECT):
        return str(matcher.grammar_from_json_schema(spec.source))
    if spec.kind is Kind.REGEX:
        return str(matcher.grammar_from_regex(strip_anchors(spec.source)))
    if spec.kind is Kind.CHOICE:
        return str(matcher.grammar_from_lark(choice_lark(read_choices(spec.source))))
    if spec.kind is Kind.STRUCTURAL:
        return str(matcher.grammar_from_lark(StructuralLark(vocabulary).write(spec.source)))
    if spec.kind is Kind.EBNF:
        return str(matcher.grammar_from_lark(to_lark(spec.source)))
    return str(matcher.grammar_from_lark(spec.source))


def choice_lark(choices: list[str]) -> str:
    """Return a grammar of alternatives."""
    return "start: " + " | ".join(quote(choice) for choice in choices) + "\n"


def quote(text: str) -> str:
    """Write a Lark string."""
    return json.dumps(text, ensure_ascii=False)


class StructuralLark:
    """Writes one structural grammar as Lark rules."""

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int = 20) -> None:
        self._rules: list[str] = []
        self._max_whitespace = max_whitespace
        self._added = {text: token_id for text, token_id in vocabulary.added.items() if text}
        alternatives = "|".join(re.escape(text) for text in sorted(self._added, key=len, reverse=True))
        self._split = re.compile(f"({alternatives})") if alternatives else None
        self._specials = bool(self._added)

    def write(self, source: str) -> str:
        """Return the whole grammar.

        Raises:
            ValueError: An unknown format, or one that is not supported.
        """
        start = self._format(formats_of(json.loads(source)))
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _rule(self, body: str, suffix: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append("")  # its place, so that inner rules get other names
        self._rules[int(name[1:])] = f"{name}{suffix}: {body}"
        return name

    def _format(self, node: Mapping[str, Any]) -> str:
        write = getattr(self, f"_{node['type']}", None)
        if write is None:
            raise ValueError(f"structural format {node['type']!r} is not supported by llguidance")
        result: str = write(node)
        return result

    def _const_string(self, node: Mapping[str, Any]) -> str:
        return self._text(node["value"])

    def _json_schema(self, node: Mapping[str, Any]) -> str:
        schema = prepare_value(node["json_schema"], self._max_whitespace)
        return self._rule("%json " + json.dumps(schema, ensure_ascii=False))

    def _regex(self, node: Mapping[str, Any]) -> str:
        pattern = strip_anchors(node["pattern"])
        return self._rule("/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/")

    def _any_text(self, node: Mapping[str, Any]) -> str:
        return self._rule(r"/(.|\n)*/")

    def _sequence(self, node: Mapping[str, Any]) -> str:
        return self._rule(" ".join(self._format(item) for item in node["elements"]) or '""')

    def _or(self, node: Mapping[str, Any]) -> str:
        return self._rule(" | ".join(self._format(item) for item in node["elements"]))

    def _tag(self, node: Mapping[str, Any]) -> str:
        ends = node["end"] if isinstance(node["end"], list) else [node["end"]]
        end = " | ".join(self._text(text) or '""' for text in ends)
        end = self._rule(end) if len(ends) > 1 else end
        return self._rule(f"{self._text(node['begin'])} {self._format(node['content'])} {end}".strip() or '""')

    def _tags_with_separator(self, node: Mapping[str, Any]) -> str:
        tag = self._rule(" | ".join(self._tag(tag) for tag in node["tags"]))
        more = "" if node.get("stop_after_first") else f" ({self._text(node['separator'])} {tag})*"
        body = f"{tag}{more}"
        return self._rule(body if node.get("at_least_one") else f"({body})?")

    def _triggered_tags(self, node: Mapping[str, Any]) -> str:
        """Free text in which a trigger opens one of the tags.

        A trigger of text ends a lazy lexeme; one with an added token ends the text, which has none.
        """
        text = self._rule(r"/(.|\n)*/")
        tags = []
        for tag in node["tags"]:
            trigger = next((t for t in node["triggers"] if tag["begin"].startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins the tag {tag['begin']!r}")
            parts = self._split.split(trigger) if self._split is not None else [trigger]
            if len(parts) > 1:
                # Text before the trigger's first added token is read as free text: without it no parser sees a call.
                opening, begin = text, tag["begin"].removeprefix(parts[0])
            else:
                opening = self._rule(r"/(.|\n)*/ " + quote(trigger), "[lazy]")
                begin = tag["begin"].removeprefix(trigger)
            tags.append(self._rule(f"{opening} {self._tag({**tag, 'begin': begin})}"))
        one = self._rule(" | ".join(tags))
        if node.get("stop_after_first"):
            return self._rule(one if node.get("at_least_one") else f"{one} | {text}")
        return self._rule(f"{one}{'+' if node.get('at_least_one') else '*'} {text}")

    def _text(self, text: str) -> str:
        """Write a text, its added tokens as such."""
        parts = self._split.split(text) if self._split is not None else [text]
        written = [f"<[{self._added[part]}]>" if part in self._added else quote(part) for part in parts if part]
        return " ".join(written)
