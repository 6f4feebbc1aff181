"""What the server tells about itself, and how its log lines look."""

from __future__ import annotations

import io
import logging
import re
import sys
import types

import pytest

from conftest import Harness
from dovetail import log, utils


def test_models(harness: Harness) -> None:
    """Every served name is listed, with OpenAI's fields and the context length."""
    body = harness.get("/v1/models").json()
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["tiny", "tiny-too"]
    model = harness.get("/v1/models/tiny-too").json()
    assert model == body["data"][1]
    assert (model["object"], model["owned_by"], model["max_model_len"]) == ("model", "dovetail", 512)
    assert harness.get("/v1/models/other").status_code == 404


def test_model_and_server_info(harness: Harness) -> None:
    """Both spellings of each route answer alike; settings, engine and load are there."""
    info = harness.get("/get_model_info").json()
    assert info == harness.get("/model_info").json()
    assert info["is_generation"] is True
    assert info["preferred_sampling_params"] == {"temperature": 0.6, "top_k": 20}
    server = harness.get("/get_server_info").json()
    assert server.keys() == harness.get("/server_info").json().keys()
    assert server["port"] == harness.settings.port
    assert server["engine"]["architecture"] == "FakeForCausalLM"
    assert server["internal_states"][0]["num_running"] == 0


def test_openai_sampling_defaults(folder: object, make_harness: object) -> None:
    """`--sampling-defaults openai` leaves the model's generation config aside."""
    harness = make_harness(sampling_defaults="openai")  # type: ignore[operator]
    harness.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert harness.engine.submits[-1].params.temperature == 1.0


def test_flush_cache(harness: Harness) -> None:
    """GET and POST both reach the engine."""
    assert harness.get("/flush_cache").json() == {"ok": True}
    assert harness.post("/flush_cache").json() == {"ok": True}


def test_docs_are_served(harness: Harness) -> None:
    """`/docs` is a page."""
    assert "<html" in harness.get("/docs").text


def test_log_lines_have_the_common_form() -> None:
    """The time stands in brackets; a level is named where it is not plain information."""
    stream = io.StringIO()
    logger = log.setup("info", stream)
    try:
        logger.info("Prefill batch. #new-seq: %d", 1)
        logging.getLogger("dovetail.engine").warning("odd")
        logger.debug("hidden")
    finally:
        logger.handlers.clear()
        logger.propagate = True
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Prefill batch\. #new-seq: 1", first)
    assert second.endswith("] WARNING: odd")


def test_print_highlight_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook text is shown bold, line by line, and only `<strong>` counts as markup."""
    shown: list[str] = []
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    display = types.ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    display.display = shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    utils.print_highlight("<strong>a</strong>\n<script>b</script>")
    assert "<strong>a</strong><br>&lt;script&gt;b&lt;/script&gt;" in shown[0]
