"""Whole starts of `dovetail serve` with a model's files, over a scripted engine, and a few chats behind each."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests
from serving import wait_ready

CHATS = ["What is the capital of France?", "a" * 1900 + "b", "élève 中文 \U0001f600 <b>www.example.com</b>" * 20]
ANSWERED = {200, 400, 500, 503}
READY_S = 60


def serve(folder: str, port_file: Path, report: Path) -> int:
    """Be the server, and write down its longest callback and its memory at the end."""
    from serving_engine import ScriptedProcess

    from dovetail_server.cli import serve as cli
    from dovetail_server.start import preflight, run

    longest, loop_thread, plain = [0.0, ""], threading.get_ident(), asyncio.events.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began = time.thread_time()
        plain(self)
        if threading.get_ident() == loop_thread and (took := time.thread_time() - began) > longest[0]:
            longest[:] = took, repr(self)[:300]

    listener = preflight.bind("127.0.0.1", 0)
    port_file.write_text(str(listener.getsockname()[1]))
    preflight.bind = lambda host, port: listener
    run.new_event_loop = asyncio.new_event_loop  # whose callbacks can be timed
    run.make_engine = lambda settings, plan: ScriptedProcess(run.engine_settings(settings), plan, 1e-4)
    flags = ["--model-path", folder, "--load-format", "dummy", "--device", "cpu", "--log-level", "error"]
    flags += ["--file-storage-path", str(port_file.parent / "files"), "--min-free-disk-bytes", "0"]
    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    try:
        return cli.main(flags)
    finally:
        peak = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        report.write_text(json.dumps({"longest_s": longest[0], "callback": longest[1], "grown_mib": max(peak)}))


def start(folder: Path) -> dict[str, Any]:
    """Start a server, chat with it, and end it; returns what became of it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        port_file, report = Path(scratch) / "port", Path(scratch) / "report"
        command = [sys.executable, "-m", __spec__.name, str(folder), str(port_file), str(report)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        with (Path(scratch) / "errors").open("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=scratch, env=environment)
            try:
                port = wait_ready(process, port_file)
            except RuntimeError:
                process.kill()
                code = process.wait(60)
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                return {"refused": lines[0]} if code == 2 and len(lines) == 1 else {"traceback": f"{code}: {lines}"}
            statuses = [_chat(port, text) for text in CHATS]
            process.terminate()
            code = process.wait(60)
        if code or not ANSWERED.issuperset(statuses):
            return {"traceback": f"exit code {code}, answers {statuses}"}
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def _chat(port: int, text: str) -> int:
    """Send a chat, with a look at `/livez` meanwhile; returns the status, or 0 where the server stood still."""
    base = f"http://127.0.0.1:{port}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    statuses: list[int] = []

    def post() -> None:
        statuses.append(requests.post(f"{base}/v1/chat/completions", json=body, timeout=90).status_code)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        while thread.is_alive():
            requests.get(f"{base}/livez", timeout=5)
            thread.join(0.2)
    except requests.RequestException:
        return 0
    return statuses[0] if statuses else 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
