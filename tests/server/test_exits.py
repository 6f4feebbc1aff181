"""A plugin that ends the process is named, and the exit code is none of success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("light_servers")
HEAD = """
import os, sys, threading, time
from os import _exit
from dovetail.contracts import hookimpl
"""
START = """
@hookimpl
def dovetail_process_start(ctx):
    {body}
"""
PLUGINS = {
    "os._exit when imported": HEAD + "os._exit(0)\n",
    "os._exit at start": HEAD + START.format(body="os._exit(0)"),
    "_exit at start": HEAD + START.format(body="_exit(0)"),
    "os._exit later": HEAD + START.format(body="threading.Timer(0.2, os._exit, [0]).start(); time.sleep(5)"),
    "sys.exit when imported": HEAD + "sys.exit(0)\n",
    "sys.exit at start": HEAD + START.format(body="sys.exit(0)"),
}
NAMED = "the process was ended by os._exit(0) in {file}, line "
SAID = {
    "os._exit when imported": NAMED + "5, <module>; running then: ",
    "os._exit at start": NAMED + "8, dovetail_process_start; running then: ",
    "_exit at start": NAMED + "8, dovetail_process_start; running then: ",
    "os._exit later": "the process was ended by os._exit(0) in ",
    "sys.exit when imported": "raised SystemExit: 0",
    "sys.exit at start": "dovetail_process_start raised SystemExit: 0",
}


def serve(tmp_path: Path, source: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    file = tmp_path / "ending.py"
    file.write_text(source)
    argv = [sys.executable, "-m", "dovetail_server", "--port", "0", "--plugin-file", str(file)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120), file


FEW = ("os._exit at start", "os._exit later", "sys.exit when imported")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in PLUGINS]
)
def test_a_plugin_cannot_end_the_server_unseen(name: str, tmp_path: Path) -> None:
    """Whichever way it takes, `serve` ends with an error's exit code and a line that says where."""
    ended, file = serve(tmp_path, PLUGINS[name])
    assert ended.returncode in (1, 2), ended.stderr
    assert SAID[name].format(file=file) in ended.stderr
    if "at start" in name and "os._exit" in name:
        assert "dovetail_process_start" in ended.stderr.rpartition("running then: ")[2]


@pytest.mark.parametrize("status", [0, 3])
def test_children_and_other_codes_end_as_ever(status: int) -> None:
    """The child of a fork may end by `os._exit`; a code that is an error's stays."""
    code = (
        "import os\n"
        "from dovetail.plugins.exits import name_exits\n"
        "name_exits()\n"
        "if (pid := os.fork()) == 0:\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        f"os._exit({status})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == (status or 1)
    assert ended.stderr.count("the process was ended by") == 1


@pytest.mark.parametrize("way", ["_exit", pytest.param("exit", marks=pytest.mark.full)])
def test_an_end_by_c_code_is_in_the_log(way: str) -> None:
    """Nothing in the process can say so: its engine does, and ends."""
    code = (
        "import ctypes, os, socket, subprocess, sys, tempfile\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    path = os.path.join(folder, 'engine.sock')\n"
        "    wire = socket.socket(socket.AF_UNIX); wire.bind(path); wire.listen()\n"
        "    engine = subprocess.Popen([sys.executable, '-m', 'dovetail_server.supervision.engine_main', path])\n"
        "    end, _ = wire.accept()\n"
        f"ctypes.CDLL(None).{way}(0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "has ended without stopping it" in ended.stderr  # read to the end: the engine had it open
