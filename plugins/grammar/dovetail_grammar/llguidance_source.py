"""Grammars of every kind in the form that the llguidance library reads.

A structural grammar (`{"type": "structural_tag", "format": …}`, as xgrammar defines it) becomes a Lark grammar. Text
in it that is an added token of the vocabulary (`<tool_call>`) becomes that token: parsers know it by its id only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.sdk.schemas.keywords import ANNOTATIONS
from dovetail.sdk.schemas.structural import formats_of
from dovetail_grammar.choices import read_choices
from dovetail_grammar.gbnf import to_lark
from dovetail_grammar.llguidance_schema import prepare_value, spacing, whitespace
from dovetail_grammar.patterns import strip_anchors, whole
from dovetail_grammar.plain_texts import ALL, ANY, PlainText, expression_of
from dovetail_grammar.structural_lost import ends_in_tokens, is_counted_text
from dovetail_grammar.xml_styles import TaggedArguments, in_any_order

MAX_TOKENS = 1 << 20
"""More than a reply has."""
NUMBER = '/-?(0|[1-9][0-9]*)/ ("." /[0-9]+/)? (/[eE]/ /[+-]/? /[0-9]+/)?'
"""A JSON number in parts: an `E` behind it may be that of an exponent, or what comes next."""
_IN_NUMBERS = ("e", "E", ".")


def to_llguidance(library: Any, spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Return the grammar as the library's own serialised form.

    Raises:
        ValueError: It cannot be read.
    """
    matcher = library.LLMatcher
    if spec.kind in (Kind.JSON, Kind.JSON_OBJECT):
        return str(matcher.grammar_from_json_schema(spec.source))
    if spec.kind is Kind.REGEX:
        return str(matcher.grammar_from_regex(strip_anchors(whole(spec.source))))
    if spec.kind is Kind.CHOICE:
        return str(matcher.grammar_from_lark(choice_lark(read_choices(spec.source))))
    if spec.kind is Kind.STRUCTURAL:
        return str(matcher.grammar_from_lark(StructuralLark(vocabulary, spacing(spec)).write(spec.source)))
    if spec.kind is Kind.EBNF:
        return str(matcher.grammar_from_lark(to_lark(spec.source)))
    return str(matcher.grammar_from_lark(spec.source))


def choice_lark(choices: list[str]) -> str:
    """Return a grammar of alternatives."""
    return "start: " + " | ".join(quote(choice) for choice in choices) + "\n"


def reads_on(content: Mapping[str, Any], ends: Sequence[Any]) -> bool:
    """Whether what begins an end could be read as the content's: free text, or a number before its exponent."""
    kind = content["type"]
    if kind in ("any_text", "any_tokens") or content.get("style") == "text":
        return True
    if kind in ("triggered_tags", "dispatch"):
        return kind == "triggered_tags" and all(isinstance(end, str) for end in ends)
    if kind == "sequence":
        return bool(content["elements"]) and reads_on(content["elements"][-1], ends)
    if kind == "or":
        return any(reads_on(item, ends) for item in content["elements"])
    if kind != "json_schema" or content.get("style", "json") != "json" or not isinstance(content["json_schema"], dict):
        return False
    said = content["json_schema"].keys() - ANNOTATIONS
    is_number = said == {"type"} and content["json_schema"]["type"] == "number"
    return is_number and any(isinstance(end, str) and end[:1] in _IN_NUMBERS for end in ends)


def without_opening(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a format without the text that it begins with."""
    return {**node, "begin": ""} if node["type"] == "tag" else {**node, "value": ""}


def quote(text: str) -> str:
    """Write a Lark string."""
    return json.dumps(text, ensure_ascii=False)


class StructuralLark:
    """Writes one structural grammar as Lark rules."""

    def __init__(self, vocabulary: Vocabulary, between: str) -> None:
        self._rules: list[str] = []
        self._has_texts = False
        self._between = between
        self._added = {text: token_id for text, token_id in vocabulary.added.items() if text}
        alternatives = "|".join(re.escape(text) for text in sorted(self._added, key=len, reverse=True))
        self._split = re.compile(f"({alternatives})") if alternatives else None
        self._num_tokens, self._tokens = vocabulary.size, vocabulary.tokens
        self._eos_ids = vocabulary.eos_ids

    def write(self, source: str) -> str:
        """Return the whole grammar.

        Raises:
            ValueError: An unknown format, or one that is not supported.
        """
        start = self._format(formats_of(json.loads(source)))
        return "\n".join([f"start: {start}", *self._rules, *([ALL] if self._has_texts else []), ""])

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
        if node.get("style") == "text":
            return self._rule(self._free(node))
        if node.get("style", "json") != "json":
            found = TaggedArguments(node["json_schema"], node["style"], any_order=node.get("any_order", False))
            return self._format(found.format())
        given = in_any_order(node["json_schema"])[0] if node.get("any_order") else node["json_schema"]
        most = node.get("max_whitespace_cnt")
        schema = prepare_value(given, self._between if most is None else whitespace(most))
        return self._rule("%json " + json.dumps(schema, ensure_ascii=False))

    def _regex(self, node: Mapping[str, Any]) -> str:
        pattern = strip_anchors(whole(node["pattern"]))
        return self._rule(expression_of(pattern))

    def _any_text(self, node: Mapping[str, Any]) -> str:
        return self._rule(self._free(node))

    def _free(self, node: Mapping[str, Any]) -> str:
        """Describe text without the strings that a node excludes, of so many characters at most."""
        most = node.get("max_chars")
        schema = node.get("json_schema", {} if most is None else {"maxLength": most})
        found = PlainText(schema, node.get("excludes", ())).expression()
        if found == ANY:
            return ANY
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {found}")
        self._has_texts = True
        return name

    def _exclude_token(self, node: Mapping[str, Any]) -> str:
        return self._rule(self._tokens_but(map(self._id_of, node.get("exclude_tokens", ()))))

    def _any_tokens(self, node: Mapping[str, Any]) -> str:
        one = self._tokens_but(map(self._id_of, node.get("exclude_tokens", ())))
        return self._some_tokens(one, node.get("max_tokens"))

    def _some_tokens(self, one: str, most: int | None) -> str:
        """Describe a number of tokens; no reply has more than `MAX_TOKENS`."""
        if most == 0:
            return self._rule('""')
        return self._rule(f"{one}*" if most is None else f"{one}{{0,{min(most, MAX_TOKENS)}}}")

    def _tokens_but(self, excluded: Iterable[int]) -> str:
        """Describe one token, none of the excluded ones and no end of the reply."""
        numbers = sorted({*excluded, *self._eos_ids})
        return f"<[^{','.join(map(str, numbers))}]>" if numbers else "<[*]>"

    def _optional(self, node: Mapping[str, Any]) -> str:
        return self._rule(f"({self._format(node['content'])})?")

    def _plus(self, node: Mapping[str, Any]) -> str:
        return self._rule(f"({self._format(node['content'])})+")

    def _star(self, node: Mapping[str, Any]) -> str:
        return self._rule(f"({self._format(node['content'])})*")

    def _repeat(self, node: Mapping[str, Any]) -> str:
        if node["max"] == 0:
            return self._rule('""')
        most = "" if node["max"] == -1 else node["max"]
        return self._rule(f"({self._format(node['content'])}){{{node['min']},{most}}}")

    def _grammar(self, node: Mapping[str, Any]) -> str:
        """An EBNF grammar, its rules under names of its own."""
        lines = to_lark(node["grammar"], prefix=f"g{len(self._rules)}").splitlines()
        self._rules += lines
        return lines[0].partition(":")[0]

    def _dispatch(self, node: Mapping[str, Any]) -> str:
        """Free text in which a pattern is followed by its format."""
        tags = [{"begin": begin, "content": content, "end": ""} for begin, content in node["rules"]]
        made = {"triggers": [tag["begin"] for tag in tags], "tags": tags, "excludes": node.get("excludes", [])}
        return self._triggered_tags({**made, "stop_after_first": not node.get("loop", True)})

    def _token(self, node: Mapping[str, Any]) -> str:
        return self._written(node)

    def _token_triggered_tags(self, node: Mapping[str, Any]) -> str:
        """Free tokens among which some open tags."""
        triggers = [self._id_of(token) for token in node["trigger_tokens"]]
        for tag in node["tags"]:
            if not isinstance(tag["begin"], Mapping) or self._id_of(tag["begin"]["token"]) not in triggers:
                raise ValueError(f"no token of trigger_tokens begins the tag {json.dumps(tag['begin'])}")
        text = self._free_tokens(node, triggers)
        opened = [self._rule(f"{text} {self._tag(tag)}") for tag in node["tags"]]
        return self._repeated_tags(self._rule(" | ".join(opened)), text, node)

    def _token_dispatch(self, node: Mapping[str, Any]) -> str:
        """Free tokens, of which some are followed by their format."""
        rules = [(self._id_of(token), content) for token, content in node["rules"]]
        text = self._free_tokens(node, [token for token, _ in rules])
        opened = [self._rule(f"{text} <[{token}]> {self._format(content)}") for token, content in rules]
        ends = {"stop_after_first": not node.get("loop", True)}
        return self._repeated_tags(self._rule(" | ".join(opened)), text, ends)

    def _free_tokens(self, node: Mapping[str, Any], triggers: Iterable[int]) -> str:
        return self._some_tokens(self._tokens_but([*triggers, *map(self._id_of, node.get("exclude_tokens", ()))]), None)

    def _qwen_xml_parameter(self, node: Mapping[str, Any]) -> str:
        return self._format(TaggedArguments(node["json_schema"], "qwen_xml").format())

    def _sequence(self, node: Mapping[str, Any]) -> str:
        return self._rule(self._run(node["elements"], ()) or '""')

    def _run(self, elements: Sequence[Mapping[str, Any]], ends: Sequence[Any]) -> str:
        """Describe elements behind each other: one that reads on as long as it may is ended by what comes next."""
        left, parts = list(elements), []
        while left:
            item = left.pop(0)
            text = self._opening(left[0]) if left else None
            if not left:
                parts.append(self._closed(item, ends))
            elif text is not None and reads_on(item, [text]):
                parts.append(self._closed(item, [text]))
                left[0] = without_opening(left[0])
            else:
                parts.append(self._format(item))
        return " ".join(parts)

    def _opening(self, node: Mapping[str, Any]) -> str | None:
        """Return the text that a format begins with, where it is one without added tokens."""
        text = {"const_string": node.get("value"), "tag": node.get("begin")}.get(node["type"])
        is_plain = isinstance(text, str) and (self._split is None or self._split.search(text) is None)
        return text or None if is_plain else None

    def _or(self, node: Mapping[str, Any]) -> str:
        return self._rule(" | ".join(self._format(item) for item in node["elements"]))

    def _tag(self, node: Mapping[str, Any]) -> str:
        """Describe a tag. Free text in one ends where its end begins; an end of tokens ends it by itself."""
        ends = node["end"] if isinstance(node["end"], list) else [node["end"]]
        begin, content = self._written(node["begin"]), node["content"]
        if ends_in_tokens(node, self._added):
            return self._rule(f"{begin} {self._before_tokens(content, ends)} {self._either(ends)}".strip())
        return self._rule(f"{begin} {self._closed(content, ends)}".strip() or '""')

    def _closed(self, content: Mapping[str, Any], ends: Sequence[Any]) -> str:
        """Describe what stands before an end. What reads on as long as it may is told where to stop."""
        if not any(ends):
            return self._format(content)
        kind = content["type"]
        if kind == "any_tokens":
            content, kind = {"type": "any_text"}, "any_text"  # up to a text, no matter in which tokens
        if not reads_on(content, ends):
            return f"{self._format(content)} {self._either(ends)}"
        if kind == "any_text" or content.get("style") == "text":
            return self._rule(" | ".join(self._ended(content, end) for end in ends))
        if kind == "or":
            return self._rule(" | ".join(self._closed(item, ends) for item in content["elements"]))
        if kind == "sequence":
            return self._rule(self._run(content["elements"], ends))
        if kind == "json_schema":
            return f"{self._rule(NUMBER)} {self._either(ends)}"
        return self._triggered_tags(content, ends)

    def _either(self, ends: Sequence[Any]) -> str:
        end = " | ".join(self._written(text) or '""' for text in ends)
        return self._rule(end) if len(ends) > 1 else end

    def _before_tokens(self, content: Mapping[str, Any], ends: Sequence[Any]) -> str:
        """Describe what stands before an end which is a token: tokens can be counted there, and are not the end."""
        if content["type"] == "any_text" and is_counted_text(content):
            return self._some_tokens(self._tokens_but(self._added.values()), content["max_tokens"])
        if content["type"] in ("any_tokens", "exclude_token"):
            closing = [end["token"] if isinstance(end, Mapping) else end for end in ends]
            content = {**content, "exclude_tokens": [*content.get("exclude_tokens", ()), *closing]}
        return self._format(content)

    def _ended(self, content: Mapping[str, Any], end: Any) -> str:
        """Describe free text up to an end."""
        parts = [end] if not isinstance(end, str) or self._split is None else self._split.split(end)
        if len(parts) == 1 and isinstance(end, str):
            return self._rule(
                f"{self._free(content)} {quote(end)}" if end else self._free(content), "[lazy]" * bool(end)
            )
        free = self._free(content)
        if not isinstance(end, str):
            return self._rule(f"{free} {self._written(end)}")
        if parts[0]:  # one terminal with the text, which would go on otherwise
            self._rules.append(f"T{len(self._rules)}: {free} {quote(parts[0])}")
            free = f"T{len(self._rules) - 1}"
        return self._rule(f"{free} {self._text(''.join(parts[1:]))}")

    def _written(self, node: Any) -> str:
        """Write a text, or a token of the vocabulary."""
        if isinstance(node, str):
            return self._text(node)
        return f"<[{self._id_of(node['token'])}]>"

    def _id_of(self, token: str | int) -> int:
        """Return the id of a token, of which an id or the text is given.

        Raises:
            ValueError: The model has none such.
        """
        token_id = token if isinstance(token, int) else self._added.get(token)
        if token_id is None and isinstance(token, str):
            sought = token.encode()
            token_id = next((i for i, text in enumerate(self._tokens) if text == sought), None)
        if token_id is None or not 0 <= token_id < self._num_tokens:
            raise ValueError(f"{token!r} is no token of this model")
        return token_id

    def _tags_with_separator(self, node: Mapping[str, Any]) -> str:
        tag = self._rule(" | ".join(self._tag(tag) for tag in node["tags"]))
        more = "" if node.get("stop_after_first") else f" ({self._text(node['separator'])} {tag})*"
        body = f"{tag}{more}"
        return self._rule(body if node.get("at_least_one") else f"({body})?")

    def _triggered_tags(self, node: Mapping[str, Any], ends: Sequence[Any] = ()) -> str:
        """Free text in which a trigger opens one of the tags.

        A trigger of text ends a lazy lexeme; one with an added token ends the text, which has none.
        """
        text = self._rule(" | ".join(self._ended(node, end) for end in ends) if any(ends) else self._free(node))
        tags = []
        for tag in node["tags"]:
            trigger = next((t for t in node["triggers"] if tag["begin"].startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins the tag {tag['begin']!r}")
            parts = self._split.split(trigger) if self._split is not None else [trigger]
            if len(parts) > 1:
                # Text before the trigger's first added token is read as free text: without it no parser sees a call.
                opening, begin = self._rule(self._free(node)), tag["begin"].removeprefix(parts[0])
            else:
                opening = self._rule(f"{self._free(node)} {quote(trigger)}", "[lazy]")
                begin = tag["begin"].removeprefix(trigger)
            tags.append(self._rule(f"{opening} {self._tag({**tag, 'begin': begin})}"))
        one = self._rule(" | ".join(tags))
        return self._repeated_tags(one, text, node, self._either(ends) if any(ends) else "")

    def _repeated_tags(self, one: str, text: str, node: Mapping[str, Any], end: str = "") -> str:
        """Describe tags with free text before each and behind the last.

        Where there has to be one, it comes at once, as xgrammar has it.
        """
        first = self._rule(" | ".join(map(self._tag, node["tags"]))) if node.get("at_least_one") else None
        if node.get("stop_after_first"):
            return self._rule(f"{one} {end} | {text}" if first is None else f"{first} {end}")
        return self._rule(f"{first or ''} {one}* {text}")

    def _text(self, text: str) -> str:
        """Write a text, its added tokens as such."""
        parts = self._split.split(text) if self._split is not None else [text]
        written = [f"<[{self._added[part]}]>" if part in self._added else quote(part) for part in parts if part]
        return " ".join(written)
