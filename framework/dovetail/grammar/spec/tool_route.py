"""Ways to enforce tool calls: every tool's schema is weakened where it must be, and what a format loses is named.

A format of calls describes arguments in its own way (`ToolParser.grammar`): as the JSON that the schema describes, as
tags around values, as Python's keywords. Where the schema does not stand in the grammar as a whole, what the grammar
does not say of it is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, SupportLevel
from dovetail.contracts.output import FormatSpec
from dovetail.contracts.tools import ToolParser
from dovetail.errors import RequestError
from dovetail.grammar.spec.asking import Weakened, weakened
from dovetail.grammar.spec.expressions import plainly
from dovetail.grammar.spec.fields import RequestedGrammar
from dovetail.grammar.spec.free_text import auto_grammar
from dovetail.grammar.spec.limits import check_schema, check_spec
from dovetail.grammar.spec.normal import normalize
from dovetail.grammar.spec.route import EnforcementOption, Route, Router, ToolSchema, not_strict
from dovetail.grammar.spec.schema import escape
from dovetail.grammar.spec.unique.tags import Watched
from dovetail.grammar.spec.weaken import schemas_with_places
from dovetail.grammar.spec.wire import option_of
from dovetail.text.tool_calls.reply_grammar import answer_message, arguments_schema, chosen, other_messages
from dovetail.text.tool_calls.schema_types import STRING, types_of
from dovetail.text.tool_calls.tagged_values import ABOUT, FREE, tagged_value

Tool = Mapping[str, Any]
_HELD = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
"""What a format with declared arguments in the schema's order keeps of it."""


@dataclass(frozen=True)
class ToolPlaces:
    """Where places of a structural grammar of calls stood in the tools; an `EnforcementOption` has it as `Normal`."""

    root: Any
    tools: Mapping[str, tuple[str, Weakened]]

    def place(self, pointer: str) -> str:
        """Return where a place of the grammar stood; the grammar's own place where that is not known."""
        for start, found in schemas_with_places(self.root):
            if pointer == start or pointer.startswith(f"{start}/"):
                inner = pointer[len(start) :]
                text = json.dumps(found, sort_keys=True)
                for place, item in self.tools.values():
                    where = _part_of(item.schema, text)
                    if where is not None:
                        return place + item.normal.place(where + inner)
        return pointer


class ToolRouter:
    """Routes the calls of one request."""

    def __init__(self, router: Router, parser: ToolParser, name: str, param: str) -> None:
        """Keep what there is: the format's parser and its name, and the request's field, for errors."""
        self._router, self._parser, self._name, self._param = router, parser, name, param

    def route(self, tools: Sequence[Tool], choice: Any, *, parallel: bool) -> Route:
        """Return the ways; see `StructuredOutputs.tools`.

        Raises:
            RequestError: There is none.
        """
        allowed = {tool["function"]["name"] for tool in chosen(tools, choice)}
        schemas = [
            ToolSchema(name, json.dumps(arguments_schema(tool), ensure_ascii=False), f"/tools/{i}/function/parameters")
            for i, tool in enumerate(tools)
            if (name := tool["function"]["name"]) in allowed
        ]
        for each in schemas:
            check_schema(each.source, self._param, each.name)
        able = self._router.able(Kind.STRUCTURAL, self._param)
        ways, reasons = [], []
        for name, backend in able:
            found = self._way(name, backend, tools, schemas, choice, parallel=parallel)
            if isinstance(found, str):
                reasons.append(f"{name}: {found}")
            else:
                ways.append(found)
        if not ways:
            text = f"{self._param} cannot be enforced: {'; '.join(reasons)}"
            raise RequestError(text, param=self._param, code="unsupported_grammar")
        ways.sort(key=lambda way: len(way.ignored))
        ways += [self._free(way, tools, choice, parallel=parallel) for way in ways[:1]]
        spec = GrammarSpec(kind=Kind.STRUCTURAL, source=ways[0].step.source)
        return Route(spec, tuple(ways), self._param, tuple(schemas))

    def _way(
        self,
        name: str,
        backend: GrammarBackend,
        tools: Sequence[Tool],
        schemas: Sequence[ToolSchema],
        choice: Any,
        *,
        parallel: bool,
    ) -> EnforcementOption | str:
        """Return one backend's way, or why there is none."""
        known = {each.name: each for each in schemas}
        weak: dict[str, tuple[str, Weakened]] = {}
        ignored: list[str] = []
        for each in schemas:
            normal = normalize(json.loads(each.source))
            item = weakened(backend, normal, GrammarSpec(kind=Kind.JSON, source=""), is_part=True)
            if item.reason or not isinstance(item.schema, dict):
                item = replace(item, schema={"type": "object"}, ignored=("",))
            weak[each.name] = (each.place, item)
        spec, unsaid = self._grammar([_with(tool, weak) for tool in tools], choice, parallel)
        root = json.loads(spec.source)
        support = backend.supports(spec)
        if support.level is SupportLevel.NONE:
            return support.reason
        places = ToolPlaces(root, weak)
        tags = Watched.of(root, support.ignored)
        texts = {json.dumps(found, sort_keys=True) for _, found in schemas_with_places(root)}
        for tool in tools:
            tool_name = tool["function"]["name"]
            if tool_name not in known:
                continue
            place, item = weak[tool_name]
            lost = [*item.ignored, *(item.normal.place(at) for at in _lost(item.schema, texts, unsaid))]
            lost += [at[len(place) :] for at in map(places.place, tags.lost) if at.startswith(f"{place}/")]
            if lost and tool["function"].get("strict") and self._router.strict_schema:
                raise not_strict(f"{self._param}: the tool {tool_name!r}", [replace(item, ignored=tuple(lost))])
            ignored += [place + at for at in dict.fromkeys(lost)]
        step = option_of(name, spec, tags.source(root), weaken=True, unique=tags.unique)
        watched = tuple(map(places.place, tags.mended))
        return EnforcementOption(step, "approximate" if ignored else "full", tuple(ignored), places, watched)

    def _free(self, way: EnforcementOption, tools: Sequence[Tool], choice: Any, *, parallel: bool) -> EnforcementOption:
        """Return a way in which the arguments are any object."""
        free = [_function(tool, {"type": "object"}) for tool in tools]
        step = option_of(way.step.backend, self._grammar(free, choice, parallel)[0])
        return EnforcementOption(
            step, "validate_only", tuple(f"/tools/{i}/function/parameters/" for i in range(len(tools)))
        )

    def _grammar(self, tools: Sequence[Tool], choice: Any, parallel: bool) -> tuple[GrammarSpec, set[str]]:
        """Return the grammar of the calls, said plainly, and what that leaves unsaid."""
        strict = any(tool["function"].get("strict") for tool in tools)
        if choice == "auto":
            spec = auto_grammar(self._parser, tools, strict, parallel)
        else:
            spec = self._parser.grammar(tools, choice, strict, parallel)
        if spec is None:
            text = f"{self._param}: the tool format {self._name!r} has no grammar, so this cannot be enforced"
            raise RequestError(f"{text}; use tool_choice auto", param=self._param, code="unsupported_parameter")
        root, unsaid = json.loads(spec.source), set[str]()
        _say_plainly(root, unsaid)
        spec = replace(spec, source=json.dumps(root))
        check_spec(spec, self._param)
        return self._router.spaced(spec), unsaid


def join(
    text: EnforcementOption, calls: EnforcementOption, asked: RequestedGrammar, spec: FormatSpec
) -> EnforcementOption | None:
    """Return a way that allows a text or calls, None where these two cannot be put together.

    Args:
        text: A way of the text.
        calls: A way of the calls, as for `tool_choice` required.
        asked: The grammar of the text.
        spec: The output format. In one of messages the text is that of the answer's message.
    """
    content = _content(GrammarSpec(kind=Kind(text.step.kind), source=text.step.source))
    if content is None or calls.step.kind != Kind.STRUCTURAL or text.step.backend != calls.step.backend:
        return None
    if spec.messages is not None:
        elements = [other_messages(spec.messages), answer_message(spec.messages, content)]
        content = {"type": "sequence", "elements": elements}
    node = {"type": "or", "elements": [content, json.loads(calls.step.source)["format"]]}
    source = json.dumps({"type": "structural_tag", "format": node}, ensure_ascii=False)
    spaces = {"max_whitespace": text.step.max_whitespace, "whitespace": text.step.whitespace}
    joined = GrammarSpec(kind=Kind.STRUCTURAL, source=source, **spaces)  # type: ignore[arg-type]
    check_spec(joined, asked.param)
    # Where the one and the other begin cannot be told: what is watched over in either is not, and named.
    ignored = (*text.ignored, *text.watched, *calls.ignored, *calls.watched)
    is_full = text.enforcement == calls.enforcement == "full" and not (text.watched or calls.watched)
    step = option_of(calls.step.backend, joined, weaken=True)
    return EnforcementOption(step, "full" if is_full else "approximate", ignored)


def _content(spec: GrammarSpec) -> Mapping[str, Any] | None:
    """Return a grammar as a part of a structural one, None where its kind cannot be."""
    if spec.kind is Kind.REGEX:
        return {"type": "regex", "pattern": spec.source}
    if spec.kind is Kind.CHOICE:
        return {"type": "or", "elements": [{"type": "const_string", "value": v} for v in json.loads(spec.source)]}
    if spec.kind is Kind.JSON or spec.kind is Kind.JSON_OBJECT:
        return {"type": "json_schema", "json_schema": json.loads(spec.source) if spec.source else {"type": "object"}}
    return None


def _with(tool: Tool, weak: Mapping[str, tuple[str, Weakened]]) -> Tool:
    found = weak.get(tool["function"]["name"])
    return tool if found is None else _function(tool, found[1].schema)


def _function(tool: Tool, parameters: Any) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": parameters}}


def _part_of(whole: Any, text: str) -> str | None:
    """Return where in a tool's schema a schema of the grammar comes from: all of it, or one property's."""
    if json.dumps({"type": "object", **whole}, sort_keys=True) == text:
        return ""
    for name, declared in whole.get("properties", {}).items():
        if _declared_text(declared, whole) == text:
            return f"/properties/{escape(name)}"
    return None


def _declared_text(declared: Any, whole: Mapping[str, Any]) -> str:
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return json.dumps({**declared, **shared} if isinstance(declared, Mapping) else True, sort_keys=True)


def _say_plainly(node: Any, unsaid: set[str]) -> None:
    """Write expressions of strings between tags without look-around; what is then too large is not said."""
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict) and (about := node.pop(ABOUT, None)) is not None:
        made = plainly(node["pattern"], in_one=True, without=()).parts
        if made:
            node["pattern"] = made[0]
        else:
            unsaid.add(about)
            node.clear()
            node.update(FREE)
        return
    for part in parts:
        _say_plainly(part, unsaid)


def _lost(whole: Mapping[str, Any], texts: set[str], unsaid: set[str]) -> list[str]:
    """Return the places of a tool's schema that a grammar, in which the schemas `texts` stand, does not keep."""
    if json.dumps({"type": "object", **whole}, sort_keys=True) in texts:
        return []
    lost = [f"/{escape(key)}" for key in whole if key not in _HELD]
    properties = whole.get("properties", {})
    if any(name not in properties for name in whole.get("required", ())):
        lost.append("/required")
    for name, declared in properties.items():
        if _declared_text(declared, whole) in texts:
            continue
        is_said = json.dumps(declared, sort_keys=True) not in unsaid
        if is_said and "string" in (types_of(declared, whole) or STRING) and tagged_value(declared, whole).is_full:
            continue
        kinds = types_of(declared, whole)
        kept = {"type", "enum"} if kinds == STRING else {"type"} if "string" in kinds else set()
        if isinstance(declared, Mapping):
            lost += [f"/properties/{escape(name)}/{escape(key)}" for key in declared if key not in kept]
        elif declared is False:
            lost.append(f"/properties/{escape(name)}")
    return lost
