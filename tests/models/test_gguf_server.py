"""A GGUF file as a model path: the same replies as the folder that it was written from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.demo import MODEL_DIR

pytest.importorskip("gguf", reason="it writes the files")
from gguf_files import folder_vocab, write_gguf

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo model as a file."""
    path = tmp_path_factory.mktemp("gguf") / "demo-BF16.gguf"
    template = (MODEL_DIR / "chat_template.jinja").read_text()
    vocab = {**folder_vocab(MODEL_DIR), "template": template, "eos": 4089, "add_bos": False}
    write_gguf(MODEL_DIR, path, lambda name: "BF16", vocab=vocab)
    return path


def test_a_file_replies_as_its_folder(file: Path) -> None:
    """Configuration, tokenizer, template, ends and weights, through `LLM`."""
    replies = []
    for path in (MODEL_DIR, file, file.parent):
        with LLM(str(path), device="cpu", dtype="bfloat16") as llm:
            replies.append(llm.chat([CHAT], SamplingParams(temperature=0, max_tokens=24))[0])
    assert replies[0].text
    assert {reply.text for reply in replies} == {replies[0].text}
    assert {reply.prompt_token_ids for reply in replies} == {replies[0].prompt_token_ids}


def test_info_and_plan_know_a_file(file: Path) -> None:
    """`dovetail info` says what the model is, and its parsers; `dovetail plan` what it takes."""
    run = [str(Path(sys.executable).with_name("dovetail"))]
    told = subprocess.run([*run, "info", str(file), "--json"], capture_output=True, text=True, check=True, timeout=120)
    facts = json.loads(told.stdout)
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["weights_bytes"] == file.stat().st_size
    assert facts["reasoning_parser"]["name"] == "qwen3"
    assert facts["chat_template"]["from"] == "the model"
    plan = subprocess.run([*run, "plan", str(file)], capture_output=True, text=True, check=True, timeout=120)
    assert "weights" in plan.stdout
