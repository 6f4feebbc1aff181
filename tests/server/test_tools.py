"""Tools and reasoning over HTTP: what a request may say, what is refused, and the endpoints for finished outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from exchanges import error_of, events, fold_chat
from harness import Harness

from dovetail.contracts import FormatSpec, ReasoningParser, TemplateView, TokenizerView
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.reasoning import ParserRequest
from dovetail.processing.prepare import prepare
from dovetail.processing.processor import Processor
from dovetail.text.parsing.fitted import GuardedReasoning
from dovetail_server.apis.parsing.schema import ParseFunctionCallRequest, SeparateReasoningRequest
from dovetail_server.apis.parsing.serve import installed, parse_calls, separate_reasoning
from dovetail_server.settings.serve import ServeSettings
from dovetail_testing.site import FakeSite

USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CHAT = "/v1/chat/completions"


def tool(name: str = "get_weather", parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, **fields}


def prompt_of(harness: Harness) -> str:
    return harness.tokenizer.decode(harness.engine.submits[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": "get_weather"}, "tools": [tool()]}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": "all"}}, "tools": [tool()]},
            "tool_choice",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": "x"}]},
                },
                "tools": [tool()],
            },
            "tool_choice",
        ),
        ({"tools": [tool(parameters={"type": "objekt"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(), tool("f", {"properties": 3})]}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters={"required": "city"})], "tool_choice": "none"}, "tools[0].function.parameters"),
        ({"functions": [{"name": "f", "parameters": {"type": 3}}]}, "functions[0].parameters"),
        ({"tools": [tool(parameters={"type": "string"})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"type": ["array", "null"]})], "tool_choice": "required"}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_bad_requests_name_their_field(thinking: Harness, fields: dict[str, Any], param: str) -> None:
    """Each is a 400 with `param`, nothing reaches the engine, and the next request is served."""
    reply = thinking.post(CHAT, body(**fields))
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param
    assert not thinking.engine.submits
    assert thinking.post(CHAT, body()).status_code == 200


def test_allowed_tools_hides_the_others(thinking: Harness) -> None:
    """The model sees only what it may call."""
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("now")]}}
    assert thinking.post(CHAT, body(tools=[tool(), tool("now")], tool_choice=choice)).status_code == 200
    assert "now" in prompt_of(thinking)
    assert "get_weather" not in prompt_of(thinking)


def test_an_unknown_tool_is_surfaced(thinking: Harness) -> None:
    """A call of a function that was not offered reaches the client, which can answer it."""
    thinking.text = CALL.replace("get_weather", "get_wether")
    (choice,) = thinking.post(CHAT, body(tools=[tool()])).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_wether"


def test_output_that_no_format_explains_is_content(thinking: Harness) -> None:
    """Text between the markers that is no call comes back as written, streamed and whole."""
    thinking.text = "<think>\nhm\n</think>\n\n<tool_call>\nnot a call\n</tool_call> so"
    (choice,) = thinking.post(CHAT, body(tools=[tool()])).json()["choices"]
    assert choice["message"]["content"] == "<tool_call>\nnot a call\n</tool_call> so"
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("hm", "stop")
    folded = fold_chat(events(thinking.post(CHAT, body(tools=[tool()], stream=True))))[0]
    assert folded["content"] == choice["message"]["content"]


def test_reasoning_and_results_go_back_to_the_template(thinking: Harness) -> None:
    """A history with reasoning under either name, calls and a result renders as the model wrote it."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    for field in ("reasoning_content", "reasoning"):
        history = [
            *USER,
            {"role": "assistant", "content": None, field: "I look it up.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
        reply = thinking.post(CHAT, {"model": "tiny", "messages": history, "tools": [tool()]})
        assert reply.status_code == 200, reply.text


def test_separate_reasoning(thinking: Harness, harness: Harness) -> None:
    """The server's own parser, another built-in under any spelling, and what the prompt ended with."""
    post = thinking.post("/separate_reasoning", {"text": "<think>\nwhy\n</think>\n\nso"})
    assert post.json() == {"reasoning_text": "why", "text": "so"}
    post = thinking.post("/separate_reasoning", {"text": "why\n</think>\n\nso", "reasoning_parser": "deepseek_r1"})
    assert post.json() == {"reasoning_text": "why", "text": "so"}
    post = thinking.post("/separate_reasoning", {"text": "why</think>so", "prompt_tail": "<think>\n"})
    assert post.json() == {"reasoning_text": "why", "text": "so"}
    reply = thinking.post("/separate_reasoning", {"text": "x", "reasoning_parser": "os"})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "reasoning_parser")
    reply = harness.post("/separate_reasoning", {"text": "x"})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "reasoning_parser")


def test_parse_function_call(thinking: Harness, harness: Harness) -> None:
    """Calls with their place among the tools, and the text around them."""
    sent = {"text": f"so\n{CALL}\n{CALL.replace('get_weather', 'other')}", "tools": [tool("now"), tool()]}
    assert thinking.post("/parse_function_call", sent).json() == {
        "normal_text": "so",
        "calls": [
            {"tool_index": 1, "name": "get_weather", "parameters": '{"city": "Paris"}'},
            {"tool_index": -1, "name": "other", "parameters": '{"city": "Paris"}'},
        ],
    }
    sent = {"text": "[now()]", "tools": [tool("now")], "tool_call_parser": "llama4_pythonic"}
    assert harness.post("/parse_function_call", sent).json()["calls"][0]["name"] == "now"
    reply = harness.post("/parse_function_call", {"text": "x", "tool_call_parser": "nope"})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "tool_call_parser")
    assert "hermes" in error_of(reply)["message"]
    reply = harness.post("/parse_function_call", {"text": "a\ud800", "tool_call_parser": "hermes"})
    assert reply.status_code == 400


def test_the_servers_own_parsers_have_names(dovetail_site: FakeSite) -> None:
    """Those of a package, too, under any spelling and with their package; what nobody chose is not imported."""
    source = """
from dataclasses import replace
from dovetail.contracts import FormatSpec, Markers, ReasoningParser, ToolFormat, ToolParser
from dovetail.sdk.formats.json_calls import JsonCalls
class R(ReasoningParser):
    def spec(self, tokenizer, template, request): return FormatSpec(reasoning=Markers("<r>", "</r>"))
class T(ToolParser):
    def extend(self, spec, tools): return replace(spec, tools=ToolFormat("<do>", "</do>", body=JsonCalls))
"""
    kinds = {"dovetail.reasoning_parsers.v1": {"acme-r": "acme_both:R", "other-r": "not_there:R"}}
    dovetail_site.add(
        "acme", "1.0", {**kinds, "dovetail.tool_parsers.v1": {"acme-do": "acme_both:T"}}, {"acme_both.py": source}
    )
    made = prepare(ServeSettings(reasoning_parser="acme-r", tool_call_parser="acme-do", device="cpu"))
    text = Processor.load(made.settings, made.plan, made.model)
    installed.cache_clear()
    try:
        for name in (None, "acme-do", "Acme_Do", "acme:acme-do"):
            call = '<do>{"name": "f", "arguments": {}}</do>'
            found = json.loads(parse_calls(text, ParseFunctionCallRequest(text=call, tool_call_parser=name)))
            assert found["calls"] == [{"tool_index": -1, "name": "f", "parameters": "{}"}]
        for name in (None, "acme-r", "acme:acme-r"):
            asked = SeparateReasoningRequest(text="<r>a</r>b", reasoning_parser=name)
            assert json.loads(separate_reasoning(text, asked)) == {"reasoning_text": "a", "text": "b"}
        with pytest.raises(
            RequestError, match=r"'other-r' is neither a built-in parser nor this server's own; .*acme-r"
        ):
            separate_reasoning(text, SeparateReasoningRequest(text="x", reasoning_parser="other-r"))
    finally:
        installed.cache_clear()


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        (
            "reasoning_parser",
            "def spec(self, *args): raise ValueError('no markers')",
            "spec() failed: ValueError: no markers",
        ),
        ("reasoning_parser", "def spec(self, *args): return None", "spec() returned None, not a FormatSpec"),
        ("tool_call_parser", "def extend(self, *args): return {}['x']", "extend() failed: KeyError: 'x'"),
    ],
)
def test_a_parser_that_declares_no_format_stops_the_start(
    dovetail_site: FakeSite, kind: str, source: str, said: str
) -> None:
    """With its kind, name and package, and what it raised or returned."""
    base, group = {
        "reasoning_parser": ("ReasoningParser", "dovetail.reasoning_parsers.v1"),
        "tool_call_parser": ("ToolParser", "dovetail.tool_parsers.v1"),
    }[kind]
    code = f"from dovetail.contracts import {base}\nclass P({base}):\n    {source}\n"
    dovetail_site.add("acme", "1.0", {group: {"acme-p": "acme_faulty:P"}}, {"acme_faulty.py": code})
    made = prepare(ServeSettings.model_validate({kind: "acme-p", "device": "cpu"}))
    with pytest.raises(PluginError) as caught:
        Processor.load(made.settings, made.plan, made.model)
    assert str(caught.value) == f"{kind.replace('_call', '')} 'acme-p' of acme 1.0: {said}"


class Moody(ReasoningParser):
    """Fails for some requests only."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare nothing, or fail."""
        if request.template_kwargs.get("mood"):
            raise ValueError("bad mood")
        return FormatSpec()


def test_a_parser_that_fails_in_a_request_is_named(make_harness: Callable[..., Harness]) -> None:
    """The client and the log learn whose fault it is."""
    moody = GuardedReasoning(Moody(), "reasoning_parser 'moody' of acme 1.0")
    harness = make_harness(reasoning=moody)
    assert harness.post(CHAT, body()).status_code == 200
    reply = harness.post(CHAT, body(chat_template_kwargs={"mood": True}))
    assert reply.status_code == 500
    text = "reasoning_parser 'moody' of acme 1.0: spec() failed: ValueError: bad mood"
    assert reply.json()["error"]["message"] == text


def test_gpt_oss_over_http(make_harness: Callable[..., Harness]) -> None:
    """A machine of its own behind the same fields: reasoning, a preamble and a call, in a stream of single tokens."""
    from dovetail_parsers.harmony import GptOssReasoning, GptOssTools

    harness = make_harness(reasoning=GptOssReasoning(), tools=GptOssTools(), chat_template="gpt-oss")
    harness.text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>analysis code<|message|>{"city": "Paris"}<|call|>'
    )
    (choice,) = harness.post(CHAT, body(tools=[tool()])).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("why", "Let me look.")
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert choice["finish_reason"] == "tool_calls"
    folded = fold_chat(events(harness.post(CHAT, body(tools=[tool()], stream=True))))[0]
    assert folded["content"] == "Let me look."
    harness.text = "<|channel|>final<|message|>so"
    assert harness.post(CHAT, body()).json()["choices"][0]["message"]["content"] == "so"
