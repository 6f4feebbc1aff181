"""Coding agents as their registries have them finish a task: they read a file, change it, read it again and answer.

Only the model's tokens are scripted: everything else is a `dovetail serve`. Each agent runs in a home of its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents import MODEL, ScriptedServer, call, from_npm, from_pypi, run

pytestmark = [pytest.mark.full, pytest.mark.registry, pytest.mark.timeout(900)]
TASK = "Fix the typo in greet.py"
BEFORE, AFTER = 'def greet():\n    return "Helo"\n', 'def greet():\n    return "Hello"\n'
DONE = "The greeting is fixed."
KEY = "none"
Rules = list[dict[str, Any]]


@contextmanager
def serving(tmp_path: Path, rules: Rules) -> Iterator[tuple[ScriptedServer, Path]]:
    """A server with the rules, and the folder of the task."""
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "greet.py").write_text(BEFORE)
    server = ScriptedServer(tmp_path, rules)
    try:
        yield server.wait(), folder
    finally:
        server.close()


def steps(read: str, edit: str, *, tool: str) -> Rules:
    """Read, edit, read, answer; a request without the tool (for a title) gets one."""
    return [
        {"lacks": [f'"name": "{tool}"'], "say": "Fix the greeting"},
        {"results": 0, "say": f"I look at it.\n{read}"},
        {"results": 1, "say": edit},
        {"results": 2, "say": read},
        {"results": 3, "say": DONE},
    ]


def check(server: ScriptedServer, folder: Path, said: str) -> None:
    """The file has changed, the answer has come, and each result of a tool has reached the model."""
    assert (folder / "greet.py").read_text() == AFTER
    assert DONE in said
    last = next(each["prompt"] for each in reversed(server.prompts()) if each["say"] == DONE)
    first, _, third = last.split("<tool_response>\n")[-3:]
    assert "Helo" in first
    assert "Hello" in third


def test_claude_code(tmp_path: Path) -> None:
    """With the address and any token: it asks for a `claude-*` of its own, which the served model answers."""
    file = str(tmp_path / "task/greet.py")
    read = call("Read", file_path=file)
    edit = call("Edit", file_path=file, old_string="Helo", new_string="Hello")
    program = from_npm("@anthropic-ai/claude-code@2.1.332", "claude")
    with serving(tmp_path, steps(read, edit, tool="Edit")) as (server, folder):
        env = {"ANTHROPIC_BASE_URL": server.base, "ANTHROPIC_AUTH_TOKEN": KEY}
        said = run(program, "-p", TASK, "--permission-mode", "acceptEdits", folder=folder, **env)
        check(server, folder, said)


def test_qwen_code(tmp_path: Path) -> None:
    """With OpenAI's variables."""
    file = str(tmp_path / "task/greet.py")
    read = call("read_file", file_path=file)
    edit = call("edit", file_path=file, old_string="Helo", new_string="Hello")
    program = from_npm("@qwen-code/qwen-code@0.24.4", "qwen")
    with serving(tmp_path, steps(read, edit, tool="edit")) as (server, folder):
        env = {"OPENAI_BASE_URL": f"{server.base}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
        check(server, folder, run(program, "-p", TASK, "--yolo", "--auth-type", "openai", folder=folder, **env))


def test_opencode(tmp_path: Path) -> None:
    """With a provider in `opencode.json`."""
    file = str(tmp_path / "task/greet.py")
    read = call("read", filePath=file)
    edit = call("edit", filePath=file, oldString="Helo", newString="Hello")
    program = from_npm("opencode-ai@1.18.33", "opencode")
    with serving(tmp_path, steps(read, edit, tool="edit")) as (server, folder):
        options = {"baseURL": f"{server.base}/v1", "apiKey": KEY}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {"name": MODEL}}}
        config = {"provider": {"dovetail": provider}, "model": f"dovetail/{MODEL}"}
        (folder / "opencode.json").write_text(json.dumps(config))
        check(server, folder, run(program, "run", TASK, folder=folder))


def test_cline(tmp_path: Path) -> None:
    """By its command line, once `cline auth` knows the address."""
    file = str(tmp_path / "task/greet.py")
    read = call("read_files", files=[{"path": file}])
    edit = call("editor", path=file, old_text="Helo", new_text="Hello")
    program = from_npm("cline@3.0.65", "cline")
    with serving(tmp_path, steps(read, edit, tool="editor")) as (server, folder):
        given = ("-p", "openai-compatible", "-k", KEY, "-m", MODEL, "-b", f"{server.base}/v1")
        run(program, "auth", *given, folder=folder)
        check(server, folder, run(program, "--json", TASK, folder=folder))


def test_continue(tmp_path: Path) -> None:
    """By its command line, with a configuration file."""
    file = str(tmp_path / "task/greet.py")
    read = call("Read", filepath=file)
    edit = call("Edit", file_path=file, old_string="Helo", new_string="Hello")
    program = from_npm("@continuedev/cli@1.5.47", "cn")
    with serving(tmp_path, steps(read, edit, tool="Edit")) as (server, folder):
        model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": f"{server.base}/v1", "apiKey": KEY}
        model |= {"roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"]}
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}))
        check(server, folder, run(program, "-p", "--auto", "--config", str(config), TASK, folder=folder))


def test_aider(tmp_path: Path) -> None:
    """It calls no tools: it adds the file that the model names, applies the listing, and has the commit described."""
    rules: Rules = [
        {"has": ["commit message"], "say": "fix: correct the greeting"},
        {"lacks": ["*added these files to the chat*"], "say": "I need to see greet.py first."},
        {"has": ['return "Helo"'], "say": f"greet.py\n```\n{AFTER}```"},
    ]
    program = from_pypi("aider-chat==0.86.2", "aider")
    with serving(tmp_path, rules) as (server, folder):
        for command in ("init -q", "add .", "-c user.name=a -c user.email=a@localhost commit -qm first"):
            subprocess.run(["git", *command.split()], cwd=folder, check=True)
        quiet = ("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-show-release-notes")
        env = {"OPENAI_API_BASE": f"{server.base}/v1", "OPENAI_API_KEY": KEY}
        task = ("--message", "Fix the typo in the greeting", "--yes-always")
        run(program, "--model", f"openai/{MODEL}", *task, *quiet, folder=folder, **env)
        assert (folder / "greet.py").read_text() == AFTER
        assert [each["say"] for each in server.prompts()] == [rules[at]["say"] for at in (1, 2, 0)]
    log = subprocess.run(["git", "log", "-1", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True)
    assert log.stdout.strip() == "fix: correct the greeting"
