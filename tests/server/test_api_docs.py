"""`docs/api.md` names every route and every field of every body."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from harness import Harness

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text("utf-8")
SECTIONS = {
    "/v1/tokenize": ("Texts and tokens",),
    "/v1/detokenize": ("Texts and tokens",),
    "/v1/chat/completions/render": ("Chat completions",),
    "/v1/completions/render": ("Completions", "Chat completions"),
    "/v1/responses/render": ("Responses",),
    "/v1/messages/render": ("Messages",),
    "/v1/chat/completions": ("Chat completions",),
    "/v1/chat/completions/{completion_id}": ("Chat completions",),
    "/v1/completions": ("Completions", "Chat completions"),
    "/v1/responses": ("Responses",),
    "/v1/responses/input_tokens": ("Responses",),
    "/v1/responses/compact": ("Responses",),
    "/v1/conversations": ("Responses",),
    "/v1/conversations/{conversation_id}": ("Responses",),
    "/v1/conversations/{conversation_id}/items": ("Responses",),
    "/v1/messages": ("Messages",),
    "/v1/messages/count_tokens": ("Messages",),
    "/v1/messages/batches": ("Messages",),
    "/v1/embeddings": ("Embeddings",),
    "/generate": ("Generate", "Completions"),
    "/v1/score": ("Generate", "Rerank, score and classify"),
    "/score": ("Generate", "Rerank, score and classify"),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/classify", "/classify"), ("Rerank, score and classify",)
    ),
    "/tokenize": ("Texts and tokens",),
    "/detokenize": ("Texts and tokens",),
    "/separate_reasoning": ("Texts and tokens",),
    "/parse_function_call": ("Texts and tokens",),
    "/start_profile": ("For operators",),
    "/abort_request": ("For operators",),
}


@pytest.fixture(scope="module")
def document(plain_server: Harness) -> dict[str, Any]:
    found: dict[str, Any] = plain_server.get("/openapi.json").json()
    return found


def section(title: str) -> str:
    """Return a section of the page."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def test_every_route_is_documented(document: dict[str, Any]) -> None:
    """The page names each route with its method."""
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in PAGE, (method, path)


def test_every_field_is_documented(document: dict[str, Any]) -> None:
    """Each field of a body stands in the section of its route, and no JSON body is without a section."""
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body is None or path == "/v1/batches":  # described in docs/batches.md
            continue
        text = "".join(section(title) for title in SECTIONS[path])
        for name in schemas[body["schema"]["$ref"].rsplit("/", 1)[1]]["properties"]:
            assert f"`{name}`" in text, (path, name)
