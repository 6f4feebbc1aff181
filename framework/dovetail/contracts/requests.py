"""A request as data: what every API makes of a body, and all that the core knows of one.

An API's own names, aliases and forms are resolved when its body is read; what is behind that never sees a body. The
same struct travels into the processes that read large bodies, into batches and through `LLM`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

JsonObject = dict[str, Any]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when the text ends. None: the model's own value, or none. Numbers have been checked.

    `logit_bias` has token ids, as numbers or as texts of digits; `keeps_stop` leaves a stop string that ended the
    text in it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    keeps_stop: bool = False
    skip_special_tokens: bool | None = None
    logit_bias: dict[int | str, float] | None = None
    logits_processors: dict[str, JsonObject] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


class Chat(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A conversation, which the model's chat template makes a prompt of.

    Attributes:
        messages: As OpenAI's chat API has them.
        documents: Passed to the template.
        add_generation_prompt: Whether the template ends with the beginning of a reply; None: as it does by itself.
        continues: The last message is the beginning of the reply.
        input_ids: The prompt as token ids, in place of the rendered messages.
        adds_special_tokens: Beside those that the template writes.
        echoes: The reply begins with the last message, where that is the assistant's.
        drops_turns: The oldest turns are left out as far as the context is too short.
    """

    messages: list[JsonObject]
    documents: list[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continues: bool = False
    input_ids: list[int] | None = None
    adds_special_tokens: bool = False
    echoes: bool = False
    drops_turns: bool = False


class Text(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A text that goes on. `suffix` is what stands behind what the model writes, for models that fill in.

    `images` are content parts as OpenAI's chat API has them, one for each placeholder in the text.
    """

    text: str
    adds_special_tokens: bool = True
    suffix: str = ""
    images: list[JsonObject] = []


class Ids(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A prompt as token ids.

    Attributes:
        ids: Of the model's vocabulary.
        text: Its text, where the reply begins with it.
        has_text: `text` is wanted, and to be made of `ids`.
        suffix: As of `Text`.
        images: As of `Text`.
        tail: What the chat template wrote behind the conversation; None where there is none.
    """

    ids: list[int]
    text: str = ""
    has_text: bool = False
    suffix: str = ""
    images: list[JsonObject] = []
    tail: str | None = None


Prompt = Chat | Text | Ids


class Tools(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tools that the model may call, as OpenAI's chat API has them, `choice` (its `tool_choice`) included.

    `prefers_grammar` has calls held to the tools' schemas where something here can, also where none is strict.
    """

    tools: list[JsonObject]
    choice: Any = None
    parallel: bool = True
    prefers_grammar: bool = False


class Dropped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that the server cannot run and leaves out of the prompt: its place in the body, and its type."""

    param: str
    what: str


class Cut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt is cut to `most` tokens, or with -1 to what the context holds beside the reply."""

    most: int
    side: Literal["left", "right"] = "left"


class Names(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an API calls its fields: refusals speak of them by these names.

    `renamed` maps regular expressions for other names in refusals, which are the chat API's, to the API's own.
    """

    prompt: str = "prompt"
    limit: str = "max_tokens"
    needs_context: str = "needs_context"
    logprobs: str = "logprobs"
    named_ids: str = "logprob_token_ids"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    renamed: dict[str, str] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client wants generated: one conversation, or one or more texts that want the same.

    What an API returns is held against these types and the bounds of the HTTP API's fields before anything else sees
    it: other values are refused with 400. Plain values only, as the struct may travel to another process.

    Attributes:
        prompts: One `Chat`, or any number of the others.
        model: The model's name; None for the one that is served.
        rid: The client's identifier of the request.
        stream: Whether the reply is a stream.
        n: Replies for each prompt.
        candidates: Replies to generate for each prompt, of which the most likely `n` are given; 0: `n`.
        sampling: See `Sampling`.
        uses_defaults: What is left out of `sampling` comes from the model's generation config.
        limit: Most tokens of a reply: None for up to the context's end; 0 reads the prompt and answers nothing.
        clamps: A reply may end at the context's end before `limit`; else that is refused.
        clamps_by_default: `clamps` is what the API's clients expect: `--max-tokens-beyond`, if given, says otherwise.
        needs_context: Tokens that the model's context must hold, whatever this request takes of it; else refused.
        cut: How a prompt is cut; None: one that is too long is refused.
        logprobs: None: none; n: those of each token and of the n most likely; -1 for all.
        prompt_logprobs: As `logprobs`, for the prompt's tokens …
        prompt_logprobs_start: … from this one on; none where the prompt ends before.
        named_ids: Tokens whose log probabilities stand beside `logprobs`.
        tracks_offsets: Where the text of each token begins is wanted.
        tools: See `Tools`; None for none.
        dropped: Tools that are left out, or refused where the operator wants that.
        grammar: What the reply must match: fields of OpenAI's, vLLM's and SGLang's APIs for that, at most one.
        grammar_backend: The only backend that may enforce it.
        effort: OpenAI's `reasoning_effort`.
        template_kwargs: Variables of the chat template.
        thinking_budget: Most tokens of thinking.
        no_thinking: Thinking ends at once, also where the template has no switch for it.
        separates_reasoning: Reasoning is no part of the content.
        streams_reasoning: It is given out as it comes; else at once, at its end.
        priority: Higher goes first.
        cache_salt: Requests with different ones share no cached prefix.
        keeps: The reply is to be stored, with this metadata and the body's `messages`; None: it is not.
        names: See `Names`.
        reply: What the API's writer has to know beside this: plain values, which no other code reads.
    """

    prompts: list[Prompt]
    model: str | None = None
    rid: str | None = None
    stream: bool = False
    n: int = 1
    candidates: int = 0
    sampling: Sampling = Sampling()
    uses_defaults: bool = True
    limit: int | None = None
    clamps: bool = False
    clamps_by_default: bool = False
    needs_context: int = 0
    cut: Cut | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    named_ids: list[int] = []
    tracks_offsets: bool = False
    tools: Tools | None = None
    dropped: list[Dropped] = []
    grammar: JsonObject = {}
    grammar_backend: str | None = None
    effort: str | None = None
    template_kwargs: JsonObject = {}
    thinking_budget: int | None = None
    no_thinking: bool = False
    separates_reasoning: bool = True
    streams_reasoning: bool = True
    priority: int = 0
    cache_salt: str = ""
    keeps: dict[str, str] | None = None
    names: Names = Names()
    reply: JsonObject = {}
