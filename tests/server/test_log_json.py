"""`--log-format json`: every line that any process of a server writes is one JSON object."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from dovetail.base.log_json import JsonFormatter

pytestmark = pytest.mark.usefixtures("light_servers")
PLUGIN = """
import logging, sys, threading, warnings
from dovetail.contracts import SchedulePolicy

class Acme(SchedulePolicy):
    plugin_name = "acme"
    def order(self, waiting, cache):
        return waiting

def write():
    print("plain", "text", file=sys.stderr)
    print("no end of line", end="", file=sys.stderr)
    print("two\\nlines \\ud800 \\x1b[31m", file=sys.stderr)
    warnings.warn("a warning\\nof two lines")
    logging.getLogger("elsewhere").warning("of another library")
    logging.getLogger("dovetail.acme").info("with %s", "extra", extra={"acme": {"deep": [1]}, "level": "mine"})
    logging.getLogger("dovetail.acme").info("wrong %d", "arguments")
    try:
        raise ValueError("first\\nsecond")
    except ValueError:
        logging.getLogger("dovetail.acme").exception("it failed")
    def dies():
        raise RuntimeError("in a thread")
    thread = threading.Thread(target=dies)
    thread.start()
    thread.join()

write()
"""


def lines_of(text: str) -> list[dict[str, Any]]:
    """Read every line."""
    return [json.loads(line) for line in text.splitlines()]


def serve(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a server of the demo model whose two processes write in all the ways that there are."""
    (tmp_path / "acme.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "dovetail_server", "serve", "--plugin-file", str(tmp_path / "acme.py")]
    command += ["--schedule-policy", "acme"]
    return subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)


def test_every_line_of_every_process_is_an_object(tmp_path: Path) -> None:
    """Prints, warnings, other libraries, tracebacks, dying threads, access lines and the start's table."""
    server = serve(tmp_path, "--port", "0", "--log-format", "json", "--log-requests")
    try:
        said = read_until(server, "ready to roll")
        base = re.findall(r"http://127.0.0.1:\d+", said)[0]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert requests.post(f"{base}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert requests.get(f"{base}/v1/models?api_key=sk-1", timeout=60).status_code == 200
        server.send_signal(signal.SIGTERM)
        said += server.communicate(timeout=60)[1]
    finally:
        server.kill()
        server.wait()
    lines = lines_of(said)
    assert {line["process"] for line in lines} >= {"server", "engine"}
    for process in ("server", "engine"):
        own = [line for line in lines if line["process"] == process]
        messages = [line["message"] for line in own]
        assert {"plain text", "of another library", "with extra"} <= set(messages)
        assert any(message.startswith("no end of linetwo") for message in messages)
        assert any("a warning\nof two lines" in line["message"] and line["logger"] == "py.warnings" for line in own)
        (failed,) = [line for line in own if line["message"] == "it failed"]
        assert failed["level"] == "error"
        assert failed["exception"].endswith("ValueError: first\nsecond")
        (thread,) = [line for line in own if "in a thread" in line["message"]]
        assert "Traceback" in thread["exception"]
        (extra,) = [line for line in own if line["message"] == "with extra"]
        assert (extra["acme"], extra["level"]) == ({"deep": [1]}, "info")
    access = [line for line in lines if line["logger"] == "uvicorn.access"]
    assert [(line["method"], line["path"], line["status"]) for line in access] == [
        ("POST", "/v1/chat/completions", 200),
        ("GET", "/v1/models?api_key=***", 200),
    ]
    assert {line["phase"] for line in lines if "phase" in line} >= {"engine", "http", "checks"}


def read_until(server: subprocess.Popen[str], words: str) -> str:
    """Read what a server writes up to these words."""
    assert server.stderr is not None
    said = ""
    while words not in said:
        line = server.stderr.readline()
        assert line, said
        said += line
    return said


def test_a_server_that_cannot_start_says_so_in_an_object(tmp_path: Path) -> None:
    """Once the settings are read; before that, where the environment asks for it."""
    command = [sys.executable, "-m", "dovetail_server", "serve"]
    wrong = [*command, "--log-format", "json", "--model-path", str(tmp_path)]
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert [(line["level"], "config.json" in line["message"]) for line in lines_of(done.stderr)] == [("error", True)]
    environment = {**os.environ, "DOVETAIL_LOG_FORMAT": "json"}
    done = subprocess.run(
        [*command, "--prot", "1"], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert ["--port" in line["message"] for line in lines_of(done.stderr)] == [True]


@pytest.mark.parametrize("value", [float("nan"), object(), "\ud800", "x" * 1_000_000, {1: object()}])
def test_whatever_is_logged_makes_one_line(value: object) -> None:
    """Values that JSON has no word for, half characters and a megabyte."""
    record = logging.makeLogRecord(
        {"name": "dovetail", "msg": "a\n\x00%s\u2028", "args": (value,), "created": time.time()}
    )
    record.given = value
    line = JsonFormatter("test").format(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["process"] == "test"
