"""What a package's API does behind a gateway, or in it, costs its own request; its routes are placed and resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hostile_api
import pytest
from gateway_process import Served

from dovetail_server.cli import gateway

pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
SAY, ANY = "/bad/say", "/bad/any"
FLAGS = ("--apis", "openai,hostile", "--resume-key", "again")
SLOW = ("sleep", "loop")
WHO = "api 'hostile' of hostile 1.0: "


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, list[Served]]]:
    """`dovetail gateway` in front of two servers; in the gateway alone errors make `failed` raise."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "site").mkdir()
    own = ("--num-threads", "1", "--device", "cpu")
    with pytest.MonkeyPatch.context() as patched:
        added = hostile_api.install(folder / "site")
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, (added, os.environ.get("PYTHONPATH")))))
        flags = [("--file-storage-path", str(folder / f"files-{n}")) for n in range(2)]
        servers = [Served(folder, "serve", *FLAGS, *own, *each, key=None) for each in flags]
        try:
            named = [flag for server in servers for flag in ("--worker", server.wait().base)]
            patched.setenv("HOSTILE", "failed=raise,ends=raise")
            front = Served(folder, "gateway", *FLAGS, *named, key=None)
            try:
                front.wait().until(lambda: all(worker["ready"] for worker in front.workers()))
                yield front, servers
            finally:
                front.close()
        finally:
            for server in servers:
                server.close()


def wishes() -> Iterator[tuple[str, dict[str, Any], str]]:
    """A path, what is sent there, and what the reply says."""
    for place, what in (
        *((place, what) for place in ("open", "step", "close", "whole") for what in ("raise", "none", "text", "huge")),
        *((place, "sleep") for place in ("read", "init", "step")),
        ("read", "loop"),  # each takes 3 s of a core
        *((place, what) for place in ("read", "init", "step", "whole") for what in ("raise", "exit", "interrupt")),
    ):
        said = {
            "none": "returned NoneType",
            "text": "returned str",
            "huge": "bytes at once; possible: ",
            "raise": "Key",
        }
        said |= dict.fromkeys(SLOW, "did not end within 3 s") | {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}
        yield SAY if what != "huge" else ANY, {"do": {place: what}, "stream": place != "whole"}, said[what]
    for what, said_there in {
        **dict.fromkeys(SLOW, "show() did not end within 3 s"),
        "huge text": "bytes at once",
    }.items():
        yield "/bad/show", {"show": what}, said_there


@pytest.mark.full
def test_none_of_it_holds_the_gateway_up(fleet: tuple[Served, list[Served]]) -> None:
    """Each ends by an error that names the package; the gateway answers others, and no process ends."""
    front, servers = fleet
    with ThreadPoolExecutor(1) as pool:
        for path, body, said in wishes():
            asked, meanwhile = pool.submit(front.post, path, body), 0
            while not asked.done():
                assert front.get("/livez").status_code == 200
                meanwhile += not asked.done()
                time.sleep(0.05)
            reply = asked.result()
            assert reply.status_code == (200 if body.get("do", {}).keys() == {"close"} else 500), (body, reply.text)
            assert WHO in reply.text, body
            assert said in reply.text, body
            assert meanwhile > 1 or "did not end within" not in said, body
    assert front.post(SAY, {}).status_code == 200
    assert [each.process.poll() for each in (front, *servers)] == [None] * 3


@pytest.mark.full
def test_it_is_placed_and_goes_on_elsewhere(fleet: tuple[Served, list[Served]]) -> None:
    """Where its route says so; the stream of a server that is killed says what it would have said.

    The last of this file: behind it no server is left, and what the gateway then says is its own, as the package's
    `failed` raises there.
    """
    front, servers = fleet
    before = front.num_placed()
    assert front.post(ANY, {}).status_code == 200
    assert front.num_placed() == before
    assert front.post(SAY, {}).status_code == 200
    assert front.num_placed() == before + 1
    story = {"ask": "Tell me a long story.", "most": 1500, "stream": True}
    expected = front.post(SAY, story).text
    with front.post(SAY, story, stream=True) as reply:
        pieces = reply.iter_content(None)
        text = next(pieces)
        busiest = max(front.workers(), key=lambda worker: int(worker["num_running"]))["number"]
        servers[busiest].process.kill()
        text += b"".join(pieces)
    assert joined(text.decode()) == joined(expected)
    assert "Moved a stream of worker DP" in front.text()


def joined(events: str) -> str:
    assert events.endswith("data: end\n\n")
    return "".join(event.removeprefix('data: "').removesuffix('"') for event in events.split("\n\n")[:-2])


@pytest.mark.first(2)
@pytest.mark.parametrize("path", ["/v1/workers", "/loads", "/v1/usage", "/v1/loads"])
def test_an_api_replaces_nothing_of_the_gateway(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A path of its own, and of every server's, is refused by name in one line."""
    for folder in hostile_api.install(tmp_path).split(os.pathsep):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("GRAB", path)
    assert gateway.main(["--worker", "http://127.0.0.1:1", "--apis", "openai,grabbing", "--port", "0"]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert said[-1].startswith("dovetail gateway: error: api 'grabbing' of grabbing 1.0 brings the path ")
    assert not any("Unclosed" in line for line in said)
