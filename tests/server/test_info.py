"""`dovetail info`: what the server would make of a model, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail_server.cli import main as dovetail


def test_info_shows_the_choice_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model: architecture, template, what each switch does, parsers with scores."""
    assert dovetail(["info"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in shown
    assert "reasoning parser   qwen3: it scores 1.00 for the chat template, and reads a rendered reply back" in shown
    assert "  thinking off     does not think" in shown
    assert dovetail(["info", "--json", "--chat-template", "glm47"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["reasoning_parser"]["name"] == facts["tool_parser"]["name"] == "glm45"
    assert facts["chat_template"]["thinking"]["no switch"] == "thinks at once"


def test_info_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a model, and a template that is none."""
    assert dovetail(["info", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert dovetail(["info", "--chat-template", "qwen33"]) == 2
    assert "did you mean 'qwen3'" in capsys.readouterr().err


def test_info_imports_no_torch() -> None:
    """It starts at once."""
    code = "import sys; from dovetail_server.cli import main; main(['info']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
