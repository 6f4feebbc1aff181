"""What `LLM` takes and gives: sampling parameters and replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dovetail import messages
from dovetail.contracts.requests import Sampling
from dovetail.grammar.spec.route import GrammarReport
from dovetail.processing.bounds import BOUNDS, MAX_TOKENS
from dovetail.processing.checked import check_sampling
from dovetail.processing.sampling import stop_rules
from dovetail.sdk.formats.output import ToolCall
from dovetail_offline.arguments import check_number, typed

MAX_REPLIES = 10_000
"""Of one prompt."""
FRACTIONS = frozenset(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and constraints of a request; names and meanings are the HTTP API's.

    `max_tokens` None means up to the context length, which limits every response. Each prompt gets `n` responses; with
    a `seed`, each has its own seed derived from it.

    At most one of `response_format`, `regex`, `ebnf`, `json_schema`, `structural_tag`, `structured_outputs` and
    `output_type` constrains the text. `output_type` is a type of `outlines.types`, a pydantic model or a Python type.
    `grammar_backend` selects a loaded backend for this request. `thinking_budget` applies to `chat` only.
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
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
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
        """Check the numbers and types, and the texts that end a reply.

        Raises:
            RequestError: Naming the field, and its value and bounds or what it must be.
        """
        for name, (least, most) in {**BOUNDS, "max_tokens": (1, MAX_TOKENS), "n": (1, MAX_REPLIES)}.items():
            check_number(name, getattr(self, name), least, most, is_whole=name not in FRACTIONS)
        sampling = sampling_of(self)
        check_sampling(sampling)
        stop_rules(sampling)


def sampling_of(params: SamplingParams) -> Sampling:
    """Return them as the request of any API has them.

    Raises:
        RequestError: A field has another type.
    """
    values = {}
    for of in msgspec.structs.fields(Sampling):
        name = "include_stop_str_in_output" if of.name == "keeps_stop" else of.name
        if (value := typed(getattr(params, name), of.type | None, name)) not in (None, [], {}):
            values[of.name] = value
    return Sampling(**values)


@dataclass(frozen=True, kw_only=True)
class GeneratedReply:
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
class PromptEmbedding:
    """What `LLM.embed` gives for one prompt."""

    embedding: Sequence[float]
    prompt_token_ids: Sequence[int]
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """What `LLM.score` gives for a pair of texts. `outputs` is itself: vLLM's scripts read `outputs.score`."""

    score: float
    prompt_token_ids: Sequence[int]
    cached_tokens: int

    @property
    def outputs(self) -> Score:
        """Itself."""
        return self


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """What `LLM.rerank` gives for a document; `index` is its place among those that were given."""

    index: int
    relevance_score: float
    document: str


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What `LLM.classify` gives for a prompt. `outputs` is itself: vLLM's scripts read `outputs.probs`."""

    label: str
    probs: Sequence[float]
    prompt_token_ids: Sequence[int]
    cached_tokens: int

    @property
    def outputs(self) -> Classification:
        """Itself."""
        return self

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)
