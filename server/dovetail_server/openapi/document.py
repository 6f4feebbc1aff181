"""JSON routes whose bodies and replies stand in the OpenAPI document, though FastAPI parses neither.

FastAPI would decode bodies leniently and serialise replies slowly; `json_route` registers the schemas and leaves the
work to `reading/` and msgspec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dovetail_server.errors.body import ErrorBody
from dovetail_server.openapi.examples import add_examples
from dovetail_server.state import get_free_state

REF = "#/components/schemas/"
F = TypeVar("F", bound=Callable[..., Any])
PLACES: dict[str, Literal["prefix", "any"]] = {}
"""Where a gateway sends what comes on a path: see `contracts.api.Route`."""
_bodies: dict[str, type[BaseModel]] = {}
_replies: dict[str, type[msgspec.Struct]] = {}


def component(model: type) -> str:
    """Return the name of a schema in the document: a package's own bear its module's, so that none replaces another."""
    return _prefix(model) + model.__name__


def _prefix(model: type) -> str:
    return "" if model.__module__.startswith("dovetail_server.") else f"{model.__module__}."


def failures(error: type[msgspec.Struct] | None = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Return `responses` for all errors of a route, whose body is `error`, or of a form that is not described."""
    schema = {}
    if error is not None:
        _replies[component(error)] = error
        schema = {"$ref": REF + component(error)}
    failure = {"description": "Error", "content": {"application/json": {"schema": schema}}}
    return {"4XX": failure, "5XX": failure}


def body_models() -> list[type[BaseModel]]:
    """Return the models of all bodies and forms that routes were registered with so far."""
    return list(_bodies.values())


FAILURES = failures()
"""`responses` of a route that is registered without `json_route`."""


def json_route(
    router: APIRouter,
    path: str,
    *,
    body: type[BaseModel] | None = None,
    form: type[BaseModel] | None = None,
    reply: type[msgspec.Struct] | None = None,
    other_reply: type[msgspec.Struct] | None = None,
    may_list: bool = False,
    streams: bool = False,
    follows: bool = False,
    error: type[msgspec.Struct] | None = ErrorBody,
    methods: tuple[str, ...] = ("POST",),
    tags: tuple[str, ...] = (),
    place: Literal["prefix", "any"] | None = None,
) -> Callable[[F], F]:
    """Register a route with the schemas of its body or multipart form, and of its reply.

    `other_reply` is what clients of another API get. One that `may_list` answers several prompts or choices with a list
    of replies. One that `streams` generates: when the queue is full it answers 429 before it reads the body; one that
    `follows` streams what was begun elsewhere. Errors have the body `error`, as of `failures`. `place` is as of
    `contracts.api.Route`, for a route whose body a gateway may hold; None: it is passed on piece by piece.
    """
    if place is not None:
        PLACES[path] = place
    extra: dict[str, Any] = {}
    content: dict[str, Any] = {"application/json": {}}
    for kind, model in (("application/json", body), ("multipart/form-data", form)):
        if model is not None:
            _bodies[component(model)] = model
            schema = {"schema": {"$ref": REF + component(model)}}
            extra["requestBody"] = {"required": True, "content": {kind: schema}}
    if reply is not None:
        _replies[component(reply)] = reply
        one = {"$ref": REF + component(reply)}
        forms: list[dict[str, Any]] = [one]
        if may_list:
            forms.append({"type": "array", "items": one})
        if other_reply is not None:
            _replies[component(other_reply)] = other_reply
            forms.append({"$ref": REF + component(other_reply)})
        content["application/json"] = {"schema": one if len(forms) == 1 else {"anyOf": forms}}
    if streams or follows:
        content["text/event-stream"] = {}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "OK", "content": content}, **failures(error)}

    def register(function: F) -> F:
        router.add_api_route(
            path,
            function,
            methods=list(methods),
            responses=responses,
            openapi_extra=extra or None,
            dependencies=[Depends(get_free_state)] if streams else None,
            response_model=None,
            tags=list(tags),
            summary=(function.__doc__ or "").split("\n")[0],
        )
        return function

    return register


def complete(document: dict[str, Any], *, model: str, needs_key: bool, unlocked: frozenset[str]) -> dict[str, Any]:
    """Add the schemas of all registered bodies and replies, examples, and how to show a key.

    Args:
        document: FastAPI's.
        model: What examples name.
        needs_key: Whether the server asks for a key.
        unlocked: Paths that answer without one.
    """
    components: dict[str, Any] = document.setdefault("components", {})
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    for prefix in dict.fromkeys(map(_prefix, _bodies.values())):
        inputs: list[tuple[type[BaseModel], Any]] = [
            (body, "validation") for body in _bodies.values() if _prefix(body) == prefix
        ]
        _, definitions = models_json_schema(inputs, ref_template=f"{REF}{prefix}{{model}}")
        schemas |= {prefix + name: schema for name, schema in definitions["$defs"].items()}
    for prefix in dict.fromkeys(map(_prefix, _replies.values())):
        replies = [reply for reply in _replies.values() if _prefix(reply) == prefix]
        _, found = msgspec.json.schema_components(replies, ref_template=f"{REF}{prefix}{{name}}")
        schemas |= {prefix + name: schema for name, schema in found.items()}
    add_examples(document, model)
    if needs_key:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
        for path in unlocked & set(document["paths"]):
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document
