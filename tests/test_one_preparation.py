"""The server and `LLM` make the same of the same request: prompt, parameters, grammar, reading, or refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from dovetail import LLM, SamplingParams
from dovetail.contracts.api import Route
from dovetail.contracts.errors import RequestError
from dovetail.processing.input import Preparation
from dovetail.processing.plan import plan_plugins
from dovetail.processing.processor import Processor
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_server.apis.routes import CHAT, COMPLETIONS
from dovetail_server.errors import catalogue as errors
from dovetail_server.serving.job import make_generation
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight
from dovetail_testing.folder import unread_model

ASK = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
STRICT = {"type": "function", "function": {"name": "strictly", "parameters": CITY, "strict": True}}
NO_SCHEMA = {"type": "function", "function": {"name": "bad", "parameters": {"type": "strange"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
THINKS = {"enable_thinking": True}

SAMPLED: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 100, 101, -1, "x"],
    "top_p": [0, 0.3, 1.5],
    "top_k": [0, -1, 50, -2, 1.5],
    "min_p": [0.1, 2],
    "frequency_penalty": [1.5, 3],
    "presence_penalty": [0.5, -3],
    "repetition_penalty": [1.2, 0, 3],
    "max_tokens": [1, 40, -5],
    "min_tokens": [3, 5000, -1],
    "n": [3, 0],
    "stop": ["x", ["a", "bc"], "", ["a"] * 33, ["a" * 5000], []],
    "stop_token_ids": [[1, 2], [999999]],
    "stop_regex": ["a+", "(", ["x", "y+"]],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "logit_bias": [{"5": 1000, "6": -3.5}, {"999999": 1}, {"x": 1}, {"-4": 1}],
    "seed": [0, 7, -1, 1 << 62, 1 << 64],
    "allowed_token_ids": [[1, 2, 2], [99999]],
    "bad_words": [["Paris", " a"]],
    "logits_processors": [{"no-such": {}}],
    "prompt_logprobs": [0, 3, 21, -1, -2],
    "response_format": [{"type": "json_object"}, {"type": "text"}, {"type": "nonsense"}],
    "regex": ["[0-9]+", "("],
    "ebnf": ['root ::= "a"', "root"],
    "json_schema": [{"type": "integer"}, "not json", {"type": "odd"}],
    "structured_outputs": [{"choice": ["a", "b"]}, {"regex": "a", "choice": ["b"]}, {"whatever": 1}],
    "grammar_backend": ["auto", "nonsense"],
}
"""Fields of every request, at ordinary and wrong values."""
CHATS: list[dict[str, Any]] = [
    {"tools": [TOOL]},
    {"tools": [STRICT]},
    {"tools": [NO_SCHEMA]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": []},
    {"tool_choice": "required"},
    *({"tools": [TOOL], "tool_choice": choice} for choice in ("auto", "none", "required", "sometimes", NAMED)),
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
    {"tools": [TOOL, STRICT], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
    {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
    {"tools": [TOOL], "tool_choice": "required", "regex": "[0-9]+"},
    {"tools": [TOOL], "regex": "[0-9]+"},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": "required", "thinking_budget": 5, "chat_template_kwargs": THINKS},
    {"tools": [TOOL], "tool_choice": "required", "grammar_backend": "nonsense"},
    {"regex": "a", "ebnf": 'root ::= "a"'},
    {"regex": "a", "thinking_budget": 2, "reasoning_effort": "high"},
    {"thinking_budget": 2, "reasoning_effort": "high"},
    {"thinking_budget": 2},
    {"thinking_budget": -1},
    *({"reasoning_effort": effort} for effort in ("none", "low", "huge")),
    {"separate_reasoning": False},
    {"chat_template_kwargs": THINKS},
    {"chat_template_kwargs": {"messages": []}},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"messages": [*ASK, {"role": "assistant", "content": "Par"}], "continue_final_message": True},
    {"documents": [{"text": "a"}]},
    {"n": 3, "seed": 7},
    {"max_tokens": 4, "min_tokens": 5},
    {"messages": [{"role": "user", "content": "x" * 70000}]},
    {"messages": [{"role": "user", "content": "word " * 5000}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
]
SCHEMA = "refused by the schema"
CHAT_ARGUMENTS = (
    *("tools", "tool_choice", "parallel_tool_calls", "documents", "add_generation_prompt", "continue_final_message"),
    *("reasoning_effort", "separate_reasoning", "chat_template_kwargs"),
)
"""Arguments of `LLM.chat`; the others are fields of `SamplingParams`."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=16384, device="cpu") as model:
        yield model


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Any]:
    """What the server's preparation needs of its state."""
    made = preflight.with_model(ServeSettings(log_level="error", device="cpu", max_total_tokens=16384, port=0))
    made, _, plan = plan_plugins(made, unread_model())
    text = Processor.load(made, plan, ModelFolder(made.folder, weights=False)).with_engine_limits(llm.info, made)
    yield SimpleNamespace(text=text, check_generated=lambda num: None, settings=made)
    text.grammar.close()


def cases() -> list[dict[str, Any]]:
    return [{}, *({name: value} for name, values in SAMPLED.items() for value in values)]


def outcome(make: Callable[[], list[Any]]) -> Any:
    """What is sent to the engine and how the reply is read, or the refusal's field, words and code."""
    try:
        jobs = make()
    except RequestError as error:
        root = (error.param or "").split(".")[0].split("[")[0]
        return root, error.message.removeprefix("prompt 0: "), error.code
    found = []
    for job in jobs:
        submit = msgspec.structs.replace(job.submit, rid="")
        output = vars(job.output)
        kept = {name: output[name] for name in ("_no_stop_trim", "_min_tokens", "_separate")}
        found.append((submit, job.route, kept, type(output["_parser"]), repr(output["_stops"]).split(" at 0x")[0]))
    return found


def served(server: Any, route: Route, body: dict[str, Any]) -> Any:
    def make() -> list[Any]:
        try:
            request = route.body.model_validate(body)
        except ValidationError as error:
            found = errors.from_validation(error, body, list(route.body.model_fields))
            raise RequestError(SCHEMA, param=found.param) from None
        return list(make_generation(server, route.requests(request), "m", "").choices)

    return outcome(make)


def offline(llm: LLM, body: dict[str, Any]) -> Any:
    """The same through `LLM`; what is left out is the model's, as where a call gives no parameters."""
    given = dict(body)
    arguments = {name: given.pop(name) for name in CHAT_ARGUMENTS if name in given}
    messages, prompt = given.pop("messages", None), given.pop("prompt", None)

    def make() -> list[Any]:
        params = SamplingParams(**{"max_tokens": None, **llm._processor.limits.defaults, **given})
        if messages is None:
            return llm._requests.continued(0, llm._encode(prompt), params)
        [conversation] = llm._requests.conversations([messages], **arguments)
        return llm._requests.answered(0, conversation, params)

    return outcome(make)


def check(there: Any, here: Any, body: dict[str, Any]) -> None:
    """A refusal by the schema has pydantic's words; every other one is the same to the letter."""
    if isinstance(there, tuple) and isinstance(here, tuple) and there[1] == SCHEMA:
        there, here = there[0], here[0]
    assert there == here, body


@pytest.mark.parametrize("body", [*cases(), *CHATS], ids=lambda body: ",".join(body))
def test_a_conversation_is_prepared_alike(llm: LLM, server: Any, body: dict[str, Any]) -> None:
    """A chat request and the same arguments of `LLM.chat` come to the same."""
    body = {"messages": ASK, **body}
    check(served(server, CHAT, body), offline(llm, body), body)


@pytest.mark.parametrize("body", cases(), ids=lambda body: ",".join(body))
def test_a_text_is_prepared_alike(llm: LLM, server: Any, body: dict[str, Any]) -> None:
    """A completion request and the same arguments of `LLM.generate` come to the same."""
    body = {"prompt": "Once upon a time", "max_tokens": 16, **body}
    check(served(server, COMPLETIONS, body), offline(llm, body), body)


def test_one_thing_differs(llm: LLM, server: Any) -> None:
    """A server refuses a reply longer than the context; `LLM`, whose prompts differ in length, ends it there."""
    body = {"prompt": "Once upon a time", "max_tokens": 100_000}
    assert served(server, COMPLETIONS, body)[2] == "context_length_exceeded"
    [job] = offline(llm, body)
    assert job[0].params.max_tokens == llm._processor.limits.context_len - len(job[0].prompt_ids)


def test_settings_of_prompts_and_defaults_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server takes for requests that leave things out, `LLM` takes where a call gives no parameters."""
    with LLM(
        max_total_tokens=1024,
        device="cpu",
        preferred_sampling_params={"temperature": 0.25},
        default_chat_template_kwargs=THINKS,
        max_logprobs=2,
    ) as model:
        [params] = model._requests.each(None, 1)
        assert params.temperature == 0.25
        [conversation] = model._requests.conversations([ASK])
        assert Preparation(model._processor, conversation).template_kwargs == THINKS
        with pytest.raises(RequestError, match="logprobs may be up to 2"):
            model.generate("a", SamplingParams(logprobs=3))
