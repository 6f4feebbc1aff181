"""`/v1/embeddings`: a generative model says that it gives none."""

from __future__ import annotations

from typing import Any

import pytest
from exchanges import error_of

from conftest import Harness


@pytest.mark.parametrize("given", ["a", ["a", "b"], [1, 2], [[1], [2]]])
def test_a_generative_model_gives_no_embeddings(harness: Harness, given: Any) -> None:
    """Every form of a well-formed request is refused with a code of its own and what to do; nothing is generated."""
    reply = harness.post("/v1/embeddings", {"model": "tiny", "input": given, "encoding_format": "base64"})
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported_model", "model")
    assert "embedding model" in error["message"]
    assert harness.engine.submits == []


def test_other_mistakes_come_first(harness: Harness) -> None:
    """An unknown model is a 404, and a body that is wrong in itself is told so."""
    assert harness.post("/v1/embeddings", {"model": "x", "input": "a"}).status_code == 404
    assert error_of(harness.post("/v1/embeddings", {"model": "tiny"}))["param"] == "input"
    assert error_of(harness.post("/v1/embeddings", {"model": "tiny", "input": []}))["param"] == "input"
    bad = {"model": "tiny", "input": "a", "encoding_format": "hex"}
    assert error_of(harness.post("/v1/embeddings", bad))["param"] == "encoding_format"
