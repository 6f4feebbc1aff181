"""Use an installed Dovetail as a newcomer would: its version, its plugins, and a streamed reply of the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

BIN = Path(sys.executable).parent
BODY = {
    "model": "dovetail-demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "stream": True,
    "temperature": 0,
}


def command(*words: str) -> str:
    """Return what a command of Dovetail prints."""
    return subprocess.run([str(BIN / "dovetail"), *words], capture_output=True, text=True, check=True).stdout


def ask(port: int) -> str:
    """Return the reply to one question, streamed."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    text = ""
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text


def main() -> int:
    """Say what was seen, on one line."""
    shown = command("version").split("\n")[0]
    listing = json.loads(command("plugin", "list", "--json"))
    if listing["problems"] or {item["state"] for item in listing["data"]} != {"found"}:
        raise SystemExit(f"plugins: {listing['problems']}")

    from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    start = time.monotonic()
    server, port = launch_server_cmd("dovetail serve")
    try:
        wait_for_server(f"http://127.0.0.1:{port}", timeout=300)
        reply = ask(port)
        seconds = time.monotonic() - start
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
            is_page = b"<html" in page.read()
    finally:
        terminate_process(server)
    if "Paris" not in reply or not is_page:
        raise SystemExit(f"reply: {reply!r}, playground: {is_page}")
    print(f"{shown}, {len(listing['data'])} plugins, first whole reply {seconds:.1f} s after the start: {reply!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
