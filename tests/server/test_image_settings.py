"""Servers that see little or nothing, and say why: limits, flags, text models, and no Pillow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from harness import Harness
from msgspec.structs import replace
from seeing_server import (
    CAT,
    SeeingHarness,
    ask,
    data_url,
    part,
    png,
    submitted,
    text,
)

from dovetail.plugins.records import PluginState
from dovetail.processing.prepare import prepare
from dovetail_server.media import decode
from dovetail_server.settings.serve import ServeSettings


@pytest.mark.parametrize(("asked", "timed"), [(32, 0), (None, 32), (40, 32)])
def test_an_image_of_too_many_patches(
    asked: int | None, timed: int, seeing_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond `--max-image-patches`, or what an engine has timed, a request gets 400; an image of as many is served."""
    info = FakeEngine.info.fget
    assert info is not None
    monkeypatch.setattr(FakeEngine, "info", property(lambda self: replace(info(self), timed_patches=timed)))
    server = SeeingHarness(seeing_folder, context_len=4096, max_image_patches=asked)
    try:
        assert server.settings.times_images is (asked is None)
        assert server.get("/model_info").json()["max_image_patches"] == timed
        server.engine.script = lambda submit: server.tokenizer.encode("A cat", add_special_tokens=False)
        assert ask(server, part(data_url(png(112, 56)))).status_code == 200
        refused = ask(server, text("What is"), part(data_url(png(140, 56))))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[1]")
        assert "an image of 140 x 56 pixels has 40 patches for this model; possible: 32" in error["message"]
        assert "shrink it to" in error["message"]
    finally:
        server.close()


def test_the_server_says_whether_its_model_sees(server: SeeingHarness, harness: Harness) -> None:
    """How many images a request may have, or why none; llama.cpp's name for it says the same."""
    for each, most, why in ((server, 3, None), (harness, 0, "this model is served for text only")):
        info = each.get("/model_info").json()
        assert (info["max_images"], info["no_images"]) == (most, why)
        assert info["max_image_patches"] == 0  # the scripted engine has no tower
        assert each.get("/props").json()["modalities"]["vision"] is bool(most)
        assert each.state.facts().sees is bool(most)


def test_text_says_nothing_of_images(server: SeeingHarness) -> None:
    """A request without images costs none, and its usage has no word of them."""
    reply = ask(server, text("Hi"))
    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert submitted(server).media == ()


def test_without_processes(make_harness: Callable[..., Harness], seeing_folder: Path) -> None:
    """Nothing decodes in the server's own process: images are then refused, with the flag."""
    harness = SeeingHarness(seeing_folder, body_processes=0)
    try:
        reply = ask(harness, part(CAT))
        assert reply.status_code == 400
        assert "--body-processes" in reply.json()["error"]["message"]
    finally:
        harness.close()


def test_without_pillow(seeing_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Start and request say what to install; texts are served, also those that other processes read."""
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    check_without_pillow(SeeingHarness(seeing_folder, context_len=1 << 20))
    assert "The model sees images" in caplog.text
    assert "dovetail-llm[vision]" in caplog.text


def test_a_pillow_that_cannot_be_imported(
    seeing_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Installed is not importable: the processes that read bodies start all the same."""
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text("raise ImportError('libjpeg is gone')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_without_pillow(SeeingHarness(seeing_folder, context_len=1 << 20))
    assert "requests with images are refused" in capfd.readouterr().err


def check_without_pillow(harness: SeeingHarness) -> None:
    try:
        assert ask(harness, text("word " * 100_000)).status_code == 200
        reply = ask(harness, part(CAT))
        assert reply.status_code == 400, reply.text
        assert "pip install 'dovetail-llm[vision]'" in reply.json()["error"]["message"]
    finally:
        harness.close()


def test_a_model_that_reads_text_only(make_harness: Callable[..., Harness]) -> None:
    """The reason is the model."""
    error = ask(make_harness(), part(CAT)).json()["error"]
    assert (error["param"], "this model is served for text only" in error["message"]) == (
        "messages[0].content[0].type",
        True,
    )


@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("processor", None, "--processor none"),
        ("limit_mm_per_prompt", {"image": 0}, '--limit-mm-per-prompt {"image": 0}'),
    ],
)
def test_a_server_that_was_told_not_to_see(
    flag: str, value: Any, shown: str, make_harness: Callable[..., Harness]
) -> None:
    """The reason is the flag, which whoever started the server may leave out. Nothing is planned for images."""
    server = make_harness(**{flag: value})
    assert server.settings.processor is None
    why = f"this server was started with {shown}"
    assert f"{why}; send text" in ask(server, part(CAT)).json()["error"]["message"]
    assert server.get("/model_info").json()["no_images"] == why


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"body_processes": 0}, "--body-processes 0"),
        ({"limit_mm_per_prompt": {"image": 0}}, '--limit-mm-per-prompt {"image": 0}'),
        ({"processor": None}, ""),
        ({"body_processes": 1}, ""),
    ],
)
def test_no_tower_without_a_decoder(given: dict[str, Any], flag: str) -> None:
    """The plan has a processor, without which no tower is loaded, only where a request may have an image."""
    prepared = prepare(ServeSettings(model_path="demo:digits", **given))
    sees = given == {"body_processes": 1}
    assert bool(prepared.plan.of_kind("processor")) is sees
    assert (prepared.settings.processor, prepared.settings.no_decoder) == (
        "auto" if sees else None,
        f"this server was started with {flag}" if flag else "",
    )
    if "body_processes" in given and not sees:
        states = {record.name: (record.state, record.reason) for record in prepared.registry.of_kind("processor")}
        assert states["qwen3-vl"] == (PluginState.FOUND, prepared.settings.no_decoder)


def test_a_text_model_is_one_without_processes_too() -> None:
    """What is refused there is refused for the model, not for the flag."""
    prepared = prepare(ServeSettings(model_path="demo:chat", body_processes=0))
    assert prepared.settings.processor == "auto"
