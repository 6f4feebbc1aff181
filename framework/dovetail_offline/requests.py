"""What `LLM` is asked for, made ready for its engine: arguments in, the engine's requests and their readers out."""

from __future__ import annotations

import enum
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from msgspec.structs import replace
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from dovetail import messages
from dovetail.contracts import requests
from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Ids, Names, Request
from dovetail.grammar.spec.fields import NAMES, read_grammar
from dovetail.grammar.spec.route import GrammarRoute
from dovetail.processing.bounds import MAX_TOOL_NAME, TOOL_NAME, Effort
from dovetail.processing.input import Preparation
from dovetail.processing.pairs import POOLING, TextIds
from dovetail.processing.processor import Processor
from dovetail.processing.refusals import wrong
from dovetail.processing.sampling import check_token_ids
from dovetail.processing.tools import Tools
from dovetail.text.parsing.stream import OutputStream
from dovetail_offline.arguments import listed, typed
from dovetail_offline.types import SamplingParams, sampling_of

# Outlines' output types, and the Python types they stand for, as request fields: for the offline `LLM`.
#
# Types of `outlines.types` are recognised by their form, so that nothing here imports outlines: `Regex`, `CFG`,
# `JsonSchema`, terms such as `Choice`. Also a pydantic model, a dataclass or `TypedDict`, an `Enum`, `Literal[...]`,
# `bool`, `int`, `float` and `dict`.


def fields_of(output_type: Any) -> Mapping[str, Any]:
    """Return the request's grammar fields that an output type stands for.

    Raises:
        RequestError: It stands for none.
    """
    if isinstance(output_type, str):
        return {"regex": output_type}
    module = type(output_type).__module__
    if module.startswith("outlines."):
        return _outlines(output_type)
    if get_origin(output_type) is Literal:
        return _choices(list(get_args(output_type)))
    if isinstance(output_type, type) and issubclass(output_type, enum.Enum):
        return _choices([member.value for member in output_type])
    if isinstance(output_type, list):
        return _choices(output_type)
    if output_type is dict:
        return {"response_format": {"type": "json_object"}}
    if isinstance(output_type, Mapping):  # pydantic would take it for a schema of its core
        raise _no_type(output_type)
    try:
        return {"json_schema": TypeAdapter(output_type).json_schema()}
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError):
        raise _no_type(output_type) from None


def _no_type(given: Any) -> RequestError:
    possible = "a type of outlines.types, a pydantic model or a Python type; sampling parameters are a SamplingParams"
    return wrong(f"output_type {given!r:.200} is no type that a grammar can be made of; give {possible}", "output_type")


def _outlines(term: Any) -> Mapping[str, Any]:
    """A term of `outlines.types`: grammars and schemas carry their source, other terms are regular expressions."""
    if (definition := getattr(term, "definition", None)) is not None:
        return {"ebnf": definition}
    if (schema := getattr(term, "schema", None)) is not None:
        return {"json_schema": schema}
    if (items := getattr(term, "items", None)) is not None and isinstance(items, list):
        return _choices(items)
    if (pattern := getattr(term, "pattern", None)) is not None:
        return {"regex": pattern}
    from outlines.types.dsl import to_regex  # the caller has outlines: the term is one of its own

    return {"regex": to_regex(term)}


def _choices(values: list[Any]) -> Mapping[str, Any]:
    try:
        texts = [value if isinstance(value, str) else json.dumps(value, allow_nan=False) for value in values]
    except (TypeError, ValueError) as error:
        raise wrong(f"output_type has a choice that JSON cannot say: {error}", "output_type") from None
    return {"structured_outputs": {"choice": texts}}


@dataclass(frozen=True)
class OfflineRequest:
    """One engine request and the stream that reads its reply."""

    prompt_index: int
    submit: messages.Submit
    output: OutputStream
    route: GrammarRoute | None = None


class OfflineRequests:
    """Makes the jobs of an `LLM`. Safe to share between threads."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._ids = itertools.count(1)

    def each(
        self, params: SamplingParams | Sequence[SamplingParams | None] | None, num: int
    ) -> Sequence[SamplingParams]:
        """Return the parameters of each prompt; None stands for the model's own.

        Raises:
            RequestError: Not one for all, nor one per prompt.
        """
        default = SamplingParams(**self._processor.limits.defaults)
        if params is None or isinstance(params, SamplingParams):
            return [params or default] * num
        many = listed(params, "params", "a SamplingParams, or one per prompt")
        if len(many) != num:
            raise RequestError(f"{len(many)} sampling parameters for {num} prompts; give one, or one per prompt")
        for at, one in enumerate(many):
            if not isinstance(one, SamplingParams | None):
                raise wrong(f"params[{at}] is of type {type(one).__name__}; give a SamplingParams, or None", "params")
        return [one or default for one in many]

    def continued(self, index: int, ids: list[int], params: SamplingParams) -> list[OfflineRequest]:
        """Make the jobs that continue a prompt.

        Raises:
            RequestError: It cannot be served as it is.
        """
        with _of_prompt(index):
            self.check_ids(ids)
            return self._jobs(index, _asked(params, Request(prompts=[Ids(ids=ids)])))

    def answered(self, index: int, chat: Request, params: SamplingParams) -> list[OfflineRequest]:
        """Make the jobs that answer a conversation, one of `conversations`.

        Raises:
            RequestError: It cannot be served as it is.
        """
        with _of_prompt(index):
            request = _asked(params, chat)
            return self._jobs(index, Preparation(self._processor, request).rendered())

    def conversations(
        self,
        many: Sequence[list[dict[str, Any]]],
        *,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        separate_reasoning: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
    ) -> list[Request]:
        """Return requests that share everything but their messages, which `arguments.messages_of` has read.

        Raises:
            RequestError: Of `tool_options`; or a tool, an effort or another argument is none.
        """
        flags = {
            "parallel_tool_calls": (parallel_tool_calls, bool),
            "separate_reasoning": (separate_reasoning, bool),
            "continue_final_message": (continue_final_message, bool),
            "add_generation_prompt": (add_generation_prompt, bool | None),
            "documents": (documents, list[dict[str, Any]] | None),
            "chat_template_kwargs": (chat_template_kwargs, dict[str, Any] | None),
        }
        for name, (value, kind) in flags.items():
            typed(value, kind, name)
        if reasoning_effort is not None and reasoning_effort not in get_args(Effort):
            known = ", ".join(get_args(Effort))
            raise wrong(f"reasoning_effort must be one of {known}, not {reasoning_effort!r}", "reasoning_effort")
        tools = [] if tools is None else listed(tools, "tools", "a list of tools")
        _check_tools(tools)
        asked = requests.Tools(tools=[dict(t) for t in tools], choice=tool_choice, parallel=parallel_tool_calls)
        shared = Request(
            prompts=[],
            tools=asked,
            effort=reasoning_effort,
            template_kwargs=dict(chat_template_kwargs or {}),
            separates_reasoning=separate_reasoning,
            names=Names(prompt="messages"),
        )
        Preparation(self._processor, shared).tools  # noqa: B018 refused before any of them is rendered
        rendering: dict[str, Any] = {"documents": documents, "add_generation_prompt": add_generation_prompt}
        continues = continue_final_message
        return [replace(shared, prompts=[Chat(messages=m, continues=continues, **rendering)]) for m in many]

    def pooled(self, index: int, ids: list[int], pool: messages.Pool) -> OfflineRequest:
        """Make the job that asks for a prompt's hidden states.

        Raises:
            RequestError: The prompt is empty or too long.
        """
        limits = self._processor.limits
        with _of_prompt(index):
            self.check_ids(ids)
            if len(ids) > limits.context_len:
                raise wrong(f"it has {len(ids)} tokens; possible are 1 to {limits.context_len}", "prompt")
        return self.compared(index, TextIds(ids), pool, POOLING)

    def compared(
        self, index: int, text: TextIds, pool: messages.Pool | None, params: messages.SamplerParams
    ) -> OfflineRequest:
        """Make the job of a prompt that `read_pairs` has made and checked."""
        submit = messages.Submit(rid=self._rid(), prompt_ids=text.ids, params=params, pool=pool, second=text.second)
        return OfflineRequest(index, submit, OutputStream(self._processor.tokenizer))

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse an empty prompt, and ids outside the vocabulary.

        Raises:
            RequestError: It is one of these.
        """
        if not ids:
            raise wrong("it is empty; give at least one token", "prompt")
        check_token_ids(ids, self._processor.limits.vocab_size, "prompt")

    def _jobs(self, index: int, request: Request) -> list[OfflineRequest]:
        preparation = Preparation(self._processor, request)
        [prompt] = preparation.prompts
        prepared = preparation.ready(prompt)
        route = prepared.constraints.route
        return [
            OfflineRequest(
                index, prepared.submit(self._rid(), prompt.ids, choice), prepared.output(self._processor), route
            )
            for choice in range(request.n)
        ]

    def _rid(self) -> str:
        return f"llm-{next(self._ids)}"


@contextmanager
def _of_prompt(index: int) -> Iterator[None]:
    """Say in errors which of the prompts they are about."""
    try:
        yield
    except RequestError as error:
        text = f"prompt {index}: {error.message}"
        raise RequestError(text, param=error.param, code=error.code, status=error.status) from error


def _asked(params: SamplingParams, request: Request) -> Request:
    """Return a request with what sampling parameters ask for."""
    return replace(
        request,
        n=params.n,
        sampling=sampling_of(params),
        limit=params.max_tokens,
        clamps=True,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        named_ids=typed(params.logprob_token_ids, list[int], "logprob_token_ids"),
        grammar=_grammar(params),
        grammar_backend=typed(params.grammar_backend, str | None, "grammar_backend"),
        thinking_budget=params.thinking_budget,
    )


def _grammar(params: SamplingParams) -> dict[str, Any]:
    """Return the grammar that parameters ask for, or their output type stands for."""
    given = {name: value for name in NAMES if (value := getattr(params, name)) is not None}
    if params.output_type is None:
        return given
    if read_grammar(given) is not None:
        raise wrong("output_type and another field constrain the output; give one", "output_type")
    return dict(fields_of(params.output_type))


def _check_tools(tools: Tools) -> None:
    """Refuse what is no tool, as the server's schema does.

    Raises:
        RequestError: With its place.
    """
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise wrong(f'tools[{place}] must be {{"type": "function", "function": {{…}}}}', f"tools[{place}]")
        name = function.get("name")
        if not isinstance(name, str) or len(name) > MAX_TOOL_NAME or not re.fullmatch(TOOL_NAME, name):
            where = f"tools[{place}].function.name"
            raise wrong(f"{where} must be up to {MAX_TOOL_NAME} letters, digits and _.:-, not {name!r:.99}", where)
        if not isinstance(function.get("parameters"), Mapping | None):
            where = f"tools[{place}].function.parameters"
            raise wrong(f"{where} must be a JSON schema", where)
