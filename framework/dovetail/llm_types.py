"""What `LLM` takes and gives: sampling parameters and replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dovetail import messages
from dovetail.errors import RequestError
from dovetail.grammar.route import GrammarReport
from dovetail.messages.seeds import derive_seed
from dovetail.text.output import ToolCall
from dovetail.text.stop_regex import compile_stop


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens; names and meanings as in the HTTP API.

    `max_tokens` None means: up to the context length. `n` replies are made for each prompt; with a seed, each has one
    of its own derived from it. What constrains the text (at most one of `response_format`, `regex`, `ebnf`,
    `json_schema`, `structural_tag`, `structured_outputs`, `output_type`) is as in the HTTP API; `output_type` is a type
    of `outlines.types`, a pydantic model, or a type of Python's that these stand for. `grammar_backend` is one of the
    loaded ones, for this request. `thinking_budget` is for `chat`.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_regex: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    output_type: Any = None
    thinking_budget: int | None = None
    grammar_backend: str | None = None

    def __post_init__(self) -> None:
        """Check the values that have bounds.

        Raises:
            RequestError: Naming the field, its value and its bounds.
        """
        bounds: dict[str, tuple[float, float]] = {
            "temperature": (0, 1e6),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "frequency_penalty": (-2, 2),
            "presence_penalty": (-2, 2),
            "repetition_penalty": (1e-6, 2),
            "n": (1, 10_000),
            "min_tokens": (0, 1 << 40),
        }
        for expression in as_tuple(self.stop_regex):
            compile_stop(expression)
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise RequestError(f"{name} must be from {low:g} to {high:g}, not {getattr(self, name)!r}", param=name)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One reply.

    Attributes:
        prompt_index: Which of the prompts it answers.
        text: Content, without reasoning and tool calls.
        reasoning: What a reasoning parser split off; None if there is none.
        reasoning_tokens: Tokens generated inside thinking.
        tool_calls: Parsed calls.
        token_ids: All generated ids that count.
        finish_reason: `stop`, `length` or `tool_calls`; `abort` if it was refused or failed (see `message`).
        matched_stop: The stop token id or stop string.
        cached_tokens: Prompt tokens found in the prefix cache.
    """

    prompt_index: int
    text: str
    reasoning: str | None
    reasoning_tokens: int
    tool_calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    prompt_token_ids: Sequence[int]
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    matched_stop: int | str | None
    message: str | None
    cached_tokens: int
    logprobs: Sequence[messages.TokenLogprob]
    prompt_logprobs: Sequence[messages.TokenLogprob] | None
    grammar: GrammarReport | None = None
    """What came of the grammar, if there was one."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """What `LLM.embed` gives for one prompt."""

    embedding: Sequence[float]
    prompt_token_ids: Sequence[int]
    cached_tokens: int


def as_tuple(texts: str | Sequence[str]) -> Sequence[str]:
    return (texts,) if isinstance(texts, str) else texts


def engine_params(
    params: SamplingParams, choice: int, room: int, processors: dict[str, dict[str, Any]]
) -> messages.SamplingParams:
    """The engine's form of one choice's parameters; `room` is what the context leaves, `processors` were checked."""
    return messages.SamplingParams(
        max_tokens=min(params.max_tokens or room, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        seed=None if params.seed is None else derive_seed(params.seed, choice),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        processors=processors,
    )
