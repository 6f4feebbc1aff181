"""`dovetail.utils`: starting a server from a script or notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail import utils

SERVER = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


def test_launch_wait_terminate(script: Path) -> None:
    """A command gets a free port, is waited for, and is ended."""
    process, port = utils.launch_server_cmd(f"\npython3 {script} \\\n--host 0.0.0.0\n")
    try:
        utils.wait_for_server(f"http://localhost:{port}", timeout=20)
    finally:
        utils.terminate_process(process)
    assert process.poll() is not None
    assert process.args[-2:] == ["--port", str(port)]  # type: ignore[index]
    assert process.args[0] == sys.executable  # type: ignore[index]


def test_a_given_port_is_kept(script: Path) -> None:
    """`--port` in the command is not given twice."""
    process, port = utils.launch_server_cmd(f"python {script} --port 45123")
    utils.terminate_process(process)
    assert port == 45123
    assert process.args.count("--port") == 1  # type: ignore[union-attr]


def test_waiting_for_a_dead_server_fails_at_once(tmp_path: Path) -> None:
    """A server that ends while starting is noticed, whatever the timeout."""
    process, port = utils.launch_server_cmd(f"python3 {tmp_path}/missing.py")
    with pytest.raises(RuntimeError, match="exit code 2"):
        utils.wait_for_server(f"http://localhost:{port}", timeout=60)
    utils.terminate_process(process)


def test_waiting_has_a_timeout() -> None:
    """Nobody there is a `TimeoutError` that names the address."""
    with pytest.raises(TimeoutError, match="localhost:9"):
        utils.wait_for_server("http://localhost:9", timeout=0.1)


def test_print_highlight_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Outside a notebook it is `print`."""
    utils.print_highlight({"a": 1})
    assert capsys.readouterr().out == "{'a': 1}\n"
    with pytest.raises(ValueError, match="empty"):
        utils.execute_shell_command("  ")
