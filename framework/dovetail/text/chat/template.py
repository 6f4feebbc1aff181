"""`ChatTemplate`: a conversation to prompt text, through the model's or the operator's Jinja template."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.output import SampleReply, WrittenReply
from dovetail.sdk.formats.matcher import common_len
from dovetail.sdk.formats.samples import tools_of
from dovetail.text.chat.budget import FULL, INLINE, PROBE, RenderLimits, TemplateLimitError
from dovetail.text.chat.deterministic import begin_render, frozen_render
from dovetail.text.chat.messages import NO_IMAGES, ArgumentsFormat, ContentFormat, template_messages
from dovetail.text.chat.rendered import RenderedChat, message_of, written
from dovetail.text.chat.sandbox import ChatEnvironment
from dovetail.text.chat.templates import read_template
from dovetail.text.inline import InlineCostError

BeginThinking = Callable[[str, Mapping[str, Any]], str | None]
"""Takes what the template appended to a prompt, and `chat_template_kwargs`; returns what goes behind it so that
thinking is open, or None where it cannot be."""

# fmt: off
_RESERVED = frozenset((
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs",
    "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "raise_exception", "strftime_now", "bos_token", "eos_token",
))
# fmt: on
_SENTINEL = "\ue000dovetail\ue001"
"""Text that no conversation holds, to find a place in rendered text."""
_DRAWS = re.compile(r"\|\s*random\b")
MAX_SOURCE = 1 << 17
"""Characters of a template: Jinja and Python take four seconds to compile so many at worst."""
FAILED = "chat_template_failed"
"""Code of errors that are the template's fault."""
SMALL = 1 << 16
"""Characters of a conversation, as JSON. A template that exceeds its limits for so few would for any."""


class _RefusalError(RequestError):
    """The template refused the conversation, or failed on its data."""


class ChatTemplate:
    """A model's chat template, compiled once. Safe to share between threads.

    Attributes:
        source: The template's text, its comments emptied; empty if the model has none.
        code: The names that the code in it uses, a space between two.
        printable: The constant texts that it may print, a line between two.
        origin: Where it comes from, for logs.
        content_format: `string`, `parts`, or `both`: the forms of message content that the template handles.
        arguments_format: `object` or `string`: how it reads the arguments of a call.
        beside_calls: The content with which it shows the calls of a reply that has none: empty, or None.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the model",
        limits: RenderLimits = FULL,
        response_template: Any = None,
    ) -> None:
        """Compile.

        Args:
            sources: Templates by name: `default`, and `tool_use` for requests with tools. Empty: no template.
            special_tokens: `bos_token`, … as `Tokenizer.special_tokens`.
            origin: Named in errors and logs.
            limits: Of a render, all that it takes included; an attribute, which may be set.
            response_template: What the model's tokenizer_config.json says of replies.

        Raises:
            ModelError: A template has a syntax error, is too long or nests too deeply.
        """
        self.origin = origin
        self.begin_thinking: BeginThinking | None = None
        """Says how thinking begins behind a prompt, for templates that print none of a message that is continued."""
        self.response_template = response_template
        self._special_tokens = dict(special_tokens or {})
        self.limits = PROBE
        self.problem: str | None = None
        """Why samples were not rendered at the start: the template took too long, or built too much."""
        self._environment = ChatEnvironment()
        with self._environment.budget.bounded(PROBE):
            self._templates = {name: self._compile(name, source) for name, source in sources.items()}
        default = "default" if "default" in sources else next(iter(sources), None)
        self._default = None if default is None else self._templates[default]
        self.source = "" if default is None else self._environment.without_comments(sources[default])
        self.code = self._environment.names_in(self.source)
        self.printable = self._environment.printable(self.source)
        self.content_format: ContentFormat = self._detect_content_format() if self._default else "string"
        self.arguments_format: ArgumentsFormat = "object"
        self.beside_calls: str | None = ""
        self.no_images = NO_IMAGES
        """Why no image can be shown; empty where the model sees."""
        if self._default:
            self._detect_calls()
        self.limits = limits

    @property
    def varies(self) -> bool:
        """Whether the template draws lots: what it writes once says nothing of what it writes again."""
        return _DRAWS.search(self.source) is not None

    @classmethod
    def load(cls, files: TokenizerFiles, choice: str | os.PathLike[str] | None = None) -> ChatTemplate:
        """Take the template that `--chat-template` says, or else the model's own, with the limits of a start.

        Args:
            files: The tokenizer's.
            choice: A file, or the name of a template that Dovetail brings (`builtin_templates`); a file wins.

        Raises:
            ConfigError: It is neither, or the file cannot be read, or its template, or the model's, has a syntax error.
        """
        chosen = files.chat_templates if choice is None else {"default": read_template(choice)}
        origin = "the model" if choice is None else f"--chat-template {os.fspath(choice)}"
        tokens, said = files.special_tokens(), files.tokenizer_config.get("response_template")
        return cls(chosen, special_tokens=tokens, origin=origin, limits=PROBE, response_template=said)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a conversation. CPU work in proportion to its length: call it off the event loop for long ones.

        Args:
            messages: OpenAI messages, already validated to be mappings with a `role`.
            tools: As OpenAI writes them; None or empty if there are none.
            documents: Passed to the template.
            add_generation_prompt: Whether the assistant's header is appended; by default unless continuing.
            continue_final_message: The last message is the beginning of the reply.
            template_kwargs: `chat_template_kwargs` of the request.

        Raises:
            RequestError: There is no template, a field is wrong, or the template refused or failed; its message is
                passed on. With status 500 the template is at fault.
            InlineCostError: The limits are those of a render here, and it takes more.
        """
        _check_kwargs(template_kwargs or {})
        if continue_final_message and add_generation_prompt:
            raise _not_continued("add_generation_prompt and continue_final_message exclude each other; send one")
        context = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": template_messages(
                messages, self.content_format, self.arguments_format, self.beside_calls, self.no_images
            ),
            "tools": [*tools] if tools else None,
            "documents": [*documents] if documents else None,
        }
        template = self._pick(bool(tools))
        with frozen_render(), self._environment.budget.bounded(self.limits, len(messages)):
            if continue_final_message:
                return self._render_continued(template, context, template_kwargs or {})
            text = self._render(template, context, add_generation_prompt=add_generation_prompt is not False)
            if add_generation_prompt is False:
                return RenderedChat(text, "")
            return RenderedChat(text, self._tail(template, context, text))

    def written(self, reply: SampleReply, switches: Mapping[str, Any] | None = None) -> WrittenReply | None:
        """See `TemplateView.written`."""
        if self.varies:
            return None
        given = (message_of(reply), tools_of((reply,)), dict(switches or {}))
        return written(self.render, *map(json.dumps, given))

    def _render_continued(
        self, template: jinja2.Template, context: dict[str, Any], template_kwargs: Mapping[str, Any]
    ) -> RenderedChat:
        """Render up to the end of the last message, which is cut off at a sentinel put behind its content."""
        messages = context["messages"]
        if not messages or messages[-1].get("role") != "assistant":
            raise _not_continued("continue_final_message needs a last message with role 'assistant'")
        marked = [*messages[:-1], _with_sentinel(messages[-1])]
        try:
            text, found, _ = self._render(template, {**context, "messages": marked}, False).rpartition(_SENTINEL)
        except _RefusalError:  # some templates refuse a message that is thinking alone
            if not _is_thinking(messages[-1]):
                raise
            found = ""
        if not found and _is_thinking(messages[-1]):
            return self._render_thinking(template, context, template_kwargs)
        if not found:
            raise _not_continued(
                "the chat template does not print the last message's content, so it cannot be continued"
            )
        try:
            before = self._render(template, {**context, "messages": messages[:-1]}, False)
        except _RefusalError:  # some templates refuse a conversation without a question
            before = ""
        tail = text[common_len(text, before) :]
        begin = self.begin_thinking if _is_thinking(messages[-1]) else None
        if begin is not None and begin(tail, template_kwargs):  # written without what opens it
            return self._render_thinking(template, context, template_kwargs)
        return RenderedChat(text, tail)

    def _render_thinking(
        self, template: jinja2.Template, context: dict[str, Any], template_kwargs: Mapping[str, Any]
    ) -> RenderedChat:
        """Write the last message's thinking behind the prompt for it: the template leaves it out of a history."""
        *before, last = context["messages"]
        context = {**context, "messages": before}
        text = self._render(template, context, True)
        tail = self._tail(template, context, text)
        begun = None if self.begin_thinking is None else self.begin_thinking(tail, template_kwargs)
        if begun is None:
            raise _not_continued(
                "the chat template does not print the last message's reasoning_content, so it cannot be continued; "
                "behind its prompt it cannot either: there is no reasoning parser, or thinking is switched off"
            )
        begun += last["reasoning_content"]
        return RenderedChat(text + begun, tail + begun)

    def _tail(self, template: jinja2.Template, context: dict[str, Any], text: str) -> str:
        """Return what the generation prompt added, or, where a template always adds it, what follows the messages."""
        try:
            plain = self._render(template, context, False)
        except _RefusalError:
            plain = text
        tail = text[common_len(text, plain) :]
        messages = context["messages"]
        if tail or not messages:
            return tail
        marked = [*messages[:-1], _with_sentinel(messages[-1])]
        try:
            return self._render(template, {**context, "messages": marked}, True).rpartition(_SENTINEL)[2]
        except _RefusalError:  # a template that inspects the content may refuse the sentinel
            return ""

    def _render(self, template: jinja2.Template, context: Mapping[str, Any], add_generation_prompt: bool) -> str:
        if self.problem is not None and self.limits is PROBE:
            raise _RefusalError(self.problem)
        self._environment.budget.restart()
        begin_render()
        try:
            return template.render(context, add_generation_prompt=add_generation_prompt)
        except TemplateLimitError as error:
            raise self._beyond(str(error), context) from error
        except RecursionError as error:
            raise self._fault("the chat template calls itself too deeply") from error
        except jinja2.TemplateError as error:
            raise _RefusalError(f"chat template: {error.message or error}", param="messages") from error
        except MemoryError:
            raise
        except Exception as error:  # a template computes on the request's data: its failure is the request's
            raise _RefusalError(f"chat template: {type(error).__name__}: {error}", param="messages") from error

    def _sample(self, messages: list[dict[str, Any]], *, with_tools: bool, add_generation_prompt: bool) -> str | None:
        """Render a few messages as they are; None where the template refuses."""
        context = {**self._special_tokens, "messages": messages, "tools": None}
        with suppress(RequestError), self._environment.budget.bounded(self.limits):
            return self._render(self._pick(with_tools), context, add_generation_prompt)
        return None

    def _beyond(self, reason: str, context: Mapping[str, Any]) -> Exception:
        """Return the error for a render beyond its limits."""
        if self.limits is INLINE:
            return InlineCostError(reason)
        if self.limits is PROBE:
            self.problem = reason
            return _RefusalError(reason)
        given = [context.get(name) for name in ("messages", "tools", "documents")]
        if len(json.dumps(given, default=str)) <= SMALL:
            return self._fault(reason)
        return RequestError(f"{reason}; shorten the conversation or fix the template", param="messages")

    def _fault(self, reason: str) -> RequestError:
        text = f"{reason} ({self.origin}'s); the request is not at fault: serve with another, by --chat-template FILE"
        return RequestError(text, code=FAILED, status=500)

    def _pick(self, with_tools: bool) -> jinja2.Template:
        if self._default is None:
            raise RequestError(
                "the model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                code="chat_template_missing",
            )
        return self._templates.get("tool_use", self._default) if with_tools else self._default

    def _compile(self, name: str, source: str) -> jinja2.Template:
        where = f"{self.origin}: chat template" + ("" if name == "default" else f" ({name})")
        if len(source) > MAX_SOURCE:
            raise ModelError(f"{where}: {len(source)} characters; at most {MAX_SOURCE} are allowed")
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"{where}, line {error.lineno}: {str(error.message).rstrip('.')}"
            raise ModelError(f"{reason}; correct it, or give another with --chat-template") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Jinja's parser, or of Python's
            raise ModelError(f"{where}: it nests too deeply ({type(error).__name__})") from error
        except Exception as error:  # such as a name that Python's compiler does not take
            raise ModelError(f"{where}: it cannot be compiled: {type(error).__name__}: {error}") from error

    def _detect_content_format(self) -> ContentFormat:
        """Render one message in both forms and see which comes out as text."""
        as_string = self._prints(_SENTINEL)
        as_parts = self._prints([{"type": "text", "text": _SENTINEL}])
        if as_parts:
            return "both" if as_string else "parts"
        return "string"

    def _detect_calls(self) -> None:
        """Render a call in each form: a template that joins texts fails on an object, or prints it as Python does."""
        found: list[ArgumentsFormat] = []
        for content in ("", None):
            for form in ("object", "string"):
                text = self._called(content, form)
                if text is None or f"'{_SENTINEL}'" in text:
                    continue
                found.append(form)
                if _SENTINEL in text:
                    self.arguments_format, self.beside_calls = form, content
                    return
        self.arguments_format = found[0] if found else "object"

    def _called(self, content: str | None, form: ArgumentsFormat) -> str | None:
        """Render a call whose arguments have a form; None where the template refuses."""
        arguments: Any = {_SENTINEL: _SENTINEL}
        call = {"name": "x", "arguments": arguments if form == "object" else json.dumps(arguments, ensure_ascii=False)}
        calls = [{"id": "abcdef123", "type": "function", "function": call}]
        reply = {"role": "assistant", "content": content, "tool_calls": calls}
        return self._sample([{"role": "user", "content": "x"}, reply], with_tools=True, add_generation_prompt=False)

    def _prints(self, content: Any) -> bool:
        """Whether content comes out as itself, not as a printed list."""
        text = self._sample([{"role": "user", "content": content}], with_tools=False, add_generation_prompt=True) or ""
        return _SENTINEL in text and not any(f"{quote}{_SENTINEL}{quote}" in text for quote in "'\"")


def _not_continued(why: str) -> RequestError:
    return RequestError(why, param="continue_final_message")


def _is_thinking(message: Mapping[str, Any]) -> bool:
    """Whether a message is thinking, and nothing else yet."""
    return not message.get("content") and not message.get("tool_calls") and bool(message.get("reasoning_content"))


def _with_sentinel(message: Mapping[str, Any]) -> dict[str, Any]:
    """Mark the end of a message: of its content, or of its thinking where that is all there is."""
    content = message["content"]
    if not content and (reasoning := message.get("reasoning_content")):
        return {**message, "reasoning_content": reasoning + _SENTINEL, "reasoning": reasoning + _SENTINEL}
    if content is None or isinstance(content, str):
        return {**message, "content": (content or "") + _SENTINEL}
    return {**message, "content": [*content, {"type": "text", "text": _SENTINEL}]}


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    if taken := sorted(_RESERVED & kwargs.keys()):
        raise RequestError(
            f"chat_template_kwargs cannot set {', '.join(taken)}; use the request's own fields",
            param=f"chat_template_kwargs.{taken[0]}",
        )
