"""Helpers for notebooks and scripts that start a server beside themselves, under the names SGLang uses."""

from __future__ import annotations

import atexit
import contextlib
import html
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

_running: set[subprocess.Popen[bytes]] = set()
"""Everything started here, so that nothing outlives this process."""
_launched: dict[int, subprocess.Popen[bytes]] = {}
"""Servers started here by port, so that waiting for one notices its death."""


def execute_shell_command(command: str) -> subprocess.Popen[bytes]:
    """Start a command in the background and return its process; it is ended when this process ends.

    The command is split as a shell would, backslash-newlines included, but no shell runs it. `python`, `python3` and
    `dovetail` mean those of the running environment.
    """
    parts = shlex.split(command.replace("\\\n", " "))
    if not parts:
        raise ValueError("the command is empty; give for example 'dovetail serve'")
    beside = Path(sys.executable).with_name("dovetail")
    if parts[0] in {"python", "python3"}:
        parts[0] = sys.executable
    elif parts[0] == "dovetail" and beside.exists():
        parts[0] = str(beside)
    process = subprocess.Popen(parts, start_new_session=True)
    _running.add(process)
    if (port := _port_of(parts)) is not None:
        _launched[port] = process
    return process


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server command on a free port, or on `port`, or on the one the command names.

    Args:
        command: Such as `dovetail serve --model-path … --host 0.0.0.0`; `--port` is appended unless it is there.
        host: Address on which the free port is looked for.
        port: Port to use instead of a free one.

    Returns:
        The process and its port. `wait_for_server` tells when it is ready.
    """
    given = _port_of(shlex.split(command.replace("\\\n", " ")))
    if given is not None:
        return execute_shell_command(command), given
    chosen = _free_port(host) if port is None else port
    return execute_shell_command(f"{command.strip()} --port {chosen}"), chosen


def wait_for_server(base_url: str, timeout: float | None = None, *, api_key: str | None = None) -> None:
    """Return once the server answers `GET /v1/models`.

    Args:
        base_url: Such as `http://localhost:30000`.
        timeout: Seconds to wait; None waits as long as the server process lives.
        api_key: What the server asks for, if it asks for one.

    Raises:
        TimeoutError: It was not ready in time.
        RuntimeError: It was started here and has ended.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    process = _launched.get(urlsplit(base_url).port or 80)
    while True:
        if _answers(f"{base_url.rstrip('/')}/v1/models", api_key):
            return
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}; its last lines say why")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"no answer from {base_url} within {timeout} s; is it the right address?")
        time.sleep(0.1)


def terminate_process(process: subprocess.Popen[bytes], timeout: float = 10.0) -> None:
    """End a process started here, with its children: politely, and by force after `timeout` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            process.wait()
    _running.discard(process)
    for port in [port for port, known in _launched.items() if known is process]:
        del _launched[port]


@atexit.register
def _terminate_all() -> None:
    """End what is still running when this process ends."""
    for process in list(_running):
        terminate_process(process)


def print_highlight(content: object) -> None:
    """Print a value; in a notebook, in bold blue, with line breaks kept and nothing but `<strong>` taken as markup."""
    text = str(content)
    shell = sys.modules.get("IPython")
    if shell is None or shell.get_ipython() is None:
        print(text)
        return
    from IPython.display import HTML, display

    safe = re.sub(r"&lt;(/?strong)&gt;", r"<\1>", html.escape(text)).replace("\n", "<br>")
    display(HTML(f'<strong style="color: #00008B">{safe}</strong>'))


def _answers(url: str, api_key: str | None) -> bool:
    """Tell whether a GET gives 200."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _port_of(parts: list[str]) -> int | None:
    """Return the port that a split command names, or None."""
    for i, part in enumerate(parts):
        value = (
            part[7:] if part.startswith("--port=") else parts[i + 1] if part == "--port" and i + 1 < len(parts) else ""
        )
        if value.isdigit():
            return int(value)
    return None


def _free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything in its session at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
