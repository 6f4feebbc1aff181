"""What a server answers to the requests of `bodies.py`: `python tests/guards/answers.py`.

Prints each request's name with its answer: status, code, field and message of a refusal; of a success the status, a
digest of what the engine was asked, and one of the reply. Identifiers and times are left out. The application is called
in this process, over the scripted engine. `answers.json` keeps a digest of the answers of each route.

`--changed [REV]` prints the answers that differ from those of another commit (of the branch's base if not given), which
it asks in a copy of that commit. `--write` records the digests, which signs what changed: say it in a fragment of
`docs/changelog.d` as well.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parent))

from bodies import Asked, all_requests
from exchanges import steady
from harness import Harness
from revisions import show_changes
from server_tiny import write_model

from dovetail.plugins import Registry, make_plan
from dovetail.processing.processor import Processor
from dovetail.runtime.checkpoint.folder import ModelFolder

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("answers.json")
FEW = 12
"""One request in so many is asked by `make test`."""
MESSAGE = " message="
MOST_LEN = 400
"""Of an answer; some name what was sent."""
LIMIT_S = 60.0
REPLY = "Hi"
OF_THE_REQUEST = ("rid", "handle")
"""Parts of a submission that are made anew each time."""


class InProcess(Harness):
    """The application of a server without a socket, on a loop of its own."""

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def make_ready(self) -> None:
        """Take requests, with a grammar backend and the parsers of a Qwen3 model."""
        plan = make_plan(Registry.scan(), reasoning_parser="qwen3", tool_parser="hermes", grammar_backend="llguidance")
        self.tools = Processor.load(self.settings, plan, ModelFolder(self.settings.folder, weights=False))
        super().make_ready()

    def close(self) -> None:
        """End what runs, and the loop."""

        async def end() -> None:
            await self.state.storage.close()
            await asyncio.to_thread(self.state.close_children)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(LIMIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        self.loop.close()
        self.listener.close()
        self.http.close()

    def answer(self, requests: Iterable[Asked]) -> dict[str, str]:
        """Ask one after the other."""

        async def each() -> dict[str, str]:
            app = self.server.config.app
            return {asked.name: await asyncio.wait_for(self._one(app, asked), LIMIT_S) for asked in requests}

        return asyncio.run_coroutine_threadsafe(each(), self.loop).result()

    async def _one(self, app: Any, asked: Asked) -> str:
        self.engine.submits.clear()
        path, _, query = asked.path.partition("?")
        given = dict(asked.headers)
        headers = {"host": "localhost", "content-length": str(len(asked.body)), **given}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": asked.method,
            "scheme": "http", "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": "", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        bodies = [{"type": "http.request", "body": asked.body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if bodies:
                return bodies.pop()
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        status = next(message["status"] for message in sent if message["type"] == "http.response.start")
        reply = b"".join(message.get("body", b"") for message in sent)
        text = reply.decode(errors="replace").replace(self.settings.model_path, "<folder>")
        return told(status, steady(text), self.engine.submits)


def told(status: int, reply: str, submits: list[Any]) -> str:
    """Return an answer as one line."""
    if status < 400:
        return f"{status} asked {digest(map(plain, submits))} said {digest([reply])}"
    try:
        error = json.loads(reply)["error"]
        words = [f"{name}={error[name]}" for name in ("code", "type", "param", "message") if name in error]
        return " ".join([str(status), *words])[:MOST_LEN]
    except (ValueError, TypeError, KeyError):
        return f"{status} {reply}"


def plain(submit: Any) -> str:
    """Return a submission as text, without what is made anew each time."""
    values = msgspec.to_builtins(submit)
    return json.dumps({name: value for name, value in values.items() if name not in OF_THE_REQUEST}, sort_keys=True)


def digest(lines: Iterable[str]) -> str:
    """Return a short digest of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def is_one_of_few(name: str) -> bool:
    """Return whether `make test` asks it, too."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % FEW == 0


def answers(folder: Path, *, only_few: bool = False) -> dict[str, str]:
    """Return the answers of this tree; the server keeps its model and its files in a folder."""
    server = InProcess(write_model(folder / "tiny"), body_processes=0, min_free_disk_bytes=0)
    server.text, server.engine.per_delta = REPLY, 1000
    try:
        return server.answer(one for one in all_requests() if not only_few or is_one_of_few(one.name))
    finally:
        server.close()


def by_route(found: dict[str, str]) -> dict[str, list[str]]:
    """Return two digests of each route's answers: of what is answered, and of the messages of its refusals."""
    lines: dict[str, tuple[list[str], list[str]]] = {}
    for name, answer in found.items():
        answers, messages = lines.setdefault(" ".join(name.split()[:2]), ([], []))
        what, _, message = answer.partition(MESSAGE)
        answers.append(f"{name} -> {what}")
        messages.append(f"{name} -> {message}")
    return {route: [digest(answers), digest(messages)] for route, (answers, messages) in lines.items()}


def environment() -> dict[str, str]:
    """Return the versions that messages depend on."""
    import pydantic

    return {"python": ".".join(platform.python_version_tuple()[:2]), "pydantic": pydantic.VERSION}


def main() -> int:
    """Print the answers, or what differs, or record them; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", nargs="?", const="", metavar="REV", help="print what differs from a commit")
    parser.add_argument("--write", action="store_true", help="record the digests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = answers(Path(folder))
    if args.write:
        few = {name: answer for name, answer in found.items() if is_one_of_few(name)}
        record = {"environment": environment(), "num": len(found), "all": by_route(found), "few": by_route(few)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        return 0
    lines = [f"{name} -> {answer}" for name, answer in found.items()]
    if args.changed is None:
        print("\n".join(lines))
        return 0
    return show_changes(args.changed, [Path(__file__).name], lines)


if __name__ == "__main__":
    sys.exit(main())
