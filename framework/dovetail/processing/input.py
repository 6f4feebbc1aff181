"""Requests made ready for the engine, for the server, batches and `LLM` alike.

An edge reads what it was given (a body, arguments) into a `Conversation` and a `Wanted`, and refuses what only it
knows. What follows is the same for all of them: `chat_prompt` renders and tokenizes, `prepare_chat` or `prepare_text`
decides how tokens are chosen, what the reply is held to and how it is read. Refusals are `RequestError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from dovetail.grammar.spec.fields import RequestedGrammar
from dovetail.messages import SamplingParams, Submit
from dovetail.processing.constraints import NONE, Constraints, chat_constraints, text_constraints
from dovetail.processing.processor import Processor
from dovetail.processing.sampling import (
    SamplingFields,
    StopRules,
    check_token_ids,
    sampling_params,
    seed_of_choice,
    stop_rules,
)
from dovetail.processing.tools import ToolOptions, Tools
from dovetail.text.parsing.stream import OutputStream

TAIL_TOKENS = 64
"""Of a prompt that comes as tokens: enough to see whether thinking has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template makes a prompt of, and how the reply is divided.

    Attributes:
        messages: As OpenAI writes them.
        tools: Those that the model may call.
        template_kwargs: The template's variables.
        documents: Passed to the template.
        add_generation_prompt: See `ChatTemplate.render`.
        continue_final_message: The last message is the beginning of the reply.
        input_ids: The prompt as tokens, in place of the rendered messages.
        add_special_tokens: Beside those that the template writes.
        separate_reasoning: Reasoning is apart from the content.
        stream_reasoning: It is given out as it comes.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: ToolOptions | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    input_ids: list[int] | None = None
    add_special_tokens: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a reply's tokens are chosen, what is told of them, and what they are held to.

    Attributes:
        fields: The request's, by the names that all requests have.
        max_tokens: Of the reply, as resolved against the context.
        logprobs: See `SamplingParams`; so for those that follow.
        use_defaults: What is left out comes from the model's generation config.
        grammar: Of the content.
        grammar_backend: The only one that may enforce.
        thinking_budget: Most tokens of thinking.
    """

    fields: SamplingFields
    max_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: Sequence[int] = ()
    use_defaults: bool = True
    grammar: RequestedGrammar | None = None
    grammar_backend: str | None = None
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the choices of a prompt share, and prompts of equal length that are wanted alike.

    Attributes:
        params: The engine's, seed as given.
        stops: How text ends.
        constraints: What the reply is held to.
        reading: Arguments of `OutputStream` for the parsers.
    """

    params: SamplingParams
    stops: StopRules
    constraints: Constraints = NONE
    reading: Mapping[str, Any] = field(default_factory=dict)

    def submit(
        self,
        rid: str,
        ids: list[int],
        choice: int,
        *,
        priority: int = 0,
        cache_salt: str = "",
        owner: str = "",
        weight: float = 1.0,
        timeout_s: float | None = None,
    ) -> Submit:
        """Build the engine's request of one choice, with a seed of its own. All choices share the prompt's list."""
        return Submit(
            rid=rid,
            prompt_ids=ids,
            params=replace(self.params, seed=seed_of_choice(self.params.seed, choice)),
            priority=priority,
            cache_salt=cache_salt,
            owner=owner,
            weight=weight,
            timeout_s=timeout_s,
            grammar=self.constraints.steps,
            thinking=self.constraints.thinking,
        )

    def ended_by(self, ids: Sequence[int]) -> Prepared:
        """Return the same, which these tokens end, too."""
        params = replace(self.params, stop_token_ids=(*self.params.stop_token_ids, *ids))
        return dataclasses.replace(self, params=params)

    def output(self, processor: Processor, *, track_offsets: bool = False) -> OutputStream:
        """Make what reads one choice's tokens."""
        return OutputStream(processor.tokenizer, track_offsets=track_offsets, **self.stops, **self.reading)


def chat_prompt(
    processor: Processor, chat: Conversation, tools: Tools = (), *, keeps: bool = False
) -> tuple[list[int], str]:
    """Render and tokenize a conversation.

    Args:
        processor: The model's.
        chat: The conversation.
        tools: Shown to the model where nobody will read its calls.
        keeps: As of `Tokenizer.encode`.

    Returns:
        The prompt's tokens, and what the template appended to the conversation.

    Raises:
        RequestError: A message means nothing, there is no template, or the text cannot fit the context.
    """
    processor.check_size(chat.messages)
    rendered = processor.template.render(
        chat.messages,
        tools=tools if chat.tools is None else chat.tools.tools,
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_kwargs=chat.template_kwargs,
    )
    if chat.input_ids is None:
        special = chat.add_special_tokens
        ids = processor.encode(rendered.text, "messages", add_special_tokens=special, keeps=keeps)
        return ids, rendered.tail
    check_token_ids(chat.input_ids, processor.limits.vocab_size, "input_ids")
    tail = processor.tokenizer.decode(chat.input_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return chat.input_ids, tail


def prepare_text(processor: Processor, wanted: Wanted) -> Prepared:
    """Make ready what continues a text.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    budget = wanted.thinking_budget
    constraints = text_constraints(wanted.grammar, wanted.grammar_backend, processor, budget=budget)
    return Prepared(params=_params(processor, wanted), stops=stop_rules(wanted.fields), constraints=constraints)


def prepare_chat(processor: Processor, wanted: Wanted, chat: Conversation, tail: str) -> Prepared:
    """Make ready what answers a conversation.

    Args:
        processor: The model's.
        wanted: By the request.
        chat: The same conversation that the prompt was made of; its messages may be gone.
        tail: Of `chat_prompt`.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    stops = stop_rules(wanted.fields)
    constraints = chat_constraints(
        wanted.grammar,
        wanted.grammar_backend,
        processor,
        tools=chat.tools,
        budget=wanted.thinking_budget,
        template_kwargs=chat.template_kwargs,
        tail=tail,
    )
    reading = {
        "reasoning": processor.reasoning,
        "tools": None if chat.tools is None else chat.tools.parser,
        "tool_schemas": () if chat.tools is None else chat.tools.tools,
        "template": processor.template,
        "template_kwargs": chat.template_kwargs,
        "prompt_tail": tail,
        "separate_reasoning": chat.separate_reasoning,
        "stream_reasoning": chat.stream_reasoning,
    }
    return Prepared(params=_params(processor, wanted), stops=stops, constraints=constraints, reading=reading)


def _params(processor: Processor, wanted: Wanted) -> SamplingParams:
    return sampling_params(
        wanted.fields,
        processor,
        max_tokens=wanted.max_tokens,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        prompt_logprobs_start=wanted.prompt_logprobs_start,
        logprob_token_ids=wanted.logprob_token_ids,
        use_defaults=wanted.use_defaults,
    )
