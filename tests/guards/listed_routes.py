"""What is sent to a server: routes, and the fields of their bodies and queries with types, bounds and defaults."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from schema_lines import field, lines

ROOT = Path(__file__).parents[2]


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document of all routes, as the reference has it."""
    path = ROOT / "docs/reference/routes.py"
    spec = importlib.util.spec_from_file_location("reference_routes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.schema()
    return found


def page() -> Iterator[str]:
    """Yield the lines of routes and of fields."""
    yield "# Routes, with the media type of a body; several with one body name the first"
    yield from routes()
    yield "\n# Routes that the document of the API leaves out"
    yield from others()
    yield "\n# Parameters of paths, queries and headers"
    yield from parameters()
    yield "\n# Fields of bodies: types | bounds = default. `[]`: a list's items, `.*`: any name, `<x>`: that branch"
    yield from fields()


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield method and path of each operation, with it."""
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def bodies() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return of each route with a body the route that is named for it, the media type and the schema."""
    first: dict[str, str] = {}
    found = {}
    for route, operation in operations():
        for media, content in operation.get("requestBody", {}).get("content", {}).items():
            schema = content["schema"]
            found[route] = (first.setdefault(str(schema), route), media, schema)
    return found


def routes() -> Iterator[str]:
    """Yield every route of the API."""
    with_body = bodies()
    for route, _ in operations():
        first, media, _ = with_body.get(route, (route, "no body", {}))
        yield f"route {route}: {media}" + (f", as {first}" if first != route else "")


def others() -> Iterator[str]:
    """Yield the routes of pages, probes and the gateway."""
    from starlette.routing import Route

    from dovetail_server import routes as package
    from dovetail_server.gateway.fan_out import FanOut
    from dovetail_server.http.journal import PATH

    told = {route for route, _ in operations()}
    found = set()
    for module in pkgutil.iter_modules(package.__path__):
        router = getattr(import_module(f"{package.__name__}.{module.name}"), "router", None)
        for route in getattr(router, "routes", ()):
            if isinstance(route, Route):
                found |= {f"{method} {route.path}" for method in route.methods or ()}
    yield from (f"route {route}: not in the document" for route in sorted(found - told))
    yield f"route POST {PATH}: between servers"
    for route in FanOut(SimpleNamespace()).routes():  # type: ignore[arg-type]  # only names are asked of it
        yield f"gateway-route {' '.join(sorted(route.methods or ()))} {route.path}: answered by the gateway itself"


def parameters() -> Iterator[str]:
    """Yield the parameters of each operation."""
    definitions = document()["components"]["schemas"]
    for route, operation in operations():
        for one in operation.get("parameters", ()):
            found: dict[str, list[str]] = {}
            is_required = one.get("required", False) and one["in"] != "path"
            field(one["schema"], "", frozenset(), definitions, found, is_required=is_required)
            for path, texts in found.items():
                yield f"{one['in']} {route} {one['name']}{path}: {' or '.join(texts)}"


def fields() -> Iterator[str]:
    """Yield the fields of each body."""
    definitions = document()["components"]["schemas"]
    for route, (first, _, schema) in bodies().items():
        if route == first:
            name = schema.get("$ref", "").rpartition("/")[2]
            is_closed = definitions.get(name, schema).get("additionalProperties") is False
            yield f"body {route}: {'closed' if is_closed else 'open'}"
            yield from (f"field {route} {path}: {text}" for path, text in lines(schema, definitions))
