"""Coding agents as their registries have them finish a task: they read a file, change it, read it again and answer.

Only the model's tokens are scripted: everything else is a `dovetail serve`. Each agent runs in a home of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents import ScriptedServer, call, from_npm, from_pypi, recipe, run, version

pytestmark = [pytest.mark.full, pytest.mark.registry, pytest.mark.timeout(900)]
TASK = "Fix the typo in greet.py"
BEFORE, AFTER = 'def greet():\n    return "Helo"\n', 'def greet():\n    return "Hello"\n'
DONE = "The greeting is fixed."
PATCH = """*** Begin Patch
*** Update File: greet.py
@@
-    return "Helo"
+    return "Hello"
*** End Patch"""
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


def finish(tmp_path: Path, agent: str, program: Path, rules: Rules, *task: str) -> None:
    """Have an agent do the task, pointed at the server as the page says."""
    with serving(tmp_path, rules) as (server, folder):
        given = recipe(agent, server.base)
        given.write(folder)
        check(server, folder, run(program, *given.arguments, *task, folder=folder, **given.env))


def test_codex(tmp_path: Path) -> None:
    """With a provider in `config.toml`, and any key: it speaks `/v1/responses`, and patches by its own command."""
    read = call("exec_command", cmd="cat greet.py")
    edit = call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}\nEOF")
    program = from_npm(f"@openai/codex@{version('Codex')}", "codex")
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    finish(tmp_path, "Codex", program, steps(read, edit, tool="exec_command"), *free, TASK)


def test_codex_over_a_websocket(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With `supports_websockets` of its provider: no turn is an HTTP request, of which the log would have a line."""
    read = call("exec_command", cmd="cat greet.py")
    edit = call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}\nEOF")
    program = from_npm(f"@openai/codex@{version('Codex')}", "codex")
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    with serving(tmp_path, steps(read, edit, tool="exec_command")) as (server, folder):
        given = recipe("Codex", server.base)
        given.files["~/.codex/config.toml"] += "supports_websockets = true\n"
        given.write(folder)
        check(server, folder, run(program, *given.arguments, *free, TASK, folder=folder, **given.env))
    log = "".join(capfd.readouterr())
    assert "GET /v1/models" in log
    assert "POST /v1/responses" not in log


def test_codex_has_the_server_compact(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Named OpenAI, its provider sums up nothing itself: after each call it sends a `compaction_trigger`."""
    asks = "Summarize this conversation for yourself"
    rules = [
        {"has": [asks, "Success."], "say": "The file is mended."},
        {"has": [asks], "say": "The file says Helo."},
        {"has": ["The file is mended."], "say": DONE},
        {"has": ["The file says Helo."], "say": call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}\nEOF")},
        *steps(call("exec_command", cmd="cat greet.py"), "", tool="exec_command")[:2],
    ]
    program = from_npm(f"@openai/codex@{version('Codex')}", "codex")
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    with serving(tmp_path, rules) as (server, folder):
        given = recipe("Codex", server.base)
        config = given.files["~/.codex/config.toml"].replace('name = "Dovetail"', 'name = "OpenAI"')
        given.files["~/.codex/config.toml"] = f"model_auto_compact_token_limit = 1000\n{config}"
        given.write(folder)
        said = run(program, *given.arguments, *free, TASK, folder=folder, **given.env)
        assert (folder / "greet.py").read_text() == AFTER
        assert DONE in said
        summaries = [each["say"] for each in server.prompts() if asks in each["prompt"]]
        assert summaries[:2] == ["The file says Helo.", "The file is mended."]
    assert "POST /v1/responses/compact" not in "".join(capfd.readouterr())


def test_claude_code(tmp_path: Path) -> None:
    """With the address and any token: it asks for a `claude-*` of its own, which the served model answers."""
    file = str(tmp_path / "task/greet.py")
    read = call("Read", file_path=file)
    edit = call("Edit", file_path=file, old_string="Helo", new_string="Hello")
    program = from_npm(f"@anthropic-ai/claude-code@{version('Claude Code')}", "claude")
    rules = steps(read, edit, tool="Edit")
    finish(tmp_path, "Claude Code", program, rules, "-p", TASK, "--permission-mode", "acceptEdits")


def test_qwen_code(tmp_path: Path) -> None:
    """With OpenAI's variables."""
    file = str(tmp_path / "task/greet.py")
    read = call("read_file", file_path=file)
    edit = call("edit", file_path=file, old_string="Helo", new_string="Hello")
    program = from_npm(f"@qwen-code/qwen-code@{version('Qwen Code')}", "qwen")
    finish(tmp_path, "Qwen Code", program, steps(read, edit, tool="edit"), "-p", TASK, "--yolo")


def test_opencode(tmp_path: Path) -> None:
    """With a provider in `opencode.json`."""
    file = str(tmp_path / "task/greet.py")
    read = call("read", filePath=file)
    edit = call("edit", filePath=file, oldString="Helo", newString="Hello")
    program = from_npm(f"opencode-ai@{version('opencode')}", "opencode")
    finish(tmp_path, "opencode", program, steps(read, edit, tool="edit"), TASK)


def test_cline(tmp_path: Path) -> None:
    """By its command line, once `cline auth` knows the address."""
    file = str(tmp_path / "task/greet.py")
    read = call("read_files", files=[{"path": file}])
    edit = call("editor", path=file, old_text="Helo", new_text="Hello")
    program = from_npm(f"cline@{version('Cline')}", "cline")
    with serving(tmp_path, steps(read, edit, tool="editor")) as (server, folder):
        run(program, *recipe("Cline", server.base).arguments, folder=folder)
        check(server, folder, run(program, "--json", TASK, folder=folder))


def test_continue(tmp_path: Path) -> None:
    """By its command line, with a configuration file."""
    file = str(tmp_path / "task/greet.py")
    read = call("Read", filepath=file)
    edit = call("Edit", file_path=file, old_string="Helo", new_string="Hello")
    program = from_npm(f"@continuedev/cli@{version('Continue')}", "cn")
    config = str(tmp_path / "home/.continue/config.yaml")
    rules = steps(read, edit, tool="Edit")
    finish(tmp_path, "Continue", program, rules, "-p", "--auto", "--config", config, TASK)


def test_aider(tmp_path: Path) -> None:
    """It calls no tools: it adds the file that the model names, applies the listing, and has the commit described."""
    rules: Rules = [
        {"has": ["commit message"], "say": "fix: correct the greeting"},
        {"lacks": ["*added these files to the chat*"], "say": "I need to see greet.py first."},
        {"has": ['return "Helo"'], "say": f"greet.py\n```\n{AFTER}```"},
    ]
    program = from_pypi(f"aider-chat=={version('Aider')}", "aider")
    with serving(tmp_path, rules) as (server, folder):
        for command in ("init -q", "add .", "-c user.name=a -c user.email=a@localhost commit -qm first"):
            subprocess.run(["git", *command.split()], cwd=folder, check=True)
        quiet = ("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-show-release-notes")
        given = recipe("Aider", server.base)
        task = ("--message", "Fix the typo in the greeting", "--yes-always")
        run(program, *given.arguments, *task, *quiet, folder=folder, **given.env)
        assert (folder / "greet.py").read_text() == AFTER
        assert [each["say"] for each in server.prompts()] == [rules[at]["say"] for at in (1, 2, 0)]
    log = subprocess.run(["git", "log", "-1", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True)
    assert log.stdout.strip() == "fix: correct the greeting"
