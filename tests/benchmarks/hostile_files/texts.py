"""What files of templates and tokenizers have in common: a folder, and what is done with it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from server_tiny import write_model

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat
from dovetail.processing.processor import Processor
from dovetail.processing.prompts import chat_prompt
from dovetail.processing.sampling import SamplingLimits
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.inline import InlineCostError
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_parsers.derived.derive import derive
from dovetail_server.supervision import imports

CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "a" * 1900 + "b"}],
    [{"role": "user", "content": " \t\n" * 600 + "x1"}],
    [
        {"role": "system", "content": "<b>www.example.com</b> " * 20},
        {"role": "user", "content": "élève 中文 \U0001f600 e\u0301 ﷺ" * 20},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "{}", "tool_call_id": "abcdef123"},
    ],
    [{"role": ("user", "assistant")[at % 2], "content": str(at)} for at in range(41)],
]
CONTEXT = 1 << 16


@cache
def base() -> Path:
    """A folder with ordinary files; not among those that are removed."""
    return write_model(Path(tempfile.mkdtemp(dir="/tmp")))


def folder(name: str, content: str) -> Path:
    """Return a new folder with ordinary files but for one."""
    made = Path(tempfile.mkdtemp())
    for path in base().iterdir():
        if path.is_file() and path.name != name:
            os.link(path, made / path.name) if path.stat().st_dev == made.stat().st_dev else shutil.copy(path, made)
    (made / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    return made


@cache
def tokenizer_json() -> str:
    """The ordinary tokenizer."""
    return (base() / "tokenizer.json").read_text()


def tokenizer_state() -> dict[str, Any]:
    """The ordinary tokenizer, to be changed."""
    state: dict[str, Any] = json.loads(tokenizer_json())
    return state


def read(path: Path) -> float:
    """Load tokenizer and template as a start does, and prepare chats as the event loop does."""
    tokenizer = Tokenizer.load(path)
    template = ChatTemplate.load(tokenizer.files)
    derive(template)
    text = Processor(tokenizer, template)
    text.limits = SamplingLimits(vocab_size=tokenizer.vocab_size, context_len=CONTEXT, max_prompt_bytes=1 << 20)
    text.keep_inline()
    imports.started()
    longest = 0.0
    for messages in CONVERSATIONS:
        began = time.thread_time()
        try:
            ids, _ = chat_prompt(text, Chat(messages=messages), template_kwargs={})
            tokenizer.decode(ids[:200], skip_special_tokens=False)
        except (InlineCostError, RequestError) as error:
            if "\n" in str(error).strip() and "raise_exception" not in template.source:
                raise AssertionError(f"an error of several lines: {error}") from error
        longest = max(longest, time.thread_time() - began)
    tokenizer.decode(range(min(300, tokenizer.vocab_size)), skip_special_tokens=False)
    return longest
