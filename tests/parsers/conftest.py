"""A byte-level vocabulary in which the formats' markers are tokens, as in the models that write them."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.text.tokenizer.tokenizer import Tokenizer

HARMONY = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
DEEPSEEK = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
]
KIMI = [
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
]
MISTRAL = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"]
LLAMA = ["<|python_tag|>", "<|python_start|>", "<|python_end|>"]
GLM = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
KIMI_K3 = ["<|open|>", "<|close|>", "<|sep|>"]
SOLAR = ["<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|calls|>"]
SOLAR += [f"<|tool_call:{name}|>" for name in ("begin", "name", "args", "end")]
COHERE = [f"<|{edge}_{name}|>" for name in ("THINKING", "RESPONSE", "TEXT", "ACTION") for edge in ("START", "END")]
GEMMA = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>']
STEP = [f"<｜tool_{name}｜>" for name in ("calls_begin", "call_begin", "sep", "call_end", "calls_end")]
LATER = [
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|inner_prefix|>",
    "<|inner_suffix|>",
    "]<]minimax[>[",
    "<|tool_call|>",
]
LATER += ["<|action_start|>", "<|plugin|>", "<|action_end|>", "<|tool_call_start|>", "<|tool_call_end|>"]
LATER += ["<|function_call|>", "<|message_sep|>", "<|role_sep|>"]
LATER += ["<|eom|>", "<|eot|>", "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"]
LATER += [f"<|content_{name}|>" for name in ("thinking", "text", "invoke_tool_json", "invoke_tool_text")]
LATER += ["<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>"]
SPECIAL = [*KIMI_K3, *SOLAR, *COHERE, *GEMMA, *STEP, *LATER, *HARMONY, *DEEPSEEK, *KIMI, *MISTRAL, *LLAMA, "｜DSML｜"]
ADDED = [
    "｜GCML｜",
    "\n</rfl:parameter>",
    *(
        f"<{end}ifm|{name}>"
        for end in ("", "/")
        for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value")
    ),
    "]<]minimax[>[",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<seed:think>",
    "</seed:think>",
    *GLM,
]
"""As the models have them: `◁think▷` and the tags of qwen3-coder are text that tokens cut anywhere."""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", *SPECIAL])
    backend.add_tokens(ADDED)
    return Tokenizer(backend, TokenizerFiles(tokenizer_config={"eos_token": "<|im_end|>"}))
