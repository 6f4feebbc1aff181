"""`dovetail info`: what the server would make of a model, without torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail.demo as dovetail_demo
from dovetail_server.cli import main as dovetail


def test_info_shows_the_choice_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model: architecture, template, what each switch does, parsers with scores."""
    assert dovetail(["info"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in shown
    assert "reasoning parser   qwen3: it scores 1.00 for the chat template, and reads a rendered reply back" in shown
    assert "  thinking off     does not think" in shown
    assert "tokenizer          4,096 tokens; a reply ends at <|im_end|> (4089), <|endoftext|> (4087)" in shown
    assert dovetail(["info", "--json", "--chat-template", "glm47"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["reasoning_parser"]["name"] == facts["tool_parser"]["name"] == "glm45"
    assert facts["chat_template"]["thinking"]["no switch"] == "thinks at once"
    installed = {one["name"]: one for one in facts["kernel_sets"]}
    claims = {name: sorted(one["claims"]) for name, one in installed.items()}
    assert claims == {"cpu": ["cpu"], "humming": ["cuda"], "triton": ["cuda"]}
    assert "rms_norm" in installed["triton"]["claims"]["cuda"]
    assert re.search(r"\n  triton +dovetail-llm \S+ +cuda +rms_norm, ", shown)
    if not torch.cuda.is_available():
        assert "kernels            cpu: mask_logits" in shown
        assert (facts["kernels"]["mask_logits"], facts["kernels"]["rms_norm"]) == ("cpu", "plain")


def test_info_says_who_serves_and_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without weights: the plugin, the groups of the cache, or the reason why nobody serves it."""
    from transformers import Gemma3TextConfig, Mamba2Config, RwkvConfig

    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 99, "num_key_value_heads": 2, "head_dim": 16}
    files = Path(dovetail_demo.MODEL_DIR)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    config = Gemma3TextConfig(**sizes, sliding_window=24, dtype="bfloat16", architectures=["Gemma3ForCausalLM"])
    config.save_pretrained(tmp_path)
    dummies = ["info", str(tmp_path), "--load-format", "dummy"]
    assert dovetail([*dummies, "--model-impl", "transformers"]) == 0
    shown = capsys.readouterr().out
    assert "served by          dovetail-llm:transformers" in shown
    assert "full: 1 layers, 128 bytes a token" in shown
    assert "window-24: 5 layers, 640 bytes a token" in shown
    assert "The tokenizer has 4,096 tokens and the model embeddings of 99" in caplog.text
    Mamba2Config(architectures=["Mamba2ForCausalLM"], num_hidden_layers=2, dtype="float32").save_pretrained(tmp_path)
    assert dovetail([*dummies, "--json"]) == 0
    kept = {"group": "recurrent", "layers": 2, "bytes": 2 * 4 * (128 * 64 * 128 + 4 * 10240), "per": "request"}
    assert json.loads(capsys.readouterr().out)["cache"] == [kept]
    RwkvConfig(architectures=["RwkvForCausalLM"], num_hidden_layers=2, dtype="float32").save_pretrained(tmp_path)
    assert dovetail([*dummies, "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["served_by"] is None
    assert "RwkvForCausalLM" in facts["refused"]


def test_the_context_may_stand_in_an_inner_object(capsys: pytest.CaptureFixture[str]) -> None:
    """As in models that see."""
    assert dovetail(["info", "--json", "demo:digits"]) == 0
    assert json.loads(capsys.readouterr().out)["context_length"] == 1024


def test_how_large_an_image_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the processor's bound, and what the plan counts for the tower; a text model has none."""
    assert dovetail(["info", "--json", "demo:digits"]) == 0
    images = json.loads(capsys.readouterr().out)["images"]
    assert 0 < images["max_tokens"] < images["max_patches"]
    assert images["tower_bytes"] > 0
    assert dovetail(["info", "demo:digits"]) == 0
    assert f"images             up to {images['max_patches']:,} patches, " in capsys.readouterr().out
    assert dovetail(["info", "--json", "demo:chat"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] is None


@pytest.mark.parametrize("command", [["info"], ["chat"], ["top"], ["plugin", "list"]])
def test_a_flag_is_not_cut_short(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`info --model X` is an error; it was read as `--model-impl X`, and showed another model."""
    with pytest.raises(SystemExit, match="2"):
        dovetail([*command, "--model", "x", "--hel"])
    found = capsys.readouterr().err.partition("unrecognized arguments: ")[2]
    assert {"--model", "--hel"} <= set(found.split())


def test_info_of_a_model_that_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An encoder, and a classifier: who serves it, what it is for, and how large it is; without weights."""
    from transformers import BertConfig

    files = Path(dovetail_demo.MODEL_DIR)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    for name, tasks in (("BertModel", ["embed", "score"]), ("BertForSequenceClassification", ["classify"])):
        config = BertConfig(architectures=[name], dtype="float32", num_labels=3)
        config.save_pretrained(tmp_path)
        assert dovetail(["info", str(tmp_path), "--load-format", "dummy", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["served_by"], facts["tasks"], facts["cache"]) == (f"dovetail-llm:{name}", tasks, [])
        assert facts["num_params"] == pytest.approx(108.9e6, rel=0.01)
        assert dovetail(["info", str(tmp_path)]) == 2  # there are no weights, and all that can be said is shown
        shown = capsys.readouterr().out
        assert "cache              nothing is kept: prompts are computed whole" in shown
        assert f"for                {', '.join(tasks)}" in shown
        assert dovetail(["plan", str(tmp_path), "--load-format", "dummy", "--device", "cpu"]) == 0
        plan = capsys.readouterr()
        assert "prompts are computed whole, and nothing of them is kept" in plan.out + plan.err


@pytest.mark.parametrize(
    ("said", "modules", "tasks"),
    [
        ({}, None, ["generate", "embed"]),
        ({"classifier_from_token": ["no", "yes"]}, None, ["generate", "embed", "score"]),
        ({"is_original_qwen3_reranker": True}, None, ["generate", "embed", "score"]),
        ({}, "sentence_transformers.models.Pooling", ["generate", "embed", "score"]),
    ],
)
def test_info_of_a_model_that_compares_texts(
    said: dict[str, Any], modules: str | None, tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the folder says of answers and of embeddings counts, as it does for the server."""
    shutil.copytree(dovetail_demo.MODEL_DIR, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps([{"type": modules, "path": "1_Pooling"}]))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    assert dovetail(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == tasks


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
