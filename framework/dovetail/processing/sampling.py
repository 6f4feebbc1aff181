"""From what a request asks for to the engine's `SamplerParams`, and the one check of token ids from outside.

The server's bodies and `dovetail.SamplingParams` become one struct, `Sampling`, which is read here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypedDict

from pydantic import TypeAdapter, ValidationError

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.requests import Sampling
from dovetail.contracts.seeds import derive_seed
from dovetail.messages import SamplerParams
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.kinds import normalise
from dovetail.processing.bounds import MAX_STOP_CHARS, MAX_STOPS
from dovetail.processing.refusals import output_too_long, prompt_too_long, wrong
from dovetail.sdk.formats.stop_regex import compile_stop
from dovetail.text.tokenizer.tokenizer import Tokenizer

# What requests say to logits processors, checked by what each processor declares.

KIND = "logits_processor"
FIELD = "logits_processors"


class LogitsRequests:
    """Reads the field `logits_processors` of requests. Safe to share between threads."""

    def __init__(self, served: Mapping[str, type[LogitsProcessor]]) -> None:
        """`served` are the processors' classes by name."""
        self._served = {normalise(KIND, name): (name, cls) for name, cls in served.items()}

    @classmethod
    def load(cls, plugins: LoadedPlugins) -> LogitsRequests:
        """Take those of a process's plan."""
        return cls({planned.name: plugin for planned, plugin in plugins.candidates(KIND)})

    def read(self, given: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
        """Return what a request asks for as plain values, complete with defaults, by the processors' own names.

        Raises:
            RequestError: A processor is not served, or its parameters are not as it declares them.
        """
        found: dict[str, dict[str, Any]] = {}
        for written, params in (given or {}).items():
            known = self._served.get(normalise(KIND, written))
            if known is None:
                names = ", ".join(name for name, _ in self._served.values())
                what = f"served: {names}" if names else "none is served; start the server with --logits-processors NAME"
                raise wrong(f"{FIELD}: {written!r} is no logits processor of this server; {what}", FIELD)
            name, plugin = known
            if name in found:
                raise wrong(f"{FIELD}: {name!r} is given twice", FIELD)
            found[name] = _checked(name, plugin.Params, params)
        return found


def _checked(name: str, declared: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    fields = getattr(declared, "model_fields", None)
    known = list(fields) if fields is not None else [field.name for field in dataclasses.fields(declared)]
    for written in given:
        if written not in known:
            near = difflib.get_close_matches(written, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"possible: {', '.join(known) or 'none'}"
            raise wrong(f"{FIELD}: {name}: {written!r} is unknown; {hint}", FIELD)
    adapter = TypeAdapter(declared)
    try:
        made = adapter.validate_python(dict(given), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise wrong(f"{FIELD}: {name}: {where}: {text[:1].lower()}{text[1:]}", FIELD) from None
    return dict(adapter.dump_python(made, mode="json"))


MAX_BIAS = 100.0
_TOKEN_ID = re.compile("-?[0-9]{1,11}")
_SURROGATE = re.compile("[\ud800-\udfff]")
SEED_MASK = (1 << 63) - 1
_AS_GIVEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "seed")
"""Parameters that the engine gets as they are, where they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """What the model and the settings allow. `defaults` are the model's own sampling values."""

    vocab_size: int
    context_len: int
    max_prompt_bytes: int
    max_logprobs: int = 20
    """Most likely tokens that a request may ask for; -1: all."""
    max_tokens_beyond: str | None = None
    """`clamp` or `refuse`: what becomes of a limit beyond the context; None: as the API's clients expect."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


class StopRules(TypedDict):
    """How decoded text ends, as `OutputStream` takes it; token-level rules are in `SamplerParams`."""

    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    no_stop_trim: bool
    min_tokens: int
    skip_special_tokens: bool


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary. Every id that comes from outside passes through here.

    Raises:
        RequestError: An id is no whole number, negative or not below `vocab_size`.
    """
    bad = next((repr(i) for i in ids if not isinstance(i, int | Integral) or not 0 <= i < vocab_size), None)
    if bad is not None:
        text = f"{param} holds token id {bad:.32}, but this model's ids go from 0 to {vocab_size - 1}"
        raise RequestError(text, param=param, code="invalid_token_id")


def num_top(wanted: int | None, limits: SamplingLimits, param: str) -> int | None:
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
    raise wrong(text, param)


def word_ids(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, as it is written at the beginning of a word and within one.

    A word with a token of `vocab_size` or more, which the model cannot sample, is left out.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(ids for ids in found if ids and max(ids) < vocab_size)


def stop_rules(asked: Sampling) -> StopRules:
    """Collect the text-level stop rules.

    Raises:
        RequestError: Too many or an empty one, or an expression that is none.
    """
    expressions = _several(asked.stop_regex, "stop_regex")
    for source in expressions:
        compile_stop(source)
    return StopRules(
        stop=_several(asked.stop, "stop"),
        stop_regex=expressions,
        no_stop_trim=asked.keeps_stop,
        min_tokens=asked.min_tokens or 0,
        skip_special_tokens=asked.skip_special_tokens is not False,
    )


def _several(value: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(texts) > MAX_STOPS:
        raise wrong(f"{param} holds {len(texts)} texts; possible are up to {MAX_STOPS}", param)
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise wrong(f"{param} must hold texts of 1 to {MAX_STOP_CHARS} characters", param)
        if _SURROGATE.search(text):
            raise wrong(f"{param} has text with half of a surrogate pair; send whole characters", param)
    return texts


def sampling_params(
    asked: Sampling, tokenizer: Tokenizer, limits: SamplingLimits, *, max_tokens: int, use_defaults: bool
) -> SamplerParams:
    """Build what the engine gets but for log probabilities and logits processors, seed still as given.

    Args:
        asked: The request; its numbers were checked, see `BOUNDS`.
        tokenizer: The model's.
        limits: The model's.
        max_tokens: As resolved against the context.
        use_defaults: Take what is left out from the model's generation config.

    Raises:
        RequestError: A token id outside the vocabulary, or `min_tokens` above `max_tokens`.
    """
    given = {name: value for name in _AS_GIVEN if (value := getattr(asked, name)) is not None}
    values: dict[str, Any] = {**(limits.defaults if use_defaults else {}), **given}
    if values.get("top_p") == 0:
        values |= {"top_p": 1.0, "temperature": 0.0}
    if values.get("top_k") == 0:
        values["top_k"] = -1
    stop_ids = tuple(asked.stop_token_ids or ())
    for ids, name in ((stop_ids, "stop_token_ids"), (asked.allowed_token_ids, "allowed_token_ids")):
        if ids:
            check_token_ids(ids, limits.vocab_size, name)
    if (min_tokens := asked.min_tokens or 0) > max_tokens:
        why = f"min_tokens is {min_tokens}, above the {max_tokens} tokens that this reply may have"
        raise wrong(why, "min_tokens")
    return SamplerParams(
        max_tokens=max_tokens,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        stop_token_ids=stop_ids,
        logit_bias=logit_bias(asked.logit_bias, limits.vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(asked.allowed_token_ids or ())),
        bad_words=word_ids(asked.bad_words or (), tokenizer, limits.vocab_size),
        **values,
    )


def logit_bias(given: Mapping[Any, float] | None, vocab_size: int) -> dict[int, float]:
    """Read the keys as token ids and clamp the values to ±100.

    Raises:
        RequestError: A key is no id of this model, or a value no number.
    """
    if not given:
        return {}
    texts = [str(key) for key in given]
    bad = next((key for key in texts if not _TOKEN_ID.fullmatch(key)), None)
    if bad is not None:
        text = f"logit_bias: {bad[:32]!r} is no token id; keys are ids written as digits"
        raise RequestError(text, param="logit_bias", code="invalid_token_id")
    bad = next((key for key, value in zip(texts, given.values(), strict=True) if math.isnan(value)), None)
    if bad is not None:
        raise wrong(f"logit_bias: token {bad} has NaN, which is no number; possible: -100 to 100", "logit_bias")
    bias = {int(key): max(-MAX_BIAS, min(MAX_BIAS, value)) for key, value in zip(texts, given.values(), strict=True)}
    check_token_ids(bias, vocab_size, "logit_bias")
    return bias


def fit_output(
    num_prompt: int, wanted: int | None, default: int | None, limits: SamplingLimits, params: tuple[str, str]
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
        raise wrong(f"{params[1]} must be at least 1 (given: {wanted})", params[1])
    room = limits.context_len - num_prompt
    if room < 1:
        raise prompt_too_long(num_prompt, limits.context_len, params[0])
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise output_too_long(num_prompt, wanted, limits.context_len, params[1])
    return wanted


def named_ids(ids: Sequence[int], has_logprobs: bool, limits: SamplingLimits, param: str) -> Sequence[int]:
    """Return the tokens that a request names for log probabilities.

    Raises:
        RequestError: It asks for no log probabilities, or an id is outside the vocabulary.
    """
    if ids:
        if not has_logprobs:
            raise wrong(f"{param} needs logprobs", param)
        check_token_ids(ids, limits.vocab_size, param)
    return ids


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Derive the seed of choice `index`; choice 0 has the request's own, so that `n` does not change it."""
    return None if seed is None else derive_seed(seed & SEED_MASK, index)
