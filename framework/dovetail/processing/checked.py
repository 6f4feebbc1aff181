"""What an API's `read` makes of a body, held against the types and bounds of a `Request`: nothing else goes further.

The adapters of built-in APIs have checked their bodies, and name their own fields: theirs are not looked at again. One
of a package may let pass what a client sent: `limit: 1.5` or `n: 10**9` would fail in the engine's process, where
others' requests run. That is the client's fault, a `RequestError`; a part of another type the package's, a
`PluginError`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from reprlib import repr as short
from typing import Any, Required, TypedDict

import msgspec
from msgspec.structs import asdict, replace

from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.requests import (
    Chat,
    Cut,
    Dropped,
    JsonObject,
    Names,
    Prompt,
    Request,
    Sampling,
    Tools,
)
from dovetail.grammar.spec.fields import NAMES as GRAMMARS
from dovetail.processing.bounds import (
    BOUNDS,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_NAMED_IDS,
    MAX_SALT,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_TOKENS,
    POSITIVE,
    RID,
    is_within,
)
from dovetail.processing.refusals import empty_prompt, fields_named, wrong


class MessageFields(TypedDict, total=False):
    """What is read of a message by name; a template may read more."""

    role: Required[str]
    content: str | list[str | JsonObject] | JsonObject | None
    tool_calls: list[JsonObject] | None


class FunctionFields(TypedDict, total=False):
    """What is read of a function by name."""

    name: Required[str]
    description: str | None
    parameters: JsonObject | None


class ToolFields(TypedDict, total=False):
    """What is read of a tool by name."""

    function: Required[FunctionFields]


class _LargeParts(msgspec.Struct):
    prompts: list[Prompt] = []
    tools: Tools | None = None


class _Forms(msgspec.Struct):
    messages: list[MessageFields] = []
    tools: list[ToolFields] = []


OF_REQUEST: Mapping[str, tuple[float, float]] = {
    "limit": BOUNDS["max_tokens"],
    "n": (1, 128),
    "candidates": (0, 128),
    "priority": (-(1 << 31), (1 << 31) - 1),
    "needs_context": (0, (1 << 63) - 1),
    "prompt_logprobs_start": (0, MAX_TOKENS),
    **{name: BOUNDS[name] for name in ("logprobs", "prompt_logprobs", "thinking_budget")},
}
OF_SAMPLING = {name: BOUNDS[name] for name in Sampling.__struct_fields__ if name in BOUNDS}
LENGTHS = {"stop_token_ids": MAX_STOP_IDS, "allowed_token_ids": MAX_ALLOWED_IDS, "bad_words": MAX_BAD_WORDS}
MAX_BIAS = 1e9
MAX_KEPT, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Metadata of a stored reply, and characters of its names and values."""
PARTS: Mapping[str, tuple[Any, str]] = {
    "sampling": (Sampling, "a Sampling"),
    "names": (Names, "a Names"),
    "tools": (Tools | None, "a Tools, or None"),
    "cut": (Cut | None, "a Cut, or None"),
    "prompts": (list, "a list of Chat, Text and Ids"),
    "dropped": (list, "a list of Dropped"),
}
"""Fields that a package makes, with what they may be."""
ENTRIES: Mapping[str, Any] = {"prompts": Prompt, "dropped": Dropped}
ALIKE = ("model", "stream", "keeps")
"""Fields that several requests of one body have in common."""
OBJECTS = ("grammar", "template_kwargs", "reply")
"""Fields whose values may be anything that JSON can say."""
_PLAIN = Sampling()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode


def checked(given: Any, what: str) -> list[Request]:
    """Return requests as another process would get them: of plain values, each of its type and within its bounds.

    Args:
        given: What an API's `read` returned.
        what: That function, its route and package, for messages.

    Raises:
        RequestError: It names the field, as the API calls it.
        PluginError: They are no requests, or have what is no data: it names package and field.
    """
    requests = given if isinstance(given, list) else [given]
    if not requests or not all(isinstance(request, Request) for request in requests):
        raise PluginError(f"{what} returned {short(given)}; possible: a Request, or a list of them")
    made = []
    for request in requests:
        _check_parts(request, what)
        try:
            made.append(_checked(request))
        except RequestError:
            with fields_named(request.names.renamed):
                raise
        except TypeError as error:
            raise PluginError(f"{what} returned a Request with {_strange(request, error)}") from None
    for name in ALIKE:
        if any(getattr(one, name) != getattr(made[0], name) for one in made):
            text = f"the prompts of one body are to have one {name}; send what differs on its own"
            raise wrong(text, name)
    return made


def _check_parts(request: Request, what: str) -> None:
    """Refuse what nothing of a request could be read of.

    Raises:
        PluginError: It names the field, what it is, and what it may be.
    """
    for name, (kind, possible) in PARTS.items():
        value = getattr(request, name)
        entries = value if isinstance(value, list) and name in ENTRIES else ()
        if not isinstance(value, kind) or not all(isinstance(entry, ENTRIES[name]) for entry in entries):
            raise PluginError(f"{what} returned a Request whose {name} is {short(value)}; possible: {possible}")
    try:
        names = msgspec.convert(asdict(request.names), Names, strict=True)
        for pattern in names.renamed:
            re.compile(pattern)
    except (msgspec.ValidationError, re.error) as error:
        text = f"{what} returned a Request whose names are {short(request.names)}: {error}; possible: texts, and in"
        raise PluginError(f"{text} renamed texts by regular expressions") from None


def _strange(request: Request, error: TypeError) -> str:
    """Return which field holds what is no data."""
    for name in request.__struct_fields__:
        try:
            msgspec.json.encode(getattr(request, name))
        except TypeError as found:
            return f"an object in {name} ({found}); possible: plain values, which JSON can say"
        except (ValueError, OverflowError, RecursionError):
            continue
    return f"what is no data ({error}); possible: plain values"


def _checked(request: Request) -> Request:
    try:
        made = _sent(replace(request, prompts=[]))
        # Prompts may be large: their structs are read anew, their texts and numbers are not copied.
        prompts = msgspec.convert(
            {"prompts": [asdict(prompt) | {"type": type(prompt).__name__} for prompt in request.prompts]}, _LargeParts
        ).prompts
    except msgspec.ValidationError as error:
        raise _mistyped(error, request.names) from None
    except OverflowError:
        raise _unsendable("a whole number has more than 64 bits") from None
    except UnicodeEncodeError:
        raise _unsendable("a text holds half of a surrogate pair") from None
    except RecursionError:
        raise _unsendable("its values nest too deeply") from None
    if not prompts:
        raise empty_prompt(request.names.prompt)
    for prompt in prompts:
        if isinstance(prompt, Chat):
            check_forms("messages", prompt.messages, made.names.prompt)
    if made.tools is not None:
        check_forms("tools", made.tools.tools, made.names.tools)
    _check_numbers(request, OF_REQUEST, made.names)
    if request.sampling != _PLAIN:
        _check_numbers(request.sampling, OF_SAMPLING, made.names)
        check_sampling(request.sampling)
    if 0 < request.candidates < request.n:
        text = f"candidates must be 0 or at least n, of which it is what they are chosen from; not {request.candidates}"
        raise wrong(f"{text} with n {request.n}", "candidates")
    if request.stream and request.candidates > request.n:
        raise wrong("candidates above n cannot be streamed; leave out one of them", "candidates")
    if unknown := [name for name in request.grammar if name not in GRAMMARS]:
        raise wrong(f"grammar has {short(unknown[0])}; possible: {', '.join(GRAMMARS)}", "grammar")
    if made.keeps is not None:
        _check_length(made.keeps, MAX_KEPT, "metadata")
        if any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in made.keeps.items()):
            raise wrong(f"metadata may have names of {MAX_KEY} and values of {MAX_VALUE} characters", "metadata")
    _check_length(made.named_ids, MAX_NAMED_IDS, made.names.named_ids)
    _check_length(made.cache_salt, MAX_SALT, "cache_salt", "characters")
    if made.rid is not None and RID.fullmatch(made.rid) is None:
        raise wrong(f"rid must be 1 to 256 visible ASCII characters, not {made.rid[:64]!r}", "rid")
    if made.cut is not None and not -1 <= made.cut.most <= MAX_TOKENS:
        raise wrong(f"a prompt is cut to -1 to {MAX_TOKENS} tokens, not {made.cut.most}", made.names.prompt)
    return replace(made, prompts=prompts)


def _sent(request: Request) -> Request:
    """Return a request as another process reads it, without copies of what may be large.

    A client's objects, such as schemas, may hold whole numbers of any length: they go as JSON, which can say them.
    """
    sampling, tools = request.sampling, request.tools
    objects = {name: getattr(request, name) for name in OBJECTS}
    for name, value in {**objects, "logits_processors": sampling.logits_processors or {}}.items():
        if not isinstance(value, dict):
            raise wrong(f"{name}: expected `object`, got `{type(value).__name__}`", name)
    bias = sampling.logit_bias
    if bias is not None and not (isinstance(bias, dict) and all(map(_is_bias, bias.items()))):
        raise wrong("logit_bias must be an object of numbers by token id", "logit_bias")
    msgspec.json.encode((objects, sampling.logits_processors, tools))
    empty = replace(sampling, logit_bias=None, logits_processors=None)
    light = replace(request, grammar={}, template_kwargs={}, reply={}, sampling=empty, tools=None)
    made = _decode(_encode(light))
    if tools is not None:
        tools = msgspec.convert({"tools": asdict(tools)}, _LargeParts).tools
    whole = replace(made.sampling, logit_bias=bias, logits_processors=sampling.logits_processors)
    return replace(made, sampling=whole, tools=tools, **objects)


def _is_bias(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str | int) and isinstance(item[1], int | float) and not isinstance(item[1], bool)


def check_forms(name: str, values: list[JsonObject], param: str) -> None:
    """Refuse messages or tools that do not have their form; other fields may be anything.

    Args:
        name: `messages` or `tools`.
        values: They.
        param: What the API calls them.

    Raises:
        RequestError: It names the place.
    """
    try:
        msgspec.convert({name: values}, _Forms)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(f" - at `$.{name}")
        raise wrong(f"{param}{path.removesuffix('`')}: {text[:1].lower()}{text[1:]}", param) from None


def _check_numbers(struct: Any, bounds: Mapping[str, tuple[float, float]], names: Names) -> None:
    """Refuse what is out of bounds."""
    for name, (least, most) in bounds.items():
        value = getattr(struct, name)
        if value is not None and not is_within(name, value, bounds):
            param, above = getattr(names, name, name), "above" if name in POSITIVE else "from"
            raise wrong(f"{param} must be {above} {least} to {most}, not {value}", param)


def check_sampling(sampling: Sampling) -> None:
    """Refuse lists that are too long, and words and biases out of bounds.

    Raises:
        RequestError: It names the field.
    """
    for name, most in LENGTHS.items():
        if (values := getattr(sampling, name)) is not None:
            _check_length(values, most, name)
    if sampling.allowed_token_ids == []:
        raise wrong("allowed_token_ids is empty, so that nothing could be said; leave it out", "allowed_token_ids")
    for word in sampling.bad_words or ():
        if not 1 <= len(word) <= MAX_STOP_CHARS:
            raise wrong(f"bad_words must hold texts of 1 to {MAX_STOP_CHARS} characters", "bad_words")
    if sampling.logit_bias:
        _check_length(sampling.logit_bias, MAX_BIASES, "logit_bias")
        beyond = [value for value in sampling.logit_bias.values() if not -MAX_BIAS <= value <= MAX_BIAS]
        if beyond:
            text = f"logit_bias must hold numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {beyond[0]}"
            raise wrong(text, "logit_bias")


def _check_length(values: Collection[Any], most: int, param: str, what: str = "values") -> None:
    if len(values) > most:
        raise wrong(f"{param} has {len(values)} {what}; possible are up to {most}", param)


def _mistyped(error: msgspec.ValidationError, names: Names) -> RequestError:
    text, _, path = str(error).partition(" - at `$")
    found = re.match(r"(?:\.sampling)?\.(\w+)(.*)`", path)
    field = found[1] if found else ""
    param = names.prompt if field == "prompts" else getattr(names, field, field)
    return wrong(f"{param}{found[2] if found else ''}: {text[:1].lower()}{text[1:]}", param)


def _unsendable(why: str) -> RequestError:
    return RequestError(f"the request cannot be served: {why}", code="invalid_value")
