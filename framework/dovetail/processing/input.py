"""Requests made ready for the engine, for the server, batches and `LLM` alike.

An API reads a body (or `LLM` its arguments) into a `Request`, and refuses what only it knows. What follows is the same
for all: `Preparation.rendered` makes prompts of token ids, `Preparation.ready` decides how tokens are chosen, what the
reply is held to and how it is read. Refusals are `RequestError`, in the words of the API.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from msgspec.structs import replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Ids, Names, Prompt, Request, Text
from dovetail.grammar.spec.fields import RequestedGrammar, read_grammar
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.media import MediaSpan
from dovetail.processing.constraints import NONE, Constraints, constraints_of
from dovetail.processing.image_parts import cuts_images, media_of, of_images, shown, surrounded, with_images, with_media
from dovetail.processing.processor import Processor
from dovetail.processing.prompts import ChatTokens, chat_prompt, cut_to, last_words, without_oldest
from dovetail.processing.refusals import context_too_short, empty_prompt, fields_named, no_infill
from dovetail.processing.sampling import (
    StopRules,
    check_token_ids,
    fit_output,
    named_ids,
    num_top,
    sampling_params,
    seed_of_choice,
    stop_rules,
)
from dovetail.processing.tools import ToolOptions, tool_options
from dovetail.text.parsing.stream import OutputStream
from dovetail.text.tokenizer.fill_in import Infill

_NAMES = Names()
MESSAGES = "messages"
"""What refusals call a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """What the choices of a prompt share, and prompts of equal length that are wanted alike.

    Attributes:
        params: The engine's, seed as given.
        stops: How text ends.
        constraints: What the reply is held to.
        reading: Arguments of `OutputStream` for the parsers.
    """

    params: SamplerParams
    stops: StopRules
    constraints: Constraints = NONE
    reading: Mapping[str, Any] = field(default_factory=dict)

    def submit(self, rid: str, ids: list[int], choice: int, **service: Any) -> Submit:
        """Build the engine's request of one choice, with a seed of its own. All choices share the prompt's list.

        Args:
            rid: As of `Submit`.
            ids: The prompt.
            choice: Its number.
            service: What else `Submit` has: whose request it is, how urgent, and its images.
        """
        return Submit(
            rid=rid,
            prompt_ids=ids,
            params=replace(self.params, seed=seed_of_choice(self.params.seed, choice)),
            grammar=self.constraints.options,
            thinking=self.constraints.thinking,
            **service,
        )

    def output(self, processor: Processor, *, track_offsets: bool = False) -> OutputStream:
        """Make what reads one choice's tokens."""
        given = {**self.stops, **self.reading, "engine_follows": self.constraints.thinking is not None}
        return OutputStream(processor.tokenizer, track_offsets=track_offsets, **given)


class Preparation:
    """One request on its way to the engine; what several steps need of it is worked out once."""

    def __init__(self, processor: Processor, request: Request) -> None:
        """Look at nothing yet.

        Args:
            processor: Tokenizer, template, parsers and limits.
            request: As an API has read it, or as `rendered` left it, here or in another process.
        """
        self.request = request
        self._processor = processor
        self._ready: dict[tuple[int, int | None], PreparedRequest] = {}

    def beside(self, request: Request) -> Preparation:
        """Return another request's preparation; where it wants the same for other prompts, nothing is done twice."""
        made = Preparation(self._processor, request)
        if _wants(request) == _wants(self.request):
            made.__dict__ |= self.__dict__ | {"request": request}
        return made

    def rendered(self, *, keeps: bool = False) -> Request:
        """Return the request with its prompts as tokens, each of which leaves room for a reply; CPU work.

        Args:
            keeps: As of `Tokenizer.encode`.

        Raises:
            RequestError: It cannot be served as it is.
        """
        with fields_named(self.request.names.renamed):
            self._processor.tasks.check("generate")
            needed, has = self.request.needs_context, self._processor.limits.context_len
            if needed > has:
                raise context_too_short(needed, has, self.request.names.needs_context)
            self.grammar  # noqa: B018 refused here, where large ones do not hold others up
            prompts = self.request.prompts
            names = [self.request.names.prompt]
            if len(prompts) > 1:
                names = [f"{names[0]}[{at}]" for at in range(len(prompts))]
            made: list[Prompt] = [self._ids(one, name, keeps) for one, name in zip(prompts, names, strict=True)]
            self.request = replace(self.request, prompts=made)
            return self.request

    def count(self) -> int:
        """Return the tokens of a conversation's prompt, which may be longer than the context; CPU work.

        Raises:
            RequestError: It cannot be made, or is too big to look at.
        """
        with fields_named(self.request.names.renamed):
            [chat] = [prompt for prompt in self.request.prompts if isinstance(prompt, Chat)]
            return len(self._chat_tokens(chat, chat.messages).ids)

    def ready(self, prompt: Ids) -> PreparedRequest:
        """Decide how a rendered prompt's reply is made and read.

        Raises:
            RequestError: The request cannot be served as it is.
        """
        request = self.request
        num = len(prompt.ids)
        start = request.prompt_logprobs_start if request.prompt_logprobs_start < num else None
        key = self._max_tokens(num), start
        if key not in self._ready:
            with fields_named(request.names.renamed):
                self._ready[key] = self._prepare(prompt.tail, *key)
        return self._ready[key]

    @property
    def prompts(self) -> list[Ids]:
        """The prompts, rendered."""
        return [prompt for prompt in self.request.prompts if isinstance(prompt, Ids)]

    @cached_property
    def grammar(self) -> RequestedGrammar | None:
        """What the reply must match."""
        return read_grammar(self.request.grammar) if self.request.grammar else None

    @cached_property
    def tools(self) -> ToolOptions | None:
        """What the model may call."""
        given, names = self.request.tools, self.request.names
        if given is None:
            return None
        parser = self._processor.tools
        asked = names.tools, names.tool_choice
        found = tool_options(given.tools, given.choice, parser, parallel=given.parallel, names=asked)
        return None if found is None else dataclasses.replace(found, prefers_grammar=given.prefers_grammar)

    @cached_property
    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's variables."""
        return self._processor.template_kwargs(self.request.effort, self.request.template_kwargs)

    def _ids(self, prompt: Prompt, name: str, keeps: bool) -> Ids:
        if isinstance(prompt, Chat):
            return self._chat_ids(prompt, keeps)
        fill_in = self._fill_in(prompt.suffix)
        if isinstance(prompt, Text):
            text = prompt.text if fill_in is None else fill_in.text(prompt.text, prompt.suffix)
            if prompt.images:
                text = surrounded(self._processor, text)
            special = prompt.adds_special_tokens
            ids = self._processor.encode(text, name, add_special_tokens=special, keeps=keeps and fill_in is None)
            made = Ids(ids=ids, text=prompt.text, suffix=prompt.suffix)
        else:
            check_token_ids(prompt.ids, self._processor.limits.vocab_size, name)
            text = self._decoded(prompt.ids) if prompt.has_text else ""
            encode = partial(self._processor.encode, param="suffix", add_special_tokens=False)
            ids = prompt.ids if fill_in is None else fill_in.ids(prompt.ids, prompt.suffix, encode)
            made = Ids(ids=ids, text=text, suffix=prompt.suffix)
        if not made.ids:
            raise empty_prompt(name)
        if prompt.images:
            made = shown(self._processor, made, prompt.images, name, self.request.cache_salt)
        cut = self._cut(made.ids)
        if len(cut) < len(made.ids):
            if prompt.images:
                raise cuts_images(name)
            made = replace(made, ids=cut, text=self._decoded(cut))
        self._max_tokens(len(made.ids), media_of(made))
        return made

    def _chat_ids(self, chat: Chat, keeps: bool) -> Ids:
        if not chat.drops_turns:
            return self._attempt(chat, chat.messages, keeps)
        messages = chat.messages
        if self._processor.images is not None:  # once, and not with each attempt
            messages = with_images(messages, self._processor.load_images, self.request.cache_salt)
        return without_oldest(lambda some: self._attempt(chat, some, keeps), messages)

    def _chat_tokens(self, chat: Chat, messages: list[dict[str, Any]], *, keeps: bool = False) -> ChatTokens:
        name = self.request.names.prompt
        with nullcontext() if name == MESSAGES else fields_named({MESSAGES: name}):
            return chat_prompt(
                self._processor,
                replace(chat, messages=messages),
                tools=() if self.tools is None else self.tools.tools,
                template_kwargs=self.template_kwargs,
                keeps=keeps,
                salt=self.request.cache_salt,
            )

    def _attempt(self, chat: Chat, messages: list[dict[str, Any]], keeps: bool) -> Ids:
        whole, tail, media = self._chat_tokens(chat, messages, keeps=keeps)
        if not whole:
            raise empty_prompt(self.request.names.prompt)
        ids = self._cut(whole)
        if media and len(ids) < len(whole):
            raise cuts_images(self.request.names.prompt)
        self._max_tokens(len(ids), media)
        return with_media(Ids(ids=ids, text=last_words(messages) if chat.echoes else "", tail=tail), media)

    def _cut(self, ids: list[int]) -> list[int]:
        if self.request.cut is None:
            return ids
        limit = self.request.limit
        if self._clamps and (not self.request.clamps_by_default or (limit or 0) >= self._processor.limits.context_len):
            limit = None
        return cut_to(ids, self.request.cut, limit, self._processor.limits)

    @cached_property
    def _clamps(self) -> bool:
        max_beyond = self._processor.limits.max_tokens_beyond
        return (
            self.request.clamps if max_beyond is None or not self.request.clamps_by_default else max_beyond == "clamp"
        )

    def _decoded(self, ids: list[int]) -> str:
        return self._processor.tokenizer.decode(ids, skip_special_tokens=False)

    def _fill_in(self, suffix: str) -> Infill | None:
        """Return how the model fills in what stands before a suffix; None where there is none.

        Raises:
            RequestError: The model cannot.
        """
        if not suffix:
            return None
        if (fill_in := self._processor.tokenizer.fill_in) is None:
            raise no_infill()
        return fill_in

    def _max_tokens(self, num_prompt: int, media: tuple[MediaSpan, ...] = ()) -> int:
        """Return how many tokens a reply may have.

        Raises:
            RequestError: Context overflow.
        """
        request = self.request
        wanted, default = 1 if request.limit == 0 else request.limit, None
        if self._clamps:
            wanted, default = None, wanted
        names = request.names
        try:
            return fit_output(num_prompt, wanted, default, self._processor.limits, (names.prompt, names.limit))
        except RequestError as error:
            if not media:
                raise
            raise of_images(error, media) from None

    def _prepare(self, tail: str | None, max_tokens: int, prompt_logprobs_start: int | None) -> PreparedRequest:
        request, processor, limits = self.request, self._processor, self._processor.limits
        logprobs = num_top(request.logprobs, limits, request.names.logprobs)
        if logprobs is None and request.candidates > request.n:
            logprobs = 0  # what they are ranked by
        of_prompt = None if prompt_logprobs_start is None else request.prompt_logprobs
        named = named_ids(request.named_ids, request.logprobs is not None, limits, request.names.named_ids)
        prompt_logprobs = num_top(of_prompt, limits, "prompt_logprobs")
        stops = stop_rules(request.sampling)
        constraints = self._constraints(tail)
        params = replace(
            sampling_params(
                request.sampling, processor.tokenizer, limits, max_tokens=max_tokens, use_defaults=request.uses_defaults
            ),
            processors=processor.processors.read(request.sampling.logits_processors),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=0 if of_prompt is None else prompt_logprobs_start or 0,
            logprob_token_ids=tuple(named),
        )
        first = request.prompts[0]
        if not isinstance(first, Chat) and (fill_in := self._fill_in(first.suffix)) is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *fill_in.stop_ids))
        reading = {} if tail is None else self._reading(tail)
        return PreparedRequest(params=params, stops=stops, constraints=constraints, reading=reading)

    def _constraints(self, tail: str | None) -> Constraints:
        request, processor = self.request, self._processor
        budget = request.thinking_budget
        if request.no_thinking and processor.reasoning is not None:
            budget = 0
        chat: dict[str, Any] = {}
        if tail is not None:
            chat = {"tools": self.tools, "template_kwargs": self.template_kwargs, "tail": tail}
        return constraints_of(self.grammar, request.grammar_backend, processor, budget=budget, **chat)

    def _reading(self, tail: str) -> dict[str, Any]:
        return {
            "reasoning": self._processor.reasoning,
            "tools": None if self.tools is None else self.tools.parser,
            "tool_schemas": () if self.tools is None else self.tools.tools,
            "template": self._processor.template,
            "template_kwargs": self.template_kwargs,
            "prompt_tail": tail,
            "separate_reasoning": self.request.separates_reasoning,
            "stream_reasoning": self.request.streams_reasoning,
        }


def _wants(request: Request) -> Request:
    return replace(request, prompts=[], rid=None, names=_NAMES)
