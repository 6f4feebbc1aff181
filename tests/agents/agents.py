"""Agents from the registries, a server that says what a script tells it, and a task in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail.demo import MODEL_DIR
from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

PAGE = Path(__file__).parents[2] / "docs/clients.md"
ADDRESS = "http://localhost:30000"
NODE = "node@22.23.3"
CONTEXT = 1 << 18
"""Tokens: the demo's tokenizer makes some 60,000 of an agent's instructions and tools."""
PLUGIN = Path(__file__).with_name("scripted_model.py")
SIZES: dict[str, Any] = {
    "architectures": ["AgentScriptForCausalLM"], "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip


class ScriptedServer:
    """A `dovetail serve` of the scripted model, with the demo's tokenizer and template."""

    def __init__(self, folder: Path, rules: Sequence[Mapping[str, Any]], flags: str = "") -> None:
        """Write the model into `folder` and start."""
        self.model = folder / "model"
        shutil.copytree(MODEL_DIR, self.model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((self.model / "config.json").read_text("utf-8"))
        for name in ("layer_types", "transformers_version", "max_window_layers"):
            del config[name]
        (self.model / "config.json").write_text(json.dumps(config | SIZES), encoding="utf-8")
        # As many numbers as the sizes say: a download that stopped early is refused before the model looks at it.
        tensors = {
            name: torch.zeros(config["vocab_size"], 4) for name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        save_file(tensors | {"model.layers.0.any.weight": torch.zeros(256)}, self.model / "model.safetensors")
        (self.model / "script.json").write_text(json.dumps(rules), encoding="utf-8")
        self.files = tempfile.TemporaryDirectory()
        own = f"--plugin-file {PLUGIN} --served-model-name scripted --max-total-tokens {2 * CONTEXT} --num-threads 1"
        own += f" --file-storage-path {self.files.name} --min-free-disk-bytes 0"
        self.process, port = launch_server_cmd(f"dovetail serve {self.model} {own} {flags}")
        self.base = f"http://127.0.0.1:{port}"

    def wait(self) -> ScriptedServer:
        wait_for_server(self.base, timeout=120)
        return self

    def prompts(self) -> list[dict[str, str]]:
        """What was asked and said, in order."""
        return [json.loads(line) for line in (self.model / "prompts.jsonl").read_text("utf-8").splitlines()]

    def close(self) -> None:
        terminate_process(self.process, timeout=60)
        self.files.cleanup()


@dataclass(frozen=True)
class Recipe:
    """How the page Clients points an agent at a server.

    Attributes:
        version: Of the agent.
        files: Texts of configuration files by their paths; `~` is the agent's home.
        env: Variables of the command.
        arguments: Of the command, without its name.
    """

    version: str
    files: dict[str, str]
    env: dict[str, str]
    arguments: list[str]

    def write(self, folder: Path) -> None:
        """Write the files, those of no home into `folder`."""
        home = home_of(folder)
        for name, text in self.files.items():
            path = home / name[2:] if name.startswith("~/") else folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def recipe(agent: str, base: str) -> Recipe:
    """Read what the page says of an agent, for the server at `base`."""
    page = PAGE.read_text("utf-8").replace(ADDRESS, base)
    found = re.search(rf"^### {re.escape(agent)} (\S+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/clients.md has no section of {agent}"
    version, text = found.groups()
    files, env, arguments = {}, {}, []
    for before, kind, block in re.findall(r"([^\n]*)\n\n```(\w+)\n(.*?)```", f"\n{text}", re.DOTALL):
        if kind != "sh":
            files[before.split("`")[1]] = block
            continue
        words = shlex.split(block)
        given = [word for word in words if re.match(r"[A-Z_]+=", word)]
        env = dict(word.split("=", 1) for word in given)
        arguments = words[len(given) + 1 :]
    return Recipe(version, files, env, arguments)


def version(agent: str) -> str:
    """Return the version of an agent that the page names."""
    return recipe(agent, ADDRESS).version


UNREACHABLE = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "Temporary failure in name resolution",
    "No matching distribution",
)


def cache() -> Path:
    """Return the folder where agents are installed once: 1.5 GB, outside of the repository."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "dovetail-test-agents"


def from_npm(package: str, command: str) -> Path:
    """Install a package of npm with a Node.js of its own, and return its command.

    Skips the test where there is no npm, or where its registry does not answer.
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = cache() / package.replace("/", "+")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder))
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _install([npm, "install", *quiet, NODE, package], "npm")
        (folder / "done").touch()
    return folder / "node_modules/.bin" / command


def from_pypi(package: str, command: str) -> Path:
    """As `from_npm`, for a package of PyPI, in an environment of its own."""
    folder = cache() / package
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        _install([str(folder / "bin/python"), "-m", "pip", "install", "-q", package], "PyPI")
        (folder / "done").touch()
    return folder / "bin" / command


def _install(command: list[str], registry: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        text = done.stderr + done.stdout
        if any(word in text for word in UNREACHABLE):
            pytest.skip(f"{registry} cannot be reached: {text.strip().splitlines()[-1][:200]}")
        pytest.fail(f"{' '.join(command)}:\n{text[-2000:]}")


def home_of(folder: Path) -> Path:
    """Return the home of an agent that works in `folder`."""
    home = folder.with_name("home")
    home.mkdir(exist_ok=True)
    return home


def run(program: Path, *arguments: str, folder: Path, **env: str) -> str:
    """Run an agent in `folder` with a home of its own beside it, and return what it printed.

    It gets no variable of this process: a key or an address that a developer has would make it another test.
    """
    home = home_of(folder)
    path = os.pathsep.join((str(program.parent), os.environ.get("PATH", os.defpath)))
    try:
        done = subprocess.run(
            [str(program), *arguments],
            cwd=folder, env={"PATH": path, "HOME": str(home), "TERM": "dumb", **env}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    finally:
        _end_all_of(home)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def _end_all_of(home: Path) -> None:
    """End what an agent left running, such as a hub of its windows, by the home that it inherited."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the demo model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
