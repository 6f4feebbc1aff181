"""From request fields to the engine's `SamplingParams`, and the one check of token ids that come from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from dovetail.errors import RequestError
from dovetail.messages import SamplingParams
from dovetail.messages.seeds import derive_seed
from dovetail.text.stop_regex import compile_stop
from dovetail_server import errors
from dovetail_server.openai.common import PromptFields, SamplingFields, ServiceFields

if TYPE_CHECKING:
    from dovetail.text.tokenizer import Tokenizer
    from dovetail_server.serving.text import Limits, TextTools

MAX_BIAS = 100.0
SEED_MASK = (1 << 63) - 1
DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class StopRules(TypedDict):
    """How decoded text ends, as `OutputStream` takes it; token-level rules are in `SamplingParams`."""

    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    no_stop_trim: bool
    min_tokens: int
    skip_special_tokens: bool


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary. Every id that comes from outside passes through here.

    Raises:
        RequestError: An id is negative or not below `vocab_size`.
    """
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        text = f"{param} holds token id {bad}, but this model's ids go from 0 to {vocab_size - 1}"
        raise RequestError(text, param=param, code="invalid_token_id")


def num_top(wanted: int | None, limits: Limits, param: str) -> int | None:
    """Return how many of the most likely tokens a request gets; -1 asks for all.

    Raises:
        RequestError: More than the server gives.
    """
    most = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    if wanted is None or 0 <= wanted <= most:
        return wanted
    if limits.max_logprobs == -1:
        return most
    given = "-1, which is all" if wanted == -1 else str(wanted)
    text = f"{param} may be up to {most} (given: {given}); the server's --max-logprobs allows more, or with -1 all"
    raise RequestError(text, param=param, code="invalid_value")


def word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, as it is written at the beginning of a word and within one."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(ids for ids in found if ids)


def refuse_stream_mix(request: ServiceFields, prompt_logprobs: int | None) -> None:
    """Refuse what a stream does not carry; `stream_options` only say how one would be written.

    Raises:
        RequestError: Naming the field.
    """
    if request.stream and prompt_logprobs is not None:
        raise errors.unsupported("prompt_logprobs", "a stream does not carry them; leave out stream")


def stop_rules(request: SamplingFields) -> StopRules:
    """Collect the text-level stop rules.

    Raises:
        RequestError: An expression that is none, or two names of one field that disagree.
    """
    keep = same_field(request, "no_stop_trim", "include_stop_str_in_output")
    expressions = _several(request.stop_regex)
    for source in expressions:
        compile_stop(source)
    return StopRules(
        stop=_several(request.stop),
        stop_regex=expressions,
        no_stop_trim=bool(keep),
        min_tokens=request.min_tokens or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def _several(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def same_field(request: Any, name: str, alias: str) -> Any:
    """Return the value of a field with two names.

    Raises:
        RequestError: Both are given and differ.
    """
    first, second = getattr(request, name), getattr(request, alias)
    if first is not None and second is not None and first != second:
        raise RequestError(
            f"{name} and {alias} are one setting and differ; give one", param=alias, code="invalid_value"
        )
    return first if first is not None else second


def sampling_params(
    request: SamplingFields,
    text: TextTools,
    *,
    max_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    prompt_logprobs_start: int = 0,
    logprob_token_ids: Sequence[int] = (),
    use_defaults: bool = True,
) -> SamplingParams:
    """Build what the engine gets, seed still as given.

    Args:
        request: Checked by its schema already.
        text: The server's tokenizer and limits.
        max_tokens: As resolved against the context.
        logprobs: See `SamplingParams`.
        prompt_logprobs: See `SamplingParams`.
        prompt_logprobs_start: See `SamplingParams`.
        logprob_token_ids: Checked.
        use_defaults: Take what is left out from the model's generation config.

    Raises:
        RequestError: A token id outside the vocabulary, or `min_tokens` above `max_tokens`.
    """
    limits = text.limits
    chosen = {name: getattr(request, name) for name in DEFAULTABLE}
    defaults = limits.defaults if use_defaults else {}
    values = {k: v if v is not None else defaults[k] for k, v in chosen.items() if v is not None or k in defaults}
    if values.get("top_p") == 0:
        values |= {"top_p": 1.0, "temperature": 0.0}
    if values.get("top_k") == 0:
        values["top_k"] = -1
    stop_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_ids, limits.vocab_size, "stop_token_ids")
    check_token_ids(request.allowed_token_ids or (), limits.vocab_size, "allowed_token_ids")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        why = f"min_tokens is {min_tokens}, above the {max_tokens} tokens that this reply may have"
        raise RequestError(why, param="min_tokens", code="invalid_value")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        stop_token_ids=stop_ids,
        ignore_eos=bool(request.ignore_eos),
        logit_bias=logit_bias(request.logit_bias, limits.vocab_size),
        seed=request.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=prompt_logprobs_start,
        logprob_token_ids=tuple(logprob_token_ids),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=word_ids(request.bad_words or (), text.tokenizer),
        processors=text.processors.read(request.logits_processors),
        **values,
    )


def logit_bias(given: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Read the keys as token ids and clamp the values to ±100.

    Raises:
        RequestError: A key is no id of this model.
    """
    if not given:
        return {}
    bad = next((key for key in given if not key.isascii() or not key.isdigit()), None)
    if bad is not None:
        text = f"logit_bias: {bad!r} is no token id; keys are ids written as digits"
        raise RequestError(text, param="logit_bias", code="invalid_token_id")
    bias = {int(key): max(-MAX_BIAS, min(MAX_BIAS, value)) for key, value in given.items()}
    check_token_ids(bias, vocab_size, "logit_bias")
    return bias


def fit_output(
    num_prompt: int, wanted: int | None, default: int | None, limits: Limits, params: tuple[str, str]
) -> int:
    """Return how many tokens may be generated.

    Args:
        num_prompt: Tokens of the prompt.
        wanted: As the request says, or None.
        default: Where the request says nothing; None: up to the context.
        limits: The model's.
        params: Names of the prompt's and the output limit's field.

    Raises:
        RequestError: Context overflow, or no output wanted.
    """
    if wanted is not None and wanted < 1:
        raise RequestError(f"{params[1]} must be at least 1 (given: {wanted})", param=params[1], code="invalid_value")
    room = limits.context_len - num_prompt
    if room < 1:
        raise errors.prompt_too_long(num_prompt, limits.context_len, params[0])
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise errors.output_too_long(num_prompt, wanted, limits.context_len, params[1])
    return wanted


def truncated(ids: list[int], request: PromptFields, max_tokens: int | None, limits: Limits) -> list[int]:
    """Return a prompt cut as the request asks for, with room for `max_tokens`: by default it is not."""
    wanted = request.truncate_prompt_tokens
    if wanted is None or wanted == 0:
        return ids
    room = limits.context_len - max(max_tokens or 1, 1)
    most = max(1, min(room, len(ids) if wanted < 0 else wanted))
    return ids[:most] if request.truncation_side == "right" else ids[-most:]


def named_ids(request: PromptFields, has_logprobs: bool, limits: Limits) -> Sequence[int]:
    """Return the tokens that a request names for log probabilities.

    Raises:
        RequestError: It asks for no log probabilities, or an id is outside the vocabulary.
    """
    ids = request.logprob_token_ids or ()
    if ids and not has_logprobs:
        text = "logprob_token_ids needs logprobs"
        raise RequestError(text, param="logprob_token_ids", code="invalid_value")
    check_token_ids(ids, limits.vocab_size, "logprob_token_ids")
    return ids


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Derive the seed of choice `index`; choice 0 has the request's own, so that `n` does not change it."""
    return None if seed is None else derive_seed(seed & SEED_MASK, index)
