"""A tiny tokenizer, one token per byte, and a ChatML template: enough to see every character through the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.text.tokenizer.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"
"""A safetensors file without tensors, which is enough for a config that claims no sizes."""


def write_model(folder: Path, *, more: Sequence[str] = (), **config: object) -> Path:
    """Write a model folder without weights; its tokenizer has `more` tokens beside its own."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(ByteLevel.alphabet())
    backend = Backend(BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*MARKERS, *more)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    return folder


def tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of `write_model`."""
    return Tokenizer.load(folder)
