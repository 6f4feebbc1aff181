"""Chat templates: what they are given, what they may do, and what is read from them."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.output import SampleCall, SampleReply
from dovetail.text.chat import budget
from dovetail.text.chat.budget import FULL, INLINE, PROBE
from dovetail.text.chat.rendered import RenderedChat
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.chat.templates import builtin_templates
from dovetail.text.inline import InlineCostError
from dovetail.text.parsing.fitted import bound_reasoning, thinking_behind
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer

entry_points = cache(metadata.entry_points)
"""All metadata is read for it, and most tests ask."""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is not defined or not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
PARTS = "{% for m in messages %}[{{ m.role }}{% for part in m.content %}|{{ part.text }}{% endfor %}]{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}+{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate({"default": source}, **options)


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return template(source).render(messages or HELLO, **options).text


def test_a_conversation_and_its_tail() -> None:
    """The tail is what the generation prompt added, with the request's switches."""
    chat = template(CHATML)
    head = "<|im_start|>user\nhello<|im_end|>\n"
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat.render(HELLO) == RenderedChat(head + closed, closed)
    opened = chat.render(HELLO, template_kwargs={"enable_thinking": True})
    assert opened == RenderedChat(head + "<|im_start|>assistant\n", "<|im_start|>assistant\n")
    assert chat.render(HELLO, add_generation_prompt=False) == RenderedChat(head, "")


def test_a_sample_reply_is_written() -> None:
    """A parser sees what stands behind the prompt, and what the prompt begins; one that draws lots says nothing."""
    shown = template(CHATML).written(SampleReply("why", "so"), {"enable_thinking": True})
    assert shown is not None
    header, output = "<|im_start|>assistant\n", "<think>\nwhy\n</think>\n\nso<|im_end|>\n"
    assert shown.whole.endswith(header + output)
    assert (shown.output, shown.tail, shown.appended) == (output, header, header)
    called = template("{{ tools | tojson }}{{ messages[-1].tool_calls[0].function.arguments.a }}")
    shown = called.written(SampleReply(calls=(SampleCall("find", {"a": "b"}),)))
    assert shown is None  # the prompt has no call yet: the template fails on it
    assert template("{{ [1, 2] | random }}{{ messages[-1].content }}").written(SampleReply(content="so")) is None
    assert NoTemplate("{{ x }}").written(SampleReply(content="so")) is None
    assert NoTemplate().response_template is None


def test_the_tail_of_a_template_that_always_adds_the_header() -> None:
    """Where the generation prompt is unconditional, the tail is what follows the last message."""
    always = "{% for m in messages %}{{ m.content }}</s>{% endfor %}<|a|><think>\n"
    assert template(always).render(HELLO).tail == "</s><|a|><think>"
    refuses = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}<|a|>"
    assert template(refuses).render(HELLO).tail == "<|a|>"


def test_markers_in_the_history_are_not_in_the_tail() -> None:
    """What users and tools write never reaches the parser's priming."""
    messages = [{"role": "user", "content": "what does <think> mean?"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<think>"}}]
    kwargs = {"enable_thinking": True}
    assert template(CHATML).render(messages, tools=tools, template_kwargs=kwargs).tail == "<|im_start|>assistant\n"


def test_a_final_message_is_continued() -> None:
    """The prompt ends with the partial message, and the tail begins with the assistant's header."""
    messages = [*HELLO, {"role": "assistant", "content": "Well, ", "reasoning": "hm"}]
    rendered = template(CHATML).render(messages, continue_final_message=True)
    assert rendered.tail == "<|im_start|>assistant\n<think>\nhm\n</think>\n\nWell, "
    assert rendered.text == "<|im_start|>user\nhello<|im_end|>\n" + rendered.tail
    assert template(PARTS).render(messages, continue_final_message=True).text == "[user|hello][assistant|Well, |"


def test_thinking_that_is_open_is_continued() -> None:
    """A partial message of thinking alone goes on inside the thinking."""
    for content in ("", None):
        messages = [*HELLO, {"role": "assistant", "content": content, "reasoning_content": "hm, "}]
        rendered = template(CHATML).render(messages, continue_final_message=True)
        assert rendered.tail == "<|im_start|>assistant\n<think>\nhm, "
        assert rendered.text.endswith(rendered.tail)


@pytest.mark.parametrize(
    ("name", "generation", "tail"),
    [
        ("qwen3", "[a]", "[a]<think>\nhm, "),  # the model may think
        ("qwen3", "[a]<think>\n", "[a]<think>\nhm, "),  # the prompt opens it
        ("qwen3", "[a]<think>\n\n</think>\n\n", None),  # the prompt closes it
        ("gpt-oss", "<|start|>assistant", "<|start|>assistant<|channel|>analysis<|message|>hm, "),
        ("inkling", "<|message_model|>", "<|message_model|><|content_thinking|>hm, "),
        ("apriel", "[a]Here are my reasoning steps:\n", "[a]Here are my reasoning steps:\nhm, "),
    ],
)
@pytest.mark.parametrize(
    "history",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content or m.reasoning_content }}{% endfor %}",
        "{% for m in messages %}{{ m.content or raise_exception('no content') }}{% endfor %}",
    ],
    ids=["hidden", "bare", "refused"],
)
def test_thinking_that_a_template_hides_is_continued(
    history: str, name: str, generation: str, tail: str | None, byte_level: Tokenizer
) -> None:
    """It goes on behind the prompt, in the format's markers, whether the template opens thinking there or not."""
    chat = template(f"{history}{{% if add_generation_prompt %}}{generation}{{% endif %}}")
    messages = [*HELLO, {"role": "assistant", "content": None, "reasoning_content": "hm, "}]
    if history.count("reasoning") == 0:
        with pytest.raises(RequestError):
            chat.render(messages, continue_final_message=True)
    (entry,) = entry_points(group="dovetail.reasoning_parsers.v1", name=name)
    chat.begin_thinking = thinking_behind(bound_reasoning(entry.load()(), chat), byte_level, chat)
    if tail is None:
        with pytest.raises(RequestError, match="switched off"):
            chat.render(messages, continue_final_message=True)
        return
    rendered = chat.render(messages, continue_final_message=True)
    assert rendered.tail == tail
    assert rendered.text.endswith(tail)
    assert rendered.text.count("hm, ") == 1


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (HELLO, {}, "last message with role 'assistant'"),
        ([*HELLO, {"role": "assistant", "content": "x"}], {"add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_continuing_needs_a_partial_reply(messages: Any, options: Any, message: str) -> None:
    """A continuation without a message to continue is refused."""
    with pytest.raises(RequestError, match=message) as caught:
        template(CHATML).render(messages, continue_final_message=True, **options)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    """The error says so rather than continuing something else."""
    with pytest.raises(RequestError, match="cannot be continued"):
        template("{{ messages[0].content }}").render(
            [*HELLO, {"role": "assistant", "content": "x"}], continue_final_message=True
        )


@pytest.mark.parametrize(("source", "form"), [(CHATML, "string"), (PARTS, "parts"), (EITHER, "both"), ("x", "string")])
def test_the_content_format_is_seen_by_rendering(source: str, form: str) -> None:
    """A template is tried with both forms of content."""
    assert template(source).content_format == form


@pytest.mark.parametrize(
    ("source", "plain", "parts"),
    [
        ("{{ messages[0].content }}", "hello", "one\ntwo"),
        (PARTS, "[user|hello]", "[user|one|two]"),
        (EITHER, "hello", "+one+two"),
    ],
)
def test_content_takes_the_form_that_the_template_reads(source: str, plain: str, parts: str) -> None:
    """Text becomes a part and parts become text where the template needs it."""
    content = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert render(source) == plain
    assert render(source, [{"role": "user", "content": content}]) == parts


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {}}], "messages[0].content[0].type"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], "messages[0].content[1].text"),
        ("a\ud800", "messages[0].content"),
        ([{"type": "text", "text": "\0"}], "messages[0].content[0]"),
        (3, "messages[0].content"),
        ([3], "messages[0].content[0]"),
    ],
)
def test_content_that_is_no_text_is_refused(content: Any, param: str) -> None:
    """The error names the part."""
    with pytest.raises(RequestError) as caught:
        render(CHATML, [{"role": "user", "content": content}])
    assert caught.value.param == param


def test_history_reaches_the_template_as_it_was_trained() -> None:
    """Missing content is empty, arguments are objects, reasoning has both names, and the input is not changed."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1]}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]}]
    before = json.dumps(messages)
    text = render(CHATML, messages, add_generation_prompt=False)
    assert text.endswith(
        '<think>\nwhy\n</think>\n\n\n<tool_call>\n{"name": "f", "arguments": {"é": [1]}}\n</tool_call><|im_end|>\n'
    )
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"a": 1}', "{'a': 1}"), ('{"a": ', '{"a": '), ("[1]", "[1]"), ("", "{}"), (None, "{}")]
)
def test_arguments_that_are_no_object_stay_as_sent(arguments: Any, shown: str) -> None:
    """A truncated call in the history does not make the conversation unusable."""
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", messages) == shown


def test_the_helpers_that_templates_use() -> None:
    """tojson leaves text alone, loop controls and generation blocks work, special tokens and documents are there."""
    source = (
        "{{ bos_token }}{% generation %}{{ {'é': '<'} | tojson }}{% endgeneration %}{% for m in messages %}{% break %}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ documents[0].text }}{{ tools is none }}{{ eos_token }}"
    )
    chat = template(source, special_tokens={"bos_token": "<s>"})
    assert chat.render(HELLO, documents=[{"text": "doc"}]).text == '<s>{"é": "<"}4docTrue'


def test_a_tool_template_serves_requests_with_tools() -> None:
    """Of several templates `tool_use` is taken when there are tools, `default` otherwise."""
    chat = ChatTemplate({"default": "plain", "tool_use": "tools {{ tools | length }}"})
    assert chat.render(HELLO).text == "plain"
    assert chat.render(HELLO, tools=[{"type": "function"}]).text == "tools 1"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "documents"]
)
def test_template_kwargs_cannot_take_the_servers_names(name: str) -> None:
    """A request's kwargs never replace what the server passes."""
    with pytest.raises(RequestError, match=name) as caught:
        render(CHATML, template_kwargs={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'other' %}", "chat template"),
    ],
)
def test_a_template_that_refuses_is_a_bad_request(source: str, message: str) -> None:
    """Whatever goes wrong inside a template is a 400 with its message."""
    with pytest.raises(RequestError, match=message) as caught:
        render("{% if messages[0].content == 'hello' %}" + source + "{% endif %}")
    assert caught.value.status == 400


LISTS = {
    "{% set n = namespace(a=[]) %}{% for i in range(3) %}{% set _ = n.a.append(i) %}{% endfor %}{{ n.a }}": "[0, 1, 2]",
    "{% set a = [3] %}{% set _ = a.insert(0, 'b') %}{% set _ = a.extend('c') %}{{ a.pop(0) }}{{ a }}": "b[3, 'c']",
    "{% set a = [1] %}{{ [] == [] }}{{ a + [2] }}{{ a is sequence }}{{ a | tojson }}": "True[1, 2]True[1]",
}


@pytest.mark.parametrize("source", LISTS)
def test_a_template_may_change_its_own_lists(source: str) -> None:
    """As Kimi-K2's does: with what it wrote itself it may do what it likes."""
    assert render(source) == LISTS[source]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% set a = messages[:] %}{% set _ = a.append(1) %}", "unsafe"),
        ("{% set _ = messages[0].update(role='x') %}", "unsafe"),
        ("{% set a = [1] %}{{ a.clear() }}", "unsafe"),
        ("{% set a = [] %}{% set _ = a.append(a) %}", "stands in another"),
        ("{% set a = [1] %}{% set b = [a] %}{% set _ = a.append(2) %}", "stands in another"),
        ("{% set a = [1] %}{% set b = {'a': a} %}{% set _ = a.append(2) %}", "stands in another"),
    ],
)
def test_nothing_else_is_changed(source: str, message: str) -> None:
    """The request's messages stay as they are, and no list grows inside another."""
    with pytest.raises(RequestError, match=message):
        render("{% if messages[0].content == 'hello' %}" + source + "{% endif %}")


GROW = "{% set ns = namespace(s='ab') %}{% for i in range(70) %}{% set ns.s = SET %}{% endfor %}{{ ns.s }}"
RUNAWAYS = {
    "empty loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{% if m(n - 1) or m(n - 1) %}{% endif %}{% endif %}{% endmacro %}{{ m(60) }}",
    "range": "{{ range(10 ** 9) | list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "concat": GROW.replace("SET", "ns.s ~ ns.s"),
    "plus": GROW.replace("SET", "ns.s + ns.s"),
    "format": GROW.replace("SET", "'%s%s' % (ns.s, ns.s)"),
    "format method": GROW.replace("SET", "'{0}{0}'.format(ns.s)"),
    "replace method": GROW.replace("SET", "ns.s.replace('a', ns.s)"),
    "replace filter": GROW.replace("SET", "ns.s | replace('a', ns.s)"),
    "join method": GROW.replace("SET", "ns.s.join(['a', 'b', 'c'] * 100)"),
    "join filter": GROW.replace("SET", "['a', 'b', 'c'] | join(ns.s)"),
    "join attribute": GROW.replace("SET", "([{'a': ns.s}] * 99) | join(attribute='a')"),
    "macro": "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}" + GROW.replace("SET", "two(ns.s)"),
    "appending": "{% set a = ['x' * 9999] %}{% for i in range(9999) %}{% set _ = a.append('x' * 9999) %}{% endfor %}",
    "nesting lists": GROW.replace(
        "{% set ns.s = SET %}", "{% set b = [] %}{% set _ = b.extend([ns.s, ns.s]) %}{% set ns.s = b %}"
    ),
    "lists": GROW.replace("SET", "[ns.s, ns.s]"),
    "tuples": GROW.replace("SET", "(ns.s, ns.s)"),
    "listed tuples": GROW.replace("SET", "(ns.s, ns.s) | list"),
    "dicts": GROW.replace("SET", "dict(a=ns.s, b=ns.s)"),
    "dict displays": GROW.replace("SET", "{'a': ns.s, 'b': ns.s}"),
    "times lists": GROW.replace("SET", "[ns.s] * 2"),
    "namespace in a list": GROW.replace("SET", "[ns, ns]"),
    "block": "{% set x %}{% for i in range(99999) %}{% for j in range(99) %}zzzzz{% endfor %}{% endfor %}{% endset %}",
    "width": "{{ 'a'.center(10 ** 9) }}",
    "width filter": "{{ 'a' | center(1000000000) }}",
    "width percent": "{{ '%1000000000d' % 5 }}",
    "width format": "{{ '{:1000000000d}'.format(5) }}",
    "width argument": "{{ '{:{w}d}'.format(5, w=10 ** 9) }}",
    "indent": "{{ {'a': 1} | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "format, repeated": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "format filter": "{{ ('%s' * 999) | format(*(['x' * 99999] * 999)) }}",
    "format method, repeated": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'x' * 99999}) }}",
    "tabs": "{{ ('\\t' * 65536).expandtabs(65536) }}",
    "indented lines": "{{ ('\\n' * 65536) | indent(65536) }}",
    "indented text": "{{ ('\\n' * 65536) | indent('x' * 65536) }}",
    "indented JSON": "{{ [range(99999) | list] * 99 | tojson(indent=65536) }}",
    "separated JSON": "{{ range(9999) | list | tojson(separators=('x' * 99999, ':')) }}",
    "bytes": "{{ 'a'.encode() * 10 ** 9 }}",
    "bytes of a number": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "joined operands": "{% set a = 'x' * 99999 %}{{ a" + " ~ a" * 999 + " }}",
    "sum of texts": "{{ (['x' * 9999] * 9999) | sum(start='') }}",
    "sum of lists": "{{ ([[1] * 999] * 99999) | sum(start=[]) }}",
}
SLOW = {
    "select in a list": "{% set l = range(99999) | list %}{{ range(99999) | select('in', l) | list | length }}",
    "select in a range": "{{ range(99999) | map('string') | select('in', range(99999)) | list | length }}",
    "reject, not consumed": "{% for i in range(99999) | map('string') | reject('in', range(99999)) %}{% endfor %}",
    "loop condition": "{% for i in range(99999) if (i | string) in range(99999) and false %}{% endfor %}",
    "conditions": "{% set l = range(8000) | list %}" + "{% if 'x' in l %}{% endif %}" * 400,
    "comparisons": "{% set l = range(8000) | list %}{% set m = range(8000) | list %}"
    + "{% if l == m %}{% endif %}" * 400,
    "tests": "{% set l = range(8000) | list %}" + "{% if 'x' is in l %}{% endif %}" * 400,
    "slices": "{% set l = range(8000) | list %}" + "{% set x = l[1:] + l %}" * 400,
    "sort": "{% set l = range(99999) | map('string') | list %}{% for i in range(999) %}{{ l | sort }}{% endfor %}",
    "sort of texts": "{{ (['x' * 9999 ~ 'a', 'x' * 9999 ~ 'b'] * 9999) | sort | length }}",
    "map": "{{ range(99999) | map('center', 65536) | map('length') | sum }}",
    "chain": "{{ range(99999)" + " | map('string') | map('int')" * 40 + " | list | length }}",
    "unique": "{{ range(99999) | map('string') | unique | map('upper') | unique | list | length }}",
    "groups": "{% for i in range(99999) %}{{ range(999) | groupby('real') | length }}{% endfor %}",
    "links": "{{ ('www.' * 99999) | urlize }}",
    "wrapped": "{{ ('a-' * 99999) | wordwrap(3) }}",
    "tags": "{{ ('<!--' * 99999) | striptags }}",
    "tags, method": "{{ (('<!--' * 99999) | safe).striptags() }}",
    "from the right": "{{ ('a' * 260000).rfind('b' ~ 'a' * 130000) }}",
    "split from the right": "{{ ('a' * 260000).rsplit('b' ~ 'a' * 130000) }}",
    "pretty": "{{ (range(99999) | map('string') | list) | pprint }}",
}


ENDING = ("range", "recursion", "recursive loop")
"""Those that end by themselves, which may be sooner."""


@pytest.mark.parametrize("name", [*RUNAWAYS, *SLOW])
def test_a_runaway_template_is_at_fault(name: str) -> None:
    """Templates that loop or explode end soon, in an error that names them, and the next render is not affected.

    On the event loop that is within 50 ms of processor time, whatever the template does.
    """
    source = "{% if messages[0].content == 'go' %}" + (RUNAWAYS | SLOW)[name] + "{% endif %}fine"
    chat = template(source, limits=replace(FULL, seconds=0.04), origin="the model of somebody")
    began, ends = time.thread_time(), suppress if name in SLOW else pytest.raises
    with ends(RequestError) as found:
        chat.render([{"role": "user", "content": "go"}])
    if found is not None and name != "range":
        assert re.search("chat template.*the model of somebody", str(found.value))
        assert (found.value.status, found.value.code) == (500, "chat_template_failed")
    assert time.thread_time() - began < 1.5
    chat.limits = INLINE
    took = []
    for _ in range(4):  # the best: what shares a core, and a collection of garbage, only ever add to it
        began = time.thread_time()
        with pytest.raises((RequestError, InlineCostError) if name in ENDING else InlineCostError):
            chat.render([{"role": "user", "content": "go"}])
        took.append(time.thread_time() - began)
    assert min(took) < 0.05
    assert chat.render(HELLO).text == "fine"


def test_a_large_conversation_is_the_request_s() -> None:
    """Beyond 64 KiB the conversation may be what is too much, and the client is told so."""
    chat = template("{% for i in range(999) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(RequestError, match="shorten the conversation") as found:
        chat.render([{"role": "user", "content": "x" * (1 << 17)}])
    assert found.value.status == 400


@pytest.mark.parametrize("source", ["{% for i in range(30) %}{% endfor %}x", "{{ '' }}" * 30 + "x"])
def test_all_renders_of_a_prompt_share_its_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is rendered two or three times: together they may take as long as the limit says."""
    chat, clock = template(source), count()
    ticks = SimpleNamespace(thread_time=lambda: next(clock), perf_counter=lambda: next(clock))
    monkeypatch.setattr(budget, "time", ticks)
    chat.limits = replace(FULL, seconds=200)
    assert chat.render(HELLO).text == "x"
    chat.limits = replace(FULL, seconds=50)
    with pytest.raises(RequestError, match="ran longer"):
        chat.render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% if a %}" * 300 + "{% endif %}" * 300,
        "{% for a in b %}" * 300 + "{% endfor %}" * 300,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
        "{{ a" + ".b" * 3000 + " }}",
        "{{ a" + " + a" * 3000 + " }}",
        "{{ " + "not " * 3000 + "a }}",
        "{{ a" + " | trim" * 3000 + " }}",
        "x" * (1 << 18),
    ],
)
def test_a_template_that_cannot_be_compiled_is_told_in_one_line(source: str) -> None:
    """Nesting that is too deep for Jinja, or for Python, and templates without end."""
    with pytest.raises(ModelError, match=r"^somebody: chat template: [^\n]+$"):
        template(source, origin="somebody")


def test_a_start_does_not_wait_for_a_template_again_and_again() -> None:
    """Once it has taken too long, the samples of a start fail at once."""
    began = time.thread_time()
    chat = template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", limits=PROBE)
    for _ in range(20):
        with pytest.raises(RequestError, match="ran longer"):
            chat.render(HELLO)
    assert time.thread_time() - began < 2 * PROBE.seconds


def test_a_model_without_a_template_says_what_to_do() -> None:
    """The error names the flag."""
    chat = ChatTemplate({})
    assert (chat.source, chat.content_format) == ("", "string")
    with pytest.raises(RequestError, match="--chat-template"):
        chat.render(HELLO)


def test_the_operators_template_wins(tmp_path: Path, byte_level: Tokenizer) -> None:
    """`--chat-template FILE` replaces the model's; a file that cannot serve is an error that names it."""
    path = tmp_path / "mine.jinja"
    with pytest.raises(ConfigError, match=r"mine\.jinja.*no such file"):
        ChatTemplate.load(byte_level.files, path)
    path.write_text("{{ messages[0].content }}{{ eos_token }}", encoding="utf-8")
    assert ChatTemplate.load(byte_level.files, path).render(HELLO).text == "hello<|im_end|>"
    path.write_text("{% if %}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"mine\.jinja.*line 1"):
        ChatTemplate.load(byte_level.files, path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ChatTemplate.load(byte_level.files, path)
    assert ChatTemplate.load(byte_level.files).source == ""


def test_a_built_in_template_is_found_by_name(byte_level: Tokenizer) -> None:
    """`--chat-template qwen3` needs no file, both spellings work, and an unknown name gets the nearest."""
    found = ChatTemplate.load(byte_level.files, "qwen3")
    assert found.origin == "--chat-template qwen3"
    assert found.render(HELLO).text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (
        ChatTemplate.load(byte_level.files, "deepseek_R1").source
        == ChatTemplate.load(byte_level.files, "deepseek-r1").source
    )
    with pytest.raises(ConfigError, match="neither a file nor a built-in template; did you mean 'glm47'"):
        ChatTemplate.load(byte_level.files, "glm48")


@pytest.mark.parametrize("name", builtin_templates())
def test_built_in_templates_take_text_and_parts_and_documents(name: str, byte_level: Tokenizer) -> None:
    """Every template handles both forms of content, a system message, a tool's result, and a continued reply."""
    chat = ChatTemplate.load(byte_level.files, name)
    assert chat.content_format == "both"
    history = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "call00001", "content": "result"},
        {"role": "user", "content": "two"},
    ]
    text = chat.render(history).text
    assert all(part in text for part in ("be brief", "one", "result", "two"))
    continued = chat.render([*history, {"role": "assistant", "content": "Well, "}], continue_final_message=True)
    assert continued.text.endswith("Well, ")
    if name not in NO_DOCUMENTS:
        assert "a fact" in chat.render(history, documents=[{"title": "T", "text": "a fact"}]).text


NO_DOCUMENTS = {"kimi", "kimi-k2", "glm45", "glm47", "mistral", "step3"}
"""Families whose models were not trained on them."""


def test_harmony_names_the_function_that_a_result_is_of(byte_level: Tokenizer) -> None:
    """A tool message says only its call's id; the template takes the name from the call before it."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    text = ChatTemplate.load(byte_level.files, "gpt-oss").render(history).text
    assert "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|>" in text


def test_templates_that_join_arguments_get_text() -> None:
    """Arguments are an object for templates that print it, and text for those that add it to text."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}{% endfor %}"
    joined = template(loop + "{{ c.function.name + c.function.arguments }}" + end)
    printed = template(loop + "{{ c.function.name }}{{ c.function.arguments | tojson }}" + end)
    assert (joined.arguments_format, printed.arguments_format) == ("string", "object")
    assert joined.render(messages).text == printed.render(messages).text == 'f{"a": "b"}'


@pytest.mark.parametrize("step", ["ns.x * ns.x", "ns.x + ns.x", "ns.x ** 2"])
def test_numbers_have_an_end(step: str) -> None:
    """A number that is squared or doubled again and again ends the render before it takes any time."""
    source = "{% set ns = namespace(x=3) %}{% for i in range(9999) %}{% set ns.x = " + step + " %}{% endfor %}"
    with pytest.raises(RequestError, match=r"bits|power"):
        ChatTemplate({"default": source}).render([{"role": "user", "content": "a"}])
