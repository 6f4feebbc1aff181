"""Ways to enforce tool calls: every tool's schema is as a backend enforces it, and what a format loses is named.

A format of calls describes arguments in its own way (`ToolParser.grammar`): as the JSON that the schema describes, as
tags around values, as Python's keywords. Where the schema does not stand in the grammar as a whole, what the grammar
does not say of it is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, SupportLevel
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.spec.fields import RequestedGrammar, check_spec
from dovetail.grammar.spec.normal import normalize
from dovetail.grammar.spec.route import (
    EnforcementOption,
    GrammarRoute,
    GrammarRouter,
    SchemaOffer,
    ToolSchema,
    not_strict,
    offered,
    unenforceable,
)
from dovetail.grammar.spec.wire import option_of
from dovetail.sdk.formats.presence import presences
from dovetail.sdk.formats.reply_grammar import answer_message, arguments_schema, chosen, other_messages
from dovetail.sdk.formats.schema_types import STRING, properties_of, schemas_by_tool, types_of
from dovetail.sdk.formats.tagged_values import DERIVED, tagged_value
from dovetail.sdk.schemas.schema import escape
from dovetail.sdk.schemas.structural import schemas_with_places

Tool = Mapping[str, Any]
_HELD = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
"""What a format with declared arguments in the schema's order keeps of it."""


@dataclass(frozen=True)
class ToolPlaces:
    """Where places of a structural grammar of calls stood in the tools; `place` is that of its `EnforcementOption`.

    Attributes:
        starts: By the pointer of a schema in the grammar: the tool's number, and where the schema stood in its own.
        tools: By number: the place of the tool's schema in the request, and the schema.
    """

    starts: Mapping[str, tuple[int, str]]
    tools: Mapping[int, tuple[str, SchemaOffer]]

    def found(self, pointer: str) -> tuple[int, str] | None:
        """Return the tool's number and the place in its schema as it was given; None where that is not known."""
        for start, (number, where) in self.starts.items():
            if pointer == start or pointer.startswith(f"{start}/"):
                item = self.tools[number][1]
                inner = pointer[len(start) :]
                if where.endswith(DERIVED):
                    where, key = where.removesuffix(DERIVED), inner.rpartition("/")[2]
                    inner = f"/{key}" if key in _at(item.schema, where) else ""
                return number, item.place(where + inner)
        return None

    def place(self, pointer: str) -> str:
        """Return where a place of the grammar stood; the grammar's own place where that is not known."""
        found = self.found(pointer)
        return pointer if found is None else self.tools[found[0]][0] + found[1]

    def holds(self, number: int, where: str) -> bool:
        """Whether the grammar holds a part of a tool's schema as it is."""
        return (number, where) in self.starts.values()


@dataclass(frozen=True, slots=True)
class ToolRouter:
    """Routes the calls of one request; see `StructuredOutputs.tools` for what there is of it."""

    router: GrammarRouter
    parser: ToolParser
    name: str
    param: str
    tools: Sequence[Tool]
    choice: Any
    parallel: bool

    def route(self) -> GrammarRoute:
        """Return the options.

        Raises:
            RequestError: There is none.
        """
        allowed = {tool["function"]["name"] for tool in chosen(self.tools, self.choice)}
        schemas = [
            ToolSchema(name, json.dumps(arguments_schema(tool), ensure_ascii=False), f"/tools/{i}/function/parameters")
            for i, tool in enumerate(self.tools)
            if (name := tool["function"]["name"]) in allowed
        ]
        for each in schemas:
            where = f"{self.param}: the parameters of the tool {each.name!r}"
            check_spec(GrammarSpec(kind=Kind.JSON, source=each.source), self.param, where)
        able = self.router.able(Kind.STRUCTURAL, self.param)
        options, reasons = [], []
        for name, backend in able:
            found = self._option(name, backend, schemas)
            if isinstance(found, str):
                reasons.append((name, found))
            else:
                options.append(found)
        if not options:
            raise unenforceable(self.param, reasons)
        options.sort(key=lambda option: len(option.ignored))
        validated = [] if self.router.enforced_only else options[:1]
        options += map(self._free, validated)
        spec = GrammarSpec(kind=Kind.STRUCTURAL, source=options[0].grammar.source)
        return GrammarRoute(spec, tuple(options), self.param, tuple(schemas))

    def _option(self, name: str, backend: GrammarBackend, schemas: Sequence[ToolSchema]) -> EnforcementOption | str:
        """Return one backend's option, or why there is none."""
        numbers = {each.name: number for number, each in enumerate(schemas)}
        weak: dict[int, tuple[str, SchemaOffer]] = {}
        for number, each in enumerate(schemas):
            normal = normalize(json.loads(each.source), is_split=True)
            item = offered(backend, normal, GrammarSpec(kind=Kind.JSON, source=normal.source))
            if item.reason or not isinstance(item.schema, dict):
                if self.router.enforced_only:
                    return f"of the parameters of the tool {each.name!r} nothing can be enforced: {item.reason}"
                item = replace(item, source='{"type": "object"}', ignored=("",))
            weak[number] = (each.place, item)
        noted = [_noted(tool, numbers.get(tool["function"]["name"]), weak) for tool in self.tools]
        spec = self._grammar(noted)
        root = json.loads(spec.source)
        places = ToolPlaces(_starts(root), weak)
        spec = replace(spec, source=json.dumps(root))
        check_spec(spec, self.param)
        support = backend.supports(spec)
        if support.level is SupportLevel.NONE:
            return support.reason
        unsaid = [places.found(at) for at in support.ignored]
        ignored: list[str] = []
        for tool in self.tools:
            if tool["function"]["name"] not in numbers:
                continue
            number = numbers[tool["function"]["name"]]
            place, item = weak[number]
            lost = [*item.ignored, *(item.place(at) for at in _lost(number, item.schema, places, tool))]
            lost += [at[1] for at in unsaid if at is not None and at[0] == number]
            if lost and tool["function"].get("strict") and self.router.strict_schema:
                raise not_strict(
                    f"{self.param}: the tool {schemas[number].name!r}", [replace(item, ignored=tuple(lost))]
                )
            ignored += [place + at for at in dict.fromkeys(lost)]
        ignored += [at for at in support.ignored if places.found(at) is None]
        made = option_of(name, support.to_compile(spec), relax_schema=True)
        alone = tuple(map(places.place, support.alone))
        return EnforcementOption(made, "approximate" if ignored else "full", tuple(ignored), places.place, alone)

    def _free(self, option: EnforcementOption) -> EnforcementOption:
        """Return an option in which the arguments are any object."""
        spec = self._grammar([_function(tool, {"type": "object"}) for tool in self.tools])
        check_spec(spec, self.param)
        ignored = tuple(f"/tools/{i}/function/parameters/" for i in range(len(self.tools)))
        return EnforcementOption(option_of(option.grammar.backend, spec), "validate_only", ignored)

    def _grammar(self, tools: Sequence[Tool]) -> GrammarSpec:
        """Return the grammar of the calls of tools."""
        strict = any(tool["function"].get("strict") for tool in tools)
        if self.choice == "auto":
            spec = auto_grammar(self.parser, tools, strict, self.parallel)
        else:
            spec = self.parser.grammar(tools, self.choice, strict, self.parallel)
        if spec is None:
            text = f"{self.param}: the tool format {self.name!r} has no grammar, so this cannot be enforced"
            raise RequestError(f"{text}; use tool_choice auto", param=self.param, code="unsupported_parameter")
        return self.router.spaced(spec)


def join(
    text: EnforcementOption, calls: EnforcementOption, asked: RequestedGrammar, spec: FormatSpec
) -> EnforcementOption | None:
    """Return an option that allows a text or calls, None where these two cannot be put together.

    Args:
        text: An option of the text.
        calls: An option of the calls, as for `tool_choice` required.
        asked: The grammar of the text.
        spec: The output format. In one of messages the text is that of the answer's message.
    """
    content = _content(GrammarSpec(kind=Kind(text.grammar.kind), source=text.grammar.source))
    if content is None or calls.grammar.kind != Kind.STRUCTURAL or text.grammar.backend != calls.grammar.backend:
        return None
    if spec.messages is not None:
        elements = [other_messages(spec.messages), answer_message(spec.messages, content)]
        content = {"type": "sequence", "elements": elements}
    node = {"type": "or", "elements": [content, json.loads(calls.grammar.source)["format"]]}
    source = json.dumps({"type": "structural_tag", "format": node}, ensure_ascii=False)
    spaces = {"max_whitespace": text.grammar.max_whitespace, "whitespace": text.grammar.whitespace}
    joined = GrammarSpec(kind=Kind.STRUCTURAL, source=source, **spaces)  # type: ignore[arg-type]
    check_spec(joined, asked.param)
    ignored = (*text.ignored, *text.alone, *calls.ignored, *calls.alone)
    is_full = text.enforcement == calls.enforcement == "full" and not (text.alone or calls.alone)
    made = option_of(calls.grammar.backend, joined, relax_schema=True)
    return EnforcementOption(made, "full" if is_full else "approximate", ignored)


def _content(spec: GrammarSpec) -> Mapping[str, Any] | None:
    """Return a grammar as a part of a structural one, None where its kind cannot be."""
    if spec.kind is Kind.REGEX:
        return {"type": "regex", "pattern": spec.source}
    if spec.kind is Kind.CHOICE:
        return {"type": "or", "elements": [{"type": "const_string", "value": v} for v in json.loads(spec.source)]}
    if spec.kind is Kind.JSON or spec.kind is Kind.JSON_OBJECT:
        return {"type": "json_schema", "json_schema": json.loads(spec.source) if spec.source else {"type": "object"}}
    return None


def _noted(tool: Tool, number: int | None, weak: Mapping[int, tuple[str, SchemaOffer]]) -> Tool:
    """Return a tool with its weakened schema, in which each part that a format may take has its place as a comment."""
    if number is None:
        return tool
    schema = weak[number][1].schema
    properties = {
        name: {**declared, "$comment": f"{number}/properties/{escape(name)}"}
        if isinstance(declared, Mapping)
        else declared
        for name, declared in schema.get("properties", {}).items()
    }
    held = {"properties": properties} if "properties" in schema else {}
    return _function(tool, {**schema, **held, "$comment": str(number)})


def _starts(root: Any) -> dict[str, tuple[int, str]]:
    """Return where the schemas of a grammar stood, and take the comments out that say so."""
    starts = {}
    for pointer, schema in schemas_with_places(root):
        note = schema.pop("$comment", None) if isinstance(schema, dict) else None
        if not isinstance(note, str):
            continue
        number, slash, where = note.partition("/")
        starts[pointer] = int(number), slash + where
        for part in schema.get("properties", {}).values() if not where else ():
            if isinstance(part, dict):
                part.pop("$comment", None)
    return starts


def _at(schema: Any, pointer: str) -> Mapping[str, Any]:
    """Return a property's schema."""
    name = pointer.rpartition("/")[2].replace("~1", "/").replace("~0", "~")
    found = schema.get("properties", {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _function(tool: Tool, parameters: Any) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": parameters}}


def _lost(number: int, whole: Mapping[str, Any], places: ToolPlaces, tool: Tool) -> list[str]:
    """Return the places of a schema that a grammar does not keep, and of values that are read as of other types."""
    if places.holds(number, ""):
        return []
    given = schemas_by_tool([tool]).get(tool["function"]["name"])
    held = presences(whole)[1]
    said = [f"/{escape(key)}" for key in whole if key not in _HELD and key != "allOf"]
    said += [f"/allOf/{at}" for at in range(len(whole.get("allOf", ())))]
    lost = [where for where in said if where not in held]
    properties = whole.get("properties", {})
    if any(name not in properties for name in whole.get("required", ())):
        lost.append("/required")
    for name, declared in properties.items():
        where = f"/properties/{escape(name)}"
        if f"/properties/{name}" in held:
            continue
        kinds, read = types_of(declared, whole), types_of(properties_of(given).get(name), given)
        if "string" in kinds and (not read or read - kinds):
            lost.append(where)
        if declared is True or places.holds(number, where):
            continue
        if "string" in (kinds or STRING) and tagged_value(declared, whole).is_full:
            continue
        kept = {"type", "enum"} if kinds == STRING else {"type"} if "string" in kinds else set()
        lost += [f"{where}/{escape(key)}" for key in declared if key not in kept] if declared is not False else [where]
    return lost


# Free text beside tool calls: with `tool_choice` auto it must not hold calls that the grammar knows nothing of.
#
# A format's parser is tolerant: it reads a call also where the section's marker is missing, or where an answer begins
# with a bracket. A grammar of free text in which a trigger opens a call knows that trigger alone, so all other ways to
# begin a call are taken out of the free text: what the parser reads as a call, the grammar has held to its schema.

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
