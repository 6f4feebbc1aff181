"""What of a structural grammar is not said in llguidance's form of it, by place.

Where arguments are tags, strings stand as they are: nothing else is known of them. Keys in any order are not counted
one by one. Tokens are counted up to a token: to what is text it is all the same how text is cut into tokens.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from dovetail.sdk.schemas.schema import escape
from dovetail_grammar.plain_texts import lost_of
from dovetail_grammar.xml_styles import TaggedArguments, in_any_order

Node = Mapping[str, Any]
_BY_TOKEN = ("any_tokens", "exclude_token")


def lost_in(root: Any, added: Container[str]) -> list[str]:
    """Return the places.

    Args:
        root: The grammar.
        added: Texts that are tokens of their own.

    Raises:
        ValueError: A schema's arguments cannot be written as tags.
    """
    lost: list[str] = []
    counted: set[str] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        where, node = stack.pop()
        if isinstance(node, list):
            stack += ((f"{where}/{index}", item) for index, item in enumerate(node))
        elif isinstance(node, Mapping):
            if ends_in_tokens(node, added):
                counted.add(f"{where}/content")
            lost += (where + place for place in _lost_of(node, is_counted=where in counted))
            lost += (f"{where}/content/{key}" for key in _lost_in_text(node, added))
            stack += ((f"{where}/{escape(key)}", value) for key, value in node.items() if key != "json_schema")
    return lost


def ends_in_tokens(tag: Node, added: Container[str]) -> bool:
    """Whether what stands in a tag ends before a token, whichever end comes."""
    if "begin" not in tag or "end" not in tag:
        return False
    ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    return all(isinstance(end, Mapping) or end in added for end in ends)


def is_counted_text(content: Node) -> bool:
    """Whether the tokens of free text can be counted: where nothing is said of its characters."""
    return content.get("max_tokens") is not None and not content.get("excludes") and content.get("max_chars") is None


def _lost_of(node: Node, *, is_counted: bool) -> Iterator[str]:
    if "json_schema" in node:
        yield from (f"/json_schema{place}" for place in _lost_of_schema(node))
        if node.get("excludes") and node.get("style") != "text":
            yield "/excludes"
    elif node.get("type") == "any_text" and node.get("max_tokens") is not None:
        yield from () if is_counted and is_counted_text(node) else ("/max_tokens",)


def _lost_in_text(tag: Node, added: Container[str]) -> list[str]:
    """Return the keywords about tokens of what stands in a tag that ends by a text."""
    content = tag.get("content")
    if "begin" not in tag or not isinstance(content, Mapping) or ends_in_tokens(tag, added):
        return []
    if content.get("type") not in _BY_TOKEN:
        return []
    return [key for key in ("exclude_tokens", "max_tokens") if content.get(key) not in (None, [])]


def _lost_of_schema(node: Node) -> list[str]:
    style = "qwen_xml" if node.get("type") == "qwen_xml_parameter" else node.get("style", "json")
    if style == "text":
        return lost_of(node["json_schema"])
    if style != "json":
        found = TaggedArguments(node["json_schema"], style, any_order=node.get("any_order", False))
        found.format()
        return found.lost
    return in_any_order(node["json_schema"])[1] if node.get("any_order") else []
