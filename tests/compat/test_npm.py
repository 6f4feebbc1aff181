"""The JavaScript clients of OpenAI, Anthropic and the AI SDK, from npm, against a server of the demo model."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from programs import Worker, install

pytestmark = [pytest.mark.full, pytest.mark.registry, pytest.mark.timeout(300)]
PACKAGES = (
    "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.87", "@ai-sdk/anthropic@3.0.138",
    "@ai-sdk/deepseek@2.0.69", "openai@6.49.0", "@anthropic-ai/sdk@1.12.0", "zod@4.6.7",
)  # fmt: skip


def test_javascript_clients_work_unchanged(tmp_path: Path, workers: list[Worker]) -> None:
    """Texts, streams, tools and objects come through every provider; one null too many fails the strict ones."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js is not installed")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(tmp_path))
    install([npm, "install", *quiet, *PACKAGES], "npm")
    shutil.copy(Path(__file__).parent / "clients.mjs", tmp_path)
    command = [node, str(tmp_path / "clients.mjs"), workers[0].base]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 27
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text("utf-8")
    block = re.findall(r"^```js\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "page.mjs").write_text(block.replace("http://localhost:30000", workers[0].base))
    done = subprocess.run([node, str(tmp_path / "page.mjs")], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in done.stdout
