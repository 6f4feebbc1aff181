"""The page `reference/routes.md`: every route with the fields of its body, from the server's routers."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from dovetail import __version__
from dovetail_server import routes
from dovetail_server.openapi.document import complete

HEAD = """\
# Routes

Every route of the server and the fields of its body, as `GET /openapi.json` has them; a running server shows the same
at `/docs`, with examples to send. The [HTTP API](../api.md) says what the fields do, [Security](../security.md) who may
ask. Routes of plugins are added by their hooks.

"""


def page() -> str:
    """Return the whole page."""
    document = schema()
    parts = [HEAD, *table(document)]
    used: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for name in bodies(operation):
                used.setdefault(name, []).append(f"`{method.upper()} {path}`")
    for name, where in sorted(used.items()):
        parts += [
            f"\n## {name}\n",
            f"The body of {', '.join(where)}.\n",
            *fields(document["components"]["schemas"][name]),
        ]
    return "\n".join(parts) + "\n"


def schema() -> dict[str, Any]:
    """Return the OpenAPI document of all routes; no server is needed for it."""
    found: list[APIRoute] = []
    for module in pkgutil.iter_modules(routes.__path__):
        router = getattr(import_module(f"{routes.__name__}.{module.name}"), "router", None)
        if isinstance(router, APIRouter):
            found += [route for route in router.routes if isinstance(route, APIRoute)]
    document = get_openapi(title="Dovetail", version=__version__, routes=found)
    return complete(document, model="dovetail-demo", needs_key=False, unlocked=frozenset())


def table(document: dict[str, Any]) -> Iterator[str]:
    """Yield the table of routes."""
    yield "| route | does | body |"
    yield "|---|---|---|"
    for path, methods in sorted(document["paths"].items()):
        for method, operation in methods.items():
            text = " ".join(operation.get("description", operation.get("summary", "")).partition("\n\n")[0].split())
            links = ", ".join(f"[{name}](#{name.lower()})" for name in bodies(operation))
            yield f"| `{method.upper()} {path}` | {cell(text)} | {links} |"


def bodies(operation: dict[str, Any]) -> list[str]:
    """Return the names of an operation's bodies."""
    found = []
    for content in operation.get("requestBody", {}).get("content", {}).values():
        found += [ref.rpartition("/")[2] for ref in refs(content.get("schema", {}))]
    return list(dict.fromkeys(found))


def refs(value: Any) -> Iterator[str]:
    """Yield the references of a schema, its branches included, what they lead to not."""
    if "$ref" in value:
        yield value["$ref"]
    for branch in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from refs(branch)


def fields(found: dict[str, Any]) -> Iterator[str]:
    """Yield the table of a body's fields."""
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    required = found.get("required", [])
    for name, value in found.get("properties", {}).items():
        needed = " (required)" if name in required else ""
        yield f"| `{name}` | {cell(kind(value))}{needed} | {cell(value.get('description', ''))} |"


def kind(value: dict[str, Any]) -> str:
    """Return a field's type in words."""
    if "$ref" in value:
        return str(value["$ref"].rpartition("/")[2])
    for union in ("anyOf", "oneOf"):
        if union in value:
            return " or ".join(dict.fromkeys(kind(branch) for branch in value[union]))
    if "enum" in value or "const" in value:
        return " or ".join(f'"{item}"' for item in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return f"list of {kind(value.get('items', {}))}"
    return str(value.get("type", "any"))


def cell(text: str) -> str:
    """Return a text as a table takes it."""
    text = " ".join(text.split())
    for char in r"\|*_<>{":
        text = text.replace(char, "\\" + char)
    return text
