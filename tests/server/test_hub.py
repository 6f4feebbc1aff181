"""Models by name, from a hub that speaks the Hugging Face hub's HTTP API on this machine."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_tiny import write_model

from dovetail.contracts.errors import ModelError
from dovetail.processing.prepare import check_model
from dovetail.runtime.checkpoint import hub
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight

NAME = "acme/tiny"
COMMIT = "a" * 40


class Hub:
    """One model. Switches make it answer as hubs sometimes do."""

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.needs_token = False
        self.is_gated = False
        self.cuts = False
        self.lies = False
        self.tag: str | None = None
        self.media = "application/json"
        self.commit = COMMIT
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.asked.append((request.command, path))
        self.tokens.append(request.headers.get("authorization"))
        if self.is_gated:
            self.refuse(request, 403, "GatedRepo")
        elif self.needs_token and request.headers.get("authorization") != "Bearer hf_right":
            self.refuse(request, 401, "RepoNotFound")
        elif not path.removeprefix("/api/models").lstrip("/").startswith(NAME):
            self.refuse(request, 404, "RepoNotFound")
        elif path.startswith("/api/"):
            self.facts(request, path)
        else:
            self.file(request, path)

    def refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.send(request, status, b"{}", {"x-error-code": code, "content-type": "application/json"})

    def facts(self, request: BaseHTTPRequestHandler, path: str) -> None:
        revision = path.rsplit("/", 1)[1] if "/revision/" in path or "/tree/" in path else "main"
        if revision not in ("main", "v1", COMMIT, self.commit):
            self.refuse(request, 404, "RevisionNotFound")
            return
        rows = [self.entry(name) for name in self.files]
        facts: Any = {"id": NAME, "sha": self.commit, "siblings": [{"rfilename": name} for name in self.files]}
        body = json.dumps(rows if "/tree/" in path else facts).encode()
        self.send(request, 200, body, {"content-type": self.media})

    def entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        row: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(".safetensors"):
            row["lfs"] = {"oid": self.digest(name), "size": len(data), "pointerSize": 100}
        return row

    def digest(self, name: str) -> str:
        return hashlib.sha256(b"another" if self.lies else self.files[name]).hexdigest()

    def file(self, request: BaseHTTPRequestHandler, path: str) -> None:
        name = path.rsplit("/", 1)[1]
        if name not in self.files:
            self.refuse(request, 404, "EntryNotFound")
            return
        data = self.files[name]
        is_big = name.endswith(".safetensors")
        tag = self.digest(name) if is_big else hashlib.sha1(data).hexdigest()
        tag = self.tag or tag
        headers = {"etag": f'"{tag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        if is_big:
            headers |= {"x-linked-etag": f'"{tag}"', "x-linked-size": str(len(data))}
        start = request.headers.get("range", "bytes=0-")[6:].split("-")[0]
        part = data[int(start) :] if request.command == "GET" else data
        status = 206 if int(start) and request.command == "GET" else 200
        if self.cuts and is_big and request.command == "GET":
            headers["connection"] = "close"
            self.send(request, status, part[: len(part) // 2], headers, length=len(part))
            request.close_connection = True
            return
        self.send(request, status, part, headers)

    @staticmethod
    def send(
        request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(body) if length is None else length))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = write_model(tmp_path / "source")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "README.md").write_text("hello")
    running = Hub(folder)
    monkeypatch.setenv("HF_ENDPOINT", running.address)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield running
    running.close()


def fetch(tmp_path: Path, **options: Any) -> Path:
    return hub.fetch(options.pop("name", NAME), cache=tmp_path / "cache", **options)


def test_a_model_is_fetched_once_and_without_what_is_not_read(served: Hub, tmp_path: Path) -> None:
    """Safetensors, configuration and tokenizer come; pickled weights do not; then the cache has it all."""
    folder = fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == served.files["model.safetensors"]
    assert {path.name for path in folder.iterdir()} == set(served.files) - {"pytorch_model.bin", "README.md"}
    served.asked.clear()
    assert fetch(tmp_path) == folder
    assert not [path for method, path in served.asked if method == "GET" and path.endswith((".safetensors", ".json"))]


def test_serve_takes_a_name_for_a_folder(served: Hub, tmp_path: Path) -> None:
    """The settings get the folder, and requests may ask for the model by the name that was typed."""
    asked = ServeSettings(model_path=NAME, revision="v1", download_dir=tmp_path / "cache")
    found = preflight.with_model(asked)
    assert (Path(str(found.model_path)) / "config.json").is_file()
    assert found.served_model_name == [NAME]
    assert check_model(found.model_copy(update={"load_format": "dummy"})).architecture == "Qwen3ForCausalLM"
    named = preflight.with_model(asked.model_copy(update={"served_model_name": ["x"]}))
    assert named.served_model_name == ["x"]


def test_a_tokenizer_by_name_and_dummy_weights_need_no_weights(served: Hub, tmp_path: Path) -> None:
    """Only what is read is fetched."""
    asked = {"model_path": NAME, "tokenizer_path": NAME, "load_format": "dummy", "download_dir": tmp_path / "cache"}
    found = preflight.with_model(ServeSettings(**asked))
    assert found.tokenizer_path == found.model_path
    assert not [path for _, path in served.asked if path.endswith(".safetensors")]


def test_a_download_that_broke_off_goes_on(served: Hub, tmp_path: Path) -> None:
    """Half a file is an error that says what to do, and the next start gets the rest."""
    served.cuts = True
    with pytest.raises(ModelError, match="start again"):
        fetch(tmp_path)
    served.cuts = False
    assert (fetch(tmp_path) / "model.safetensors").read_bytes() == served.files["model.safetensors"]


def test_a_file_that_is_not_what_was_announced_is_removed(served: Hub, tmp_path: Path) -> None:
    """The hash is compared once, when a file has come; a wrong file is not kept."""
    served.lies = True
    with pytest.raises(ModelError, match="not what the hub announced"):
        fetch(tmp_path)
    served.lies = False
    assert (fetch(tmp_path) / "model.safetensors").read_bytes() == served.files["model.safetensors"]


@pytest.mark.parametrize("media", ["application/json", "text/plain"])
@pytest.mark.parametrize("what", ["tag", "commit", "files"])
def test_a_hub_names_no_file_outside_of_the_cache(served: Hub, tmp_path: Path, what: str, media: str) -> None:
    """The library makes paths of a file's ETag, a commit and a list of files: none of them leads out.

    It reads a list whatever its media type is.
    """
    served.media = media
    name = "../../../../escaped"
    if what == "files":
        served.files |= {f"{name}.json": b"{}"}
    else:
        setattr(served, what, name)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    with pytest.raises(ModelError, match=r"model 'acme/tiny': the hub's answer names a file .*escaped"):
        fetch(tmp_path)
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    assert not list(tmp_path.rglob("*escaped*"))
    served.files.pop(f"{name}.json", None)
    served.tag, served.commit = None, COMMIT
    assert fetch(tmp_path).is_dir()


def test_a_token_comes_from_the_environment(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or with a wrong one, a closed model is an error that names the variable."""
    served.needs_token = True
    with pytest.raises(ModelError, match="HF_TOKEN"):
        fetch(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert fetch(tmp_path).is_dir()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"name": "acme/none"}, ["acme/none", "no such folder", "no such model"]),
        ({"revision": "v9"}, ["'v9'", "--revision"]),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    served: Hub, tmp_path: Path, options: dict[str, Any], parts: list[str]
) -> None:
    """The message says what was asked for, where, and what to do."""
    with pytest.raises(ModelError) as caught:
        fetch(tmp_path, **options)
    text = str(caught.value)
    assert all(part in text for part in (*parts, served.address)), text
    assert "\n" not in text


def test_terms_must_be_accepted(served: Hub, tmp_path: Path) -> None:
    """A gated model says so."""
    served.is_gated = True
    with pytest.raises(ModelError, match="terms"):
        fetch(tmp_path)


def test_without_a_hub_the_cache_serves(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched is there offline and when the hub is gone; what was not is one line with the way out."""
    folder = fetch(tmp_path)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        without_hub(tmp_path, folder, monkeypatch)


def without_hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch(tmp_path) == folder
    with pytest.raises(ModelError, match="cannot be reached"):
        fetch(tmp_path, name="acme/other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(tmp_path) == folder
    with pytest.raises(ModelError, match="cannot be reached"):
        fetch(tmp_path, name="acme/other")


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that exists is never looked for anywhere else, nor is what is no name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme/tiny").mkdir(parents=True)
    assert not hub.is_name("acme/tiny")
    assert [hub.is_name(path) for path in ("a/b", "/a/b", "./a", "a/b/c", "a", "~/b", "../b")] == [True, *[False] * 6]


@pytest.mark.parametrize("module", [["dovetail", "serve"], ["dovetail.launch_server"]])
def test_the_peers_ways_to_start_exist(module: list[str]) -> None:
    """`python -m dovetail` is the command, and `python -m dovetail.launch_server` starts a server."""
    done = subprocess.run(
        [sys.executable, "-m", *module, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("usage: dovetail serve")
