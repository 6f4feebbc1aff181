"""`dovetail chat`: replies as they come, commands, tools, and what goes wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail_server.cli import main as dovetail
from dovetail_server.terminal.chat import COMMANDS
from dovetail_server.testing import ScriptedServer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def talk(talk: Any) -> Any:
    return talk


def test_a_conversation(talk: Any, server: ScriptedServer) -> None:
    """Reasoning, answer and figures are shown, and the next request has what was said."""
    server.reply = "<think>Hm.</think>Paris."
    shown = talk.type("Capital of France?")
    assert "Hm.\n\nParis.\n" in shown
    assert "tokens, the first after" in shown
    server.reply = "Lima."
    talk.type("And of Peru?")
    roles = [message["role"] for message in talk.chat.conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert talk.chat.conversation.messages[1] == {"role": "assistant", "content": "Paris.", "reasoning_content": "Hm."}


def test_ctrl_c_stops_the_reply_only(talk: Any, server: ScriptedServer) -> None:
    """What came is kept, the server stops computing, and the conversation goes on; at the prompt it says how to end."""
    server.reply = "word " * 300
    server.engine.delay_s = 0.02
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    shown = talk.type("Go on")
    assert "word word" in shown
    assert "stopped" in shown
    deadline = time.monotonic() + 120
    while server.engine.live and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.engine.live == []
    server.engine.delay_s, server.reply = 0.0, "More."
    shown = talk.type(KeyboardInterrupt, "Go on")
    assert "Ctrl-D or /quit ends" in shown
    assert "More." in shown


def test_ctrl_c_in_the_middle_of_a_write(talk: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write ends before the reply is stopped, so that what is printed afterwards is seen."""
    server.reply = "word " * 50
    console = talk.chat.screen.console
    leave, writes = console._exit_buffer, iter(range(1000))

    def interrupted() -> None:
        if next(writes) == 10:
            signal.raise_signal(signal.SIGINT)
        leave()

    monkeypatch.setattr(console, "_exit_buffer", interrupted)
    shown = talk.type("Go on", "/help")
    assert "stopped" in shown
    assert "/retry" in shown
    assert console._buffer_index == 0


def test_a_tool_is_called_and_answered(talk: Any, server: ScriptedServer, tmp_path: Path) -> None:
    """A call is shown, its result asked for and sent; without one the call is taken back."""
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "get_weather", "parameters": {"type": "object"}}]')
    server.reply = CALL

    def result() -> str:
        server.reply = "It is 21 degrees."
        return '{"temperature": 21}'

    shown = talk.type(f"/tool {file}", "Weather in Paris?", result)
    assert "Tools: get_weather." in shown
    assert 'calls get_weather({"city": "Paris"})' in shown
    assert "It is 21 degrees." in shown
    assert "get_weather gives back> " in talk.prompts
    assert talk.chat.conversation.messages[2]["role"] == "tool"
    server.reply = CALL
    shown = talk.type("Again?", KeyboardInterrupt, "/retry", KeyboardInterrupt)
    assert shown.count("the call is taken back") == 2
    assert talk.chat.conversation.messages[-1]["role"] == "user"
    assert "There are no tools." in talk.type("/tool off")


def test_schema_system_and_settings(talk: Any, server: ScriptedServer, tmp_path: Path) -> None:
    """Each reaches the request, and can be taken back."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    talk.type(f"/schema {file}", "/system Be brief.", "/set temperature 0.5", "/set seed 3", "/set max_tokens 9")
    talk.chat.conversation.messages.append({"role": "user", "content": "x"})
    body = talk.chat.conversation.body()
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.5, 3, 9)
    talk.type("/schema off", "/system", "/set seed", "/new")
    body = talk.chat.conversation.body()
    assert body == {"model": "scripted", "messages": [], "temperature": 0.5, "max_tokens": 9}


def test_mistakes_are_named(talk: Any, tmp_path: Path) -> None:
    """A wrong command, file or value says what is possible, and nothing is asked."""
    bad = tmp_path / "bad.json"
    bad.write_text("{oops")
    shown = talk.type(
        "/nonsense", "/set warmth 1", "/set seed x", f"/schema {bad}", "/schema /nowhere", "/save", "/retry"
    )
    for part in ("/nonsense: no such command", "'warmth': no such setting", "seed 'x': expected a whole number"):
        assert part in shown
    for part in ("not JSON", "No such file", "/save: expected a file", "nothing was asked yet"):
        assert part in shown
    bad.write_text("[1]")
    assert "expected a function" in talk.type(f"/tool {bad}")
    assert "expected a JSON schema" in talk.type(f"/schema {bad}")


def test_every_command_is_in_the_help(talk: Any) -> None:
    """`/help` names them all."""
    shown = talk.type("/help")
    assert [name for name in COMMANDS if f"/{name} " not in shown] == []
    assert talk.type("/quit", "never typed") == ""


def test_a_conversation_is_saved(talk: Any, server: ScriptedServer, tmp_path: Path) -> None:
    """As a request that can be sent again, or as Markdown."""
    talk.type("Hello", f"/save {tmp_path}/talk.json", f"/save {tmp_path}/talk.md")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["content"] for message in saved["messages"]] == ["Hello", "Hello, world"]
    assert (tmp_path / "talk.md").read_text() == "**User**\n\nHello\n\n**Assistant**\n\nHello, world\n"
    assert "No such file" in talk.type("/save /nowhere/at/all")


def test_a_reply_does_not_reach_the_terminal(talk: Any, server: ScriptedServer) -> None:
    """Escape sequences and what turns the order of text are shown by name."""
    server.reply = "a\x1b]0;title\x07b\u202ec\td"
    shown = talk.type("x")
    assert "a\\u001b]0;title\\u0007b\\u202ec" in shown
    assert "\x1b" not in shown


def test_a_server_that_goes(talk: Any, server: ScriptedServer) -> None:
    """What came is kept and the reason said; a server that is away is said to be, and the question kept."""
    server.reply = "word " * 20
    server.engine.die_after = 30
    shown = talk.type("Go on")
    assert "word word" in shown
    assert "/retry asks again." in shown
    server.close()
    shown = talk.type("Hello?")
    assert "does not answer" in shown
    assert "The question is kept" in shown
    assert talk.chat.conversation.messages[-1] == {"role": "user", "content": "Hello?"}


def test_from_a_pipe(server: ScriptedServer, tmp_path: Path) -> None:
    """Lines of a pipe are asked one after the other; the exit code tells the user's mistakes from the server's."""
    command = [sys.executable, "-m", "dovetail_server", "chat", "--url", server.base]
    done = subprocess.run(command, input="Hi\n/quit\n", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Hello, world\n")
    for argv, code in (
        (["--url", "nonsense"], 2),
        (["--url", "http://127.0.0.1:9"], 1),
        (["--url", server.base, "--name", "x"], 2),
    ):
        assert dovetail(["chat", *argv]) == code


def test_a_model_of_its_own() -> None:
    """Without an address a server is started for the conversation, and ends with it; wrong flags are the user's."""
    command = [sys.executable, "-m", "dovetail_server", "chat"]
    asked = "What is the capital of France?\n"
    wrong = [*command, "--", "--prot", "1"]
    done = subprocess.run(wrong, input=asked, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "did you mean --port" in done.stderr) == (2, True)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "Paris" in done.stdout


def test_in_a_terminal(server: ScriptedServer, tmp_path: Path) -> None:
    """With an editor and a history that only its owner can read; Ctrl-D ends."""
    master, end = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    command = [sys.executable, "-m", "dovetail_server", "chat", "--url", server.base]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True)
    os.close(end)
    try:
        until(master, r"\?2004h")  # the editor has the terminal
        os.write(master, b"Hello\r")
        shown = until(master, r"a second.*\?2004h")
        os.write(master, b"\x04")
        assert "Hello, world" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    history = tmp_path / "dovetail/chat_history"
    assert "+Hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def until(master: int, wanted: str) -> str:
    """Read a terminal until it shows something that a pattern matches."""
    shown = ""
    deadline = time.monotonic() + 120
    while not re.search(wanted, shown, re.DOTALL):
        assert time.monotonic() < deadline, shown
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 4096).decode("utf-8", "replace")
    return shown


def test_a_key_is_sent(
    dovetail_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the flag or the environment; without one the server's reason is shown."""
    server = dovetail_server(api_key=["secret"])
    assert dovetail(["chat", "--url", server.base]) == 1
    assert "needs an API key" in (said := capsys.readouterr().err)
    assert "give --api-key, or set DOVETAIL_API_KEY" in said
    monkeypatch.setenv("DOVETAIL_API_KEY", "secret,other")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert dovetail(["chat", "--url", server.base + "/v1/"]) == 0
