"""`/docs`: works without any other machine, and offers examples."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness

from dovetail_server.openapi.examples import BODIES
from dovetail_server.routes.docs import ASSETS


def test_the_page_loads_nothing_from_elsewhere(harness: Harness) -> None:
    """All that the page names is served here, and its policy forbids the rest, scripts in the page too."""
    page = harness.get("/docs")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    start = harness.get("/docs/start.js").text
    assert not re.search(r"https?:|//[a-z]", page.text + start)
    assert "<script>" not in page.text
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {name.removeprefix("docs/") for name in named} == {*ASSETS, "start.js"}
    for name in named:
        reply = harness.get(f"/{name}")
        assert reply.status_code == 200
        assert reply.headers["content-type"].split(";")[0] in {"text/javascript", "text/css", "image/png"}
    assert "SwaggerUIBundle" in harness.get("/docs/swagger-ui-bundle.js").text
    assert 'url: "openapi.json"' in start


def test_assets_are_asked_for_once(harness: Harness) -> None:
    """A browser that has the file gets a 304."""
    first = harness.get("/docs/swagger-ui.css")
    again = harness.get("/docs/swagger-ui.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["../app.py", "..%2fmain.py", "main.py", "__init__.py", "swagger-ui-bundle.js/x"])
def test_only_the_assets_are_served(harness: Harness, name: str) -> None:
    """The package's other files are not reachable."""
    assert harness.get(f"/docs/{name}").status_code == 404


def test_examples_stand_in_the_document(harness: Harness) -> None:
    """Each route with a JSON body has examples, unless its address names what a user made; they name the model."""
    document = harness.get("/openapi.json").json()
    with_body = {
        path
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if "application/json" in operation.get("requestBody", {}).get("content", {}) and "{" not in path
    }
    assert with_body <= set(BODIES), "a route without an example"
    text = str([document["paths"][path]["post"]["requestBody"]["content"]["application/json"] for path in BODIES])
    assert "$model" not in text
    assert "'model': 'tiny'" in text


def test_the_document_says_how_to_show_a_key(harness: Harness, make_harness: Callable[..., Harness]) -> None:
    """With keys there are security schemes for all routes but /livez; without there are none."""
    assert "securitySchemes" not in harness.get("/openapi.json").json()["components"]
    keyed = make_harness(api_key=["secret"])
    document: dict[str, Any] = keyed.get("/openapi.json", headers={"x-api-key": "secret"}).json()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"]
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in document["paths"]["/generate"]["post"]
