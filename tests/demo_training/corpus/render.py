"""Turns a sample into the prompt and the completion that a server would see, with the model's own chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo_training.corpus.sample import Message, Sample
from dovetail.demo import MODEL_DIR

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class Document:
    """A text to train on: the loss counts the completion, and the prompt only where `whole` is set."""

    prompt: str
    completion: str
    whole: bool = False


@lru_cache(maxsize=1)
def _template() -> Template:
    """Compiles the chat template under the rules that `transformers` uses."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8"))


def render_chat(messages: list[Message], **options: Any) -> str:
    """Renders `messages`; the options are the template's (`tools`, `add_generation_prompt`, `enable_thinking`)."""
    return _template().render(messages=messages, **options)


def prompt_messages(sample: Sample) -> list[Message]:
    """Returns the messages that a client would send for `sample`."""
    return [*sample.history, {"role": "user", "content": sample.ask}, *sample.after]


def answer_message(sample: Sample) -> Message:
    """Returns the assistant's message that answers `sample`."""
    message: Message = {"role": "assistant", "content": sample.answer}
    if sample.think:
        message["reasoning_content"] = sample.thought
    if sample.calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in sample.calls]
    return message


def render(sample: Sample) -> Document:
    """Renders `sample` into the text before and after the point where the model starts to write.

    Raises:
        ValueError: The template renders the answer as something other than a continuation of the prompt.
    """
    if sample.raw:
        return Document(sample.ask, sample.answer + END_OF_TEXT, whole=True)
    messages = prompt_messages(sample)
    prompt = render_chat(messages, tools=sample.tools, add_generation_prompt=True, enable_thinking=bool(sample.think))
    full = render_chat([*messages, answer_message(sample)], tools=sample.tools)
    prompt += sample.given
    if not full.startswith(prompt):
        raise ValueError(f"the rendered answer does not continue the prompt: {full!r}")
    return Document(prompt, full[len(prompt) :].removesuffix("\n"))
