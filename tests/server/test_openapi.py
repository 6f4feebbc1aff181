"""The OpenAPI document: complete, and without unbounded fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import Harness

ROUTES = {
    "/ping": {"get", "post"},
    "/version": {"get"},
    "/v1/loads": {"get"},
    "/v1/steps": {"get"},
    "/v1/chat/completions/render": {"post"},
    "/v1/completions/render": {"post"},
    "/v1/responses/render": {"post"},
    "/v1/messages/render": {"post"},
    "/abort_request": {"post"},
    "/start_profile": {"post"},
    "/stop_profile": {"post"},
    "/detokenize": {"post"},
    "/flush_cache": {"post"},
    "/generate": {"post"},
    "/get_model_info": {"get"},
    "/get_server_info": {"get"},
    "/health": {"get"},
    "/health_generate": {"get"},
    "/livez": {"get"},
    "/metrics": {"get"},
    "/model_info": {"get"},
    "/readyz": {"get"},
    "/server_info": {"get"},
    "/props": {"get"},
    "/info": {"get"},
    "/tokenize": {"post"},
    "/separate_reasoning": {"post"},
    "/parse_function_call": {"post"},
    "/v1/batches": {"get", "post"},
    "/v1/batches/{batch_id}": {"get"},
    "/v1/batches/{batch_id}/cancel": {"post"},
    "/v1/chat/completions": {"get", "post"},
    "/v1/chat/completions/{completion_id}": {"get", "post", "delete"},
    "/v1/chat/completions/{completion_id}/messages": {"get"},
    "/v1/tokenize": {"post"},
    "/v1/detokenize": {"post"},
    "/tokenizer_info": {"get"},
    "/v1/completions": {"post"},
    "/v1/files": {"get", "post"},
    "/v1/files/{file_id}": {"get", "delete"},
    "/v1/files/{file_id}/content": {"get"},
    "/v1/models": {"get"},
    "/v1/models/{model_id}": {"get", "delete"},
    "/v1/embeddings": {"post"},
    "/v1/messages": {"post"},
    "/v1/messages/count_tokens": {"post"},
    "/v1/messages/batches": {"get", "post"},
    "/v1/messages/batches/{message_batch_id}": {"get", "delete"},
    "/v1/messages/batches/{message_batch_id}/cancel": {"post"},
    "/v1/messages/batches/{message_batch_id}/results": {"get"},
    "/v1/plugins": {"get"},
    "/v1/usage": {"get"},
    "/v1/responses": {"post"},
    "/v1/responses/input_tokens": {"post"},
    "/v1/responses/compact": {"post"},
    "/v1/conversations": {"post"},
    "/v1/conversations/{conversation_id}": {"get", "post", "delete"},
    "/v1/conversations/{conversation_id}/items": {"get", "post"},
    "/v1/conversations/{conversation_id}/items/{item_id}": {"get", "delete"},
    "/v1/score": {"post"},
    "/score": {"post"},
    "/v1/rerank": {"post"},
    "/v2/rerank": {"post"},
    "/rerank": {"post"},
    "/v1/classify": {"post"},
    "/classify": {"post"},
    "/v1/responses/{response_id}": {"get", "delete"},
    "/v1/responses/{response_id}/cancel": {"post"},
    "/v1/responses/{response_id}/input_items": {"get"},
}


@pytest.fixture(scope="module")
def document(plain_server: Harness) -> dict[str, Any]:
    found: dict[str, Any] = plain_server.get("/openapi.json").json()
    return found


def test_every_route_is_deliberate(document: dict[str, Any]) -> None:
    """The documented routes are exactly these."""
    assert {path: set(methods) for path, methods in document["paths"].items()} == ROUTES


def test_bodies_and_replies_are_described(document: dict[str, Any]) -> None:
    """References resolve, and generation routes describe body, reply and stream."""
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        post = document["paths"][path]["post"]
        assert "$ref" in post["requestBody"]["content"]["application/json"]["schema"]
        assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def unbounded(schema: Any, schemas: dict[str, Any], path: str, seen: frozenset[str]) -> Iterator[str]:
    """Yield the paths of fields whose values have no limit."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from unbounded(schemas[name], schemas, path, seen | {name})
        return
    for option in [*schema.get("anyOf", []), *schema.get("oneOf", []), *schema.get("allOf", [])]:
        yield from unbounded(option, schemas, path, seen)
    kind = schema.get("type")
    if kind == "string" and not ({"maxLength", "enum", "const"} & set(schema)):
        yield path
    if kind in {"integer", "number"}:
        has_low = {"minimum", "exclusiveMinimum"} & set(schema)
        has_high = {"maximum", "exclusiveMaximum"} & set(schema)
        if not (has_low and has_high):
            yield path
    if kind == "array":
        if "maxItems" not in schema:
            yield path
        yield from unbounded(schema.get("items", {}), schemas, f"{path}[]", seen)
    if kind == "object":
        for name, field in schema.get("properties", {}).items():
            yield from unbounded(field, schemas, f"{path}.{name}", seen)
        extra = schema.get("additionalProperties")
        if not schema.get("properties") and extra is not False and "maxProperties" not in schema:
            yield path
        if isinstance(extra, dict):
            yield from unbounded(extra, schemas, f"{path}.*", seen)


def test_no_field_of_a_request_is_unbounded(document: dict[str, Any]) -> None:
    """Every string, number, list and mapping that a client sends has a limit, in bodies, paths and queries."""
    schemas = document["components"]["schemas"]
    found = []
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                found += unbounded(parameter["schema"], schemas, f"{path}?{parameter['name']}", frozenset())
            body = operation.get("requestBody")
            if body is not None:
                (content,) = body["content"].values()
                found += unbounded(content["schema"], schemas, path, frozenset())
    assert not found


def test_unknown_fields_are_refused_by_every_body(document: dict[str, Any]) -> None:
    """A body is closed; only messages, their parts and calls pass further fields to the chat template."""
    schemas = document["components"]["schemas"]
    bodies = {
        content["schema"]["$ref"].rsplit("/", 1)[1]
        for methods in document["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
        for content in operation["requestBody"]["content"].values()
    }
    assert all(schemas[name]["additionalProperties"] is False for name in bodies)
