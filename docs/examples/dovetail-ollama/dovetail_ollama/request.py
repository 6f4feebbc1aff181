"""Bodies of Ollama's `/api/chat` and `/api/generate`, read into Dovetail's `Request`.

A field that would change the reply is served or refused; none is accepted and left out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dovetail.contracts.errors import RequestError
from dovetail.contracts.requests import Chat, Ids, JsonObject, Names, Request, Sampling, Text, Tools

S = TypeVar("S", bound=Struct)
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=-2, le=1 << 30)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Id = Annotated[str, Meta(max_length=256)]
Images = Annotated[list[str], Meta(max_length=1024)]
"""Each base64, without what a `data:` URL has before it."""
Refused = Any
"""A field of Ollama's that this server does not serve: any value but null is refused."""

BY_OPERATOR = "how the model is loaded is the operator's to say, when the server starts; leave it out"
NO_SHIFT = "nothing is shifted out of a full context here, a reply ends there; leave it out"
NO_PICTURES = "this server generates text only; leave it out"
NO_METHOD = "this sampling method is not implemented; leave it out"
WHY_NOT_OPTION = {
    **dict.fromkeys(("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "use_mmap", "use_mlock"), BY_OPERATOR),
    **dict.fromkeys(("num_thread", "vocab_only", "logits_all", "embedding_only", "f16_kv"), BY_OPERATOR),
    **dict.fromkeys(("tfs_z", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline"), NO_METHOD),
    "num_keep": NO_SHIFT,
}
OFF = {"tfs_z": 1, "typical_p": 1, "mirostat": 0}
"""Values that switch a method off, as it is."""
WHY_NOT = {
    **dict.fromkeys(("width", "height", "steps"), NO_PICTURES),
    "template": "a template in a request is not run; the operator may start with --chat-template FILE",
    "context": "Ollama itself has deprecated it; send the conversation to /api/chat",
}
NAMES = Names(
    prompt="messages",
    limit="options.num_predict",
    needs_context="options.num_ctx",
    logprobs="top_logprobs",
    renamed={
        r"response_format\.json_schema(?:\.schema)?": "format",
        "response_format": "format",
        "reasoning_effort": "think",
        "continue_final_message": "messages",
        r"stop(?![_a-z])": "options.stop",
    },
)
SAME = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
"""Options that have their own names in Dovetail."""
_DURATION = re.compile(r"[-+]?(?:0|(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+)")


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """`options`: those that are served."""

    num_predict: Count | None = None
    num_ctx: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    top_p: Unit | None = None
    min_p: Unit | None = None
    seed: Int64 | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=32)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both routes. `options` is read apart, as some of it is refused by name."""

    model: Name
    stream: bool | None = None
    options: JsonObject | None = None
    format: str | JsonObject | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function and what the model called it with."""

    name: Name
    arguments: JsonObject = {}
    description: str | None = None
    index: int | None = None


class Called(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in the history. Its `type` is what some clients copy from OpenAI's API."""

    function: CalledFunction
    id: Id | None = None
    type: Literal["function"] = "function"


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[Called], Meta(max_length=1024)] | None = None
    tool_name: Id | None = None
    tool_call_id: Id | None = None


class Function(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.:\-]+$")]
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool: only functions exist."""

    function: Function
    type: Literal["function"] = "function"


class ChatBody(Body, kw_only=True):
    """Body of `/api/chat`."""

    messages: Annotated[list[Message], Meta(max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None


class GenerateBody(Body, kw_only=True):
    """Body of `/api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Refused = None
    context: Refused = None
    images: Images | None = None
    width: Refused = None
    height: Refused = None
    steps: Refused = None


def read_chat(body: Any) -> Request:
    """Return the request that a body of `/api/chat` makes.

    Raises:
        RequestError: It is not of that form, or asks for what is not served.
    """
    given = converted(body, ChatBody)
    if not given.messages:
        return loading(given)
    messages = list(chat_messages(given.messages))
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise wrong("messages end with tool_calls; send the results, with role 'tool'", "messages")
    prompt = Chat(
        messages=messages,
        drops_turns=given.truncate is not False,
        continues=continues,
        add_generation_prompt=False if continues else None,
    )
    tools = None
    if given.tools:
        tools = Tools(
            tools=[{"type": "function", "function": msgspec.to_builtins(tool.function)} for tool in given.tools]
        )
    return Request(prompts=[prompt], tools=tools, names=NAMES, **wishes(given), **thinking(given.think))


def read_generate(body: Any) -> Request:
    """Return the request that a body of `/api/generate` makes.

    Raises:
        RequestError: It is not of that form, or asks for what is not served.
    """
    given = converted(body, GenerateBody)
    for name, why in WHY_NOT.items():
        if getattr(given, name):
            raise unsupported(name, why)
    if given.truncate:
        raise unsupported("truncate", "a prompt that is too long is refused here, not cut; leave it out or send false")
    if given.suffix and given.system:
        raise wrong("suffix fills in a text, which no system message belongs to; leave one of them out", "suffix")
    if not given.prompt and not given.suffix and not given.images:
        return loading(given)
    names = msgspec.structs.replace(NAMES, prompt="prompt")
    text = given.prompt or ""
    if not given.raw and not given.suffix:
        system = [{"role": "system", "content": given.system}] if given.system else []
        content = with_images(text, given.images, "images")
        chat = Chat(messages=[*system, {"role": "user", "content": content}])
        return Request(prompts=[chat], names=names, **wishes(given), **thinking(given.think))
    if given.raw and given.system:
        raise wrong("raw is a prompt without a template, which has no place for system; leave one out", "system")
    if given.images:
        raise wrong("images need the model's chat template, which raw and suffix leave out", "images")
    if given.think:
        raise wrong("think needs the model's chat template, which raw and suffix leave out", "think")
    return Request(prompts=[Text(text=text, suffix=given.suffix or "")], names=names, **wishes(given))


def loading(body: Body) -> Request:
    """Return the request of a body without a prompt, which has Ollama load the model: one token is read, for form.

    Raises:
        RequestError: Its fields are wrong in themselves.
    """
    thinking(body.think)
    made = wishes(body) | {"limit": 0, "logprobs": None, "grammar": {}}
    made["reply"] = {**made["reply"], "loads": True}
    return Request(prompts=[Ids(ids=[0])], names=NAMES, **made)


def converted(data: Any, kind: type[S], place: str = "") -> S:
    """Return a value as a struct.

    Raises:
        RequestError: It is not of that form; in the words of msgspec, with the place as `param`.
    """
    if not isinstance(data, Mapping):
        raise wrong(f"{place or 'the body'} must be a JSON object", place or None)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        missing = re.search(r"required field `(.+)`", text)
        unknown = re.search(r"unknown field `(.+)`", text)
        found = missing or unknown
        where = f"{place}{path.removesuffix('`')}" + (f".{found[1]}" if found else "")
        where = where.removeprefix(".")
        if missing:
            text = "is required"
        elif unknown:
            text = f"is not known; possible here: {', '.join(fields_at(kind, path))}"
        raise wrong(f"{where or 'the body'}: {text[:1].lower()}{text[1:]}", where or None) from None


def fields_at(kind: type[Struct], path: str) -> Sequence[str]:
    """Return the fields that an object at a place may have."""
    homes: Mapping[str, type[Struct]] = {"messages": Message, "tools": Tool, "tool_calls": Called}
    last = re.sub(r"\[.*?\]", "", path.removesuffix("`")).rpartition(".")[2]
    if last == "function":
        return (CalledFunction if "tool_calls" in path else Function).__struct_fields__
    return homes.get(last, kind).__struct_fields__


def wishes(body: Body) -> JsonObject:
    """Return the fields of a `Request` that both routes read alike.

    Raises:
        RequestError: Naming the field.
    """
    check_keep_alive(body.keep_alive)
    if body.shift:
        raise unsupported("shift", "nothing is shifted out of a full context here; leave it out or send false")
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs needs logprobs: true", "top_logprobs")
    options = options_of(body.options or {})
    limit = options.num_predict
    if limit == 0:
        raise wrong("options.num_predict must be at least 1; -1 is for up to the context's end", "options.num_predict")
    return {
        "model": body.model,
        "stream": body.stream is not False,
        "sampling": Sampling(
            **{name: getattr(options, name) for name in SAME},
            repetition_penalty=options.repeat_penalty,
            seed=None if options.seed == -1 else options.seed,
            stop=options.stop or None,
        ),
        "limit": limit if limit is not None and limit > 0 else None,
        "clamps": limit is not None and limit > 0,
        "needs_context": options.num_ctx or 0,
        "logprobs": body.top_logprobs or 0 if body.logprobs else None,
        "grammar": grammar_of(body.format),
        "reply": {},
    }


def options_of(given: JsonObject) -> Options:
    """Return the options.

    Raises:
        RequestError: One is not served, or no option at all.
    """
    served = {}
    for name, value in given.items():
        if name not in WHY_NOT_OPTION:
            served[name] = value
        elif value is not None and (isinstance(value, bool) or value != OFF.get(name)):
            raise unsupported(f"options.{name}", WHY_NOT_OPTION[name])
    made = converted(served, Options, "options")
    if made.repeat_last_n not in (None, -1):
        why = "penalties look at all tokens of the request here; leave it out or send -1"
        raise unsupported("options.repeat_last_n", why)
    return made


def grammar_of(given: str | JsonObject | None) -> JsonObject:
    """Return `format` as the chat API's `response_format`.

    Raises:
        RequestError: It is another word than `json`.
    """
    if given is None or given == "":
        return {}
    if isinstance(given, Mapping):
        schema = {"name": "format", "schema": given, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if given != "json":
        raise wrong(f"format must be 'json' or a JSON schema (given: {shortened(given)!r})", "format")
    return {"response_format": {"type": "json_object"}}


def thinking(think: bool | str | None) -> JsonObject:
    """Return the template's switches.

    Raises:
        RequestError: It is another word than Ollama's.
    """
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"template_kwargs": {"thinking": think, "enable_thinking": think}, "no_thinking": not think}
    if think not in ("low", "medium", "high", "max"):
        why = f"think must be true, false, 'low', 'medium', 'high' or 'max' (given: {shortened(think)!r})"
        raise wrong(why, "think")
    return {"effort": think}


def check_keep_alive(given: float | str | None) -> None:
    """Refuse what is no time, and 0: the model stays loaded, longer than any time that is asked for.

    Raises:
        RequestError: See above.
    """
    if given is None:
        return
    if isinstance(given, str) and (len(given) > 64 or not _DURATION.fullmatch(given)):
        raise wrong(f"keep_alive must be seconds or a text such as '5m' (given: {shortened(given)!r})", "keep_alive")
    if given == 0 or (isinstance(given, str) and not re.search("[1-9]", given)):
        raise unsupported("keep_alive", "0 unloads the model, which this server keeps loaded; leave it out")


def chat_messages(messages: Sequence[Message]) -> list[JsonObject]:
    """Return messages as OpenAI's chat API has them. Results belong to the calls before them, by id, name or order.

    Raises:
        RequestError: A message has what its role does not.
    """
    made: list[JsonObject] = []
    waiting: list[tuple[str, str]] = []
    for at, message in enumerate(messages):
        place = f"messages[{at}]"
        of_role: JsonObject = {}
        if message.role == "assistant":
            waiting = [
                (call.id or f"call_{at}_{k}", call.function.name) for k, call in enumerate(message.tool_calls or ())
            ]
            if message.tool_calls:
                of_role["tool_calls"] = [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": msgspec.json.encode(call.function.arguments).decode()},
                    }
                    for call, (call_id, name) in zip(message.tool_calls, waiting, strict=True)
                ]
            if message.thinking:
                of_role["reasoning_content"] = message.thinking
        elif message.tool_calls or message.thinking:
            name = "tool_calls" if message.tool_calls else "thinking"
            raise wrong(f"{place}.{name} belongs to role 'assistant'", f"{place}.{name}")
        if message.role == "tool":
            of_role |= result_of(message, waiting)
        elif message.tool_name or message.tool_call_id:
            raise wrong(f"{place}: tool_name and tool_call_id belong to role 'tool'", place)
        content = with_images(message.content or "", message.images, f"{place}.images")
        made.append({"role": message.role, "content": content, **of_role})
    return made


def with_images(text: str, images: Sequence[str] | None, place: str) -> str | list[JsonObject]:
    """Return a message's content with its images before the text, as content parts of OpenAI's chat API."""
    if not images:
        return text
    made: list[JsonObject] = [
        {"type": "image_url", "image_url": f"data:;base64,{image}", "param": f"{place}[{at}]"}
        for at, image in enumerate(images)
    ]
    return [*made, {"type": "text", "text": text}] if text else made


def result_of(message: Message, waiting: list[tuple[str, str]]) -> JsonObject:
    """Return whose result a message is; that call waits no more."""

    def fits(call: tuple[str, str]) -> bool:
        return message.tool_call_id == call[0] if message.tool_call_id else message.tool_name in (None, "", call[1])

    found = next(filter(fits, waiting), None)
    if found is not None:
        waiting.remove(found)
    call_id, name = found or ("", "")
    made = {"tool_call_id": message.tool_call_id or call_id, "name": message.tool_name or name}
    return {key: value for key, value in made.items() if value}


def shortened(text: str) -> str:
    """Return the beginning of a text that a refusal repeats."""
    return text if len(text) <= 64 else f"{text[:64]}…"


def wrong(text: str, param: str | None) -> RequestError:
    """Return a refusal of a value that means nothing."""
    return RequestError(text, param=param, code="invalid_value")


def unsupported(param: str, why: str) -> RequestError:
    """Return a refusal of what is not served."""
    return RequestError(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")
