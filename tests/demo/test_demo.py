"""What the bundled demo model promises to those who serve it; what it learned is tested in `tests/demo_training`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dovetail.demo import MODEL_DIR

USER = [{"role": "user", "content": "Hi"}]
GET_WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CALLED = [
    {"role": "user", "content": "What's the weather in Paris?"},
    {"role": "assistant", "content": None, "reasoning_content": "I need the weather.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"condition": "sunny"}'},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer, as `transformers` loads it."""
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_the_weights_are_small() -> None:
    """The weights take at most 16 MB, all of them bfloat16."""
    path = MODEL_DIR / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    assert {value.dtype for value in load_file(path).values()} == {torch.bfloat16}


def test_importing_the_package_loads_no_torch() -> None:
    """`dovetail.demo` can be imported without torch or transformers."""
    code = "import sys, dovetail.demo; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_its_files_say_what_servers_need(tokenizer: Any) -> None:
    """Architecture, context and token ids; cool sampling for who names none, and two tokens that end a reply."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert generation["do_sample"] is True
    assert generation["temperature"] <= 0.4


def test_the_template_thinks_only_when_told(tokenizer: Any) -> None:
    """Without `enable_thinking`, or with false, the prompt closes an empty reasoning block; with true it stays open."""
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    render = tokenizer.apply_chat_template
    assert render(USER, tokenize=False, add_generation_prompt=True) == start + "<think>\n\n</think>\n\n"
    assert render(USER, tokenize=False, add_generation_prompt=True, enable_thinking=True) == start


def test_the_template_renders_parts_tools_and_results(tokenizer: Any) -> None:
    """Parts are joined; schemas stand in the system turn, calls and fresh reasoning in the assistant's."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    render = tokenizer.apply_chat_template
    assert render(parts, tokenize=False) == render(USER, tokenize=False)
    text = render(CALLED, tools=[GET_WEATHER], tokenize=False, add_generation_prompt=True)
    assert json.dumps(GET_WEATHER) in text.split("<|im_end|>")[0]
    assert "<think>\nI need the weather.\n</think>" in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n" in text
    later = [*CALLED, {"role": "assistant", "content": "Sunny."}, *USER]
    assert "I need the weather." not in render(later, tokenize=False)
