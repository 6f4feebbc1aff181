"""What each format writes, well and badly, and what a client must receive: the golden table of the parsers.

A row names the parsers, the state that the prompt leaves (by the template's tail), the output, and its parts. `CALLS`
is how each tool format writes the same two calls.
"""

# ruff: noqa: E501 - a table: one case per row

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True)
class Row:
    """An output and its parts. `tail` is what the template put before it, None where no template did."""

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    tail: str | None = None


WEATHER = '{"city": "Rom, \\"die\\" Stadt", "days": 3}'
TWO = (("get_weather", WEATHER), ("now", "{}"))
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
_K2 = "<|tool_call_argument_begin|>"
M3 = "]<]minimax[>["
ATEM = "<atem:function_calls>\n"


def plamo(name: str) -> str:
    """A marker of PLaMo 3."""
    return f"<|plamo:{name}:plamo|>"


PLAMO = (
    plamo("begin_tool_request") + plamo("begin_tool_name"),
    plamo("end_tool_name") + plamo("begin_tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>",
    plamo("end_tool_arguments") + plamo("end_tool_request"),
)
"""Around a name and its arguments."""

CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3-coder": '<tool_call>\n<function=get_weather>\n<parameter=city>\nRom, "die" Stadt\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "now", "parameters": {{}}}}',
    "pythonic": "[get_weather(city='Rom, \"die\" Stadt', days=3), now()]",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek-v3": f"<｜tool▁calls▁begin｜>{_V3}get_weather\n```json\n{WEATHER}\n```<｜tool▁call▁end｜>\n"
    f"{_V3}now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rom, "die" Stadt</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi-k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0{_K2}{WEATHER}<|tool_call_end|>"
    f"<|tool_call_begin|>functions.now:1{_K2}{{}}<|tool_call_end|><|tool_calls_section_end|>",
    "glm45": '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rom, "die" Stadt</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rom, "die" Stadt</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "seed-oss": '<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rom, "die" Stadt</parameter>\n'
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "gpt-oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "apertus": f'<|tools_prefix|>[{{"get_weather": {WEATHER}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "cohere-command": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {WEATHER}}},\n'
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "deepseek-v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rom, "die" Stadt</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "deepseek-v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Rom, "die" Stadt</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    "dots": '<dots_function_call>\n<invoke name=get_weather>\n<parameter name="city">Rom, "die" Stadt</parameter>\n'
    "<parameter name=days>3</parameter>\n</invoke>\n<invoke name=now>\n</invoke>\n</dots_function_call>",
    "beam": ' to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">\nRom, "die" Stadt\n</rfl:parameter>'
    '<rfl:parameter name="days">\n3\n</rfl:parameter><|end|><|start|>assistant to=now<|channel|>analysis <|constrain|>xml<|message|><|call|>',
    "functionary": f"get_weather\n{WEATHER}>>>now\n{{}}",
    "hyperclova": f' -> tool/function_call\n[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]<|im_end|><|stop|>',
    "inkling": f'get_weather<|content_invoke_tool_json|>{{"name": "get_weather", "args": {WEATHER}}}<|end_message|>'
    '<|message_model|>now<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|><|content_model_end_sampling|>',
    "iquest-q1": '<iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Rom, "die" Stadt</arg_value>'
    "<arg_key>days</arg_key><arg_value>3</arg_value></iquest_tool_call>\n<iquest_tool_call>now</iquest_tool_call>",
    "k2-horizon": '<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Rom, "die" Stadt</ifm|arg_value>'
    "<ifm|arg_key>days</ifm|arg_key><ifm|arg_value>3</ifm|arg_value></ifm|tool_call>\n<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>",
    "muse": f' to=get_weather<|message|>{ATEM}<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Rom, "die" Stadt</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    f'</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=now<|message|>{ATEM}<atem:invoke name="now">\n'
    "</atem:invoke>\n</atem:function_calls><|eot|>",
    "plamo3": f"{plamo('begin_tool_requests')}{PLAMO[0]}get_weather{PLAMO[1]}{WEATHER}{PLAMO[2]}"
    f"{PLAMO[0]}now{PLAMO[1]}{{}}{PLAMO[2]}{plamo('end_tool_requests')}",
    "functiongemma": '<start_function_call>call:get_weather{city:<escape>Rom, "die" Stadt<escape>,days:3}<end_function_call>'
    "<start_function_call>call:now{}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Rom, "die" Stadt<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "gigachat3": f'<|function_call|>{{"name": "get_weather", "arguments": {WEATHER}}}\n{{"name": "now", "arguments": {{}}}}',
    "gigachat35": '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n'
    '<｜GCML｜parameter name="city" string="true">Rom, "die" Stadt</｜GCML｜parameter>\n'
    '<｜GCML｜parameter name="days" string="false">3</｜GCML｜parameter>\n</｜GCML｜invoke>\n'
    '<｜GCML｜invoke name="now">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>',
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]',
    "granite-20b-fc": f'<function_call> {{"name": "get_weather", "arguments": {WEATHER}}}\n<function_call> {{"name": "now", "arguments": {{}}}}',
    "hunyuan-a13b": f'<tool_calls>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]</tool_calls>',
    "hy-v3": '<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rom, "die" Stadt</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {WEATHER}}}<|action_end|>'
    '<|action_start|> <|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
    "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rom, "die" Stadt<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "lfm2": "<|tool_call_start|>[get_weather(city='Rom, \"die\" Stadt', days=3), now()]<|tool_call_end|>",
    "longcat": f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</longcat_tool_call>\n'
    '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>',
    "minicpm5": '<function name="get_weather"><param name="city"><![CDATA[Rom, "die" Stadt]]></param><param name="days">3</param>'
    '</function>\n<function name="now"></function>',
    "minimax-m3": f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>Rom, "die" Stadt{M3}</city>{M3}<days>3{M3}</days>'
    f'{M3}</invoke>\n{M3}<invoke name="now">{M3}</invoke>\n{M3}</tool_call>',
    "nemotron": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
    "olmo3": "<function_calls>\nget_weather(city='Rom, \"die\" Stadt', days=3)\nnow()\n</function_calls>",
    "phi4-mini-json": f'functools[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]',
    "solar": f"<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{WEATHER}<|tool_call:end|>"
    "<|tool_call:begin|>a2<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
    '<steptml:parameter name="city">Rom, "die" Stadt</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
    '</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>",
    "xlam": f'[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]',
}
MACHINES = {
    "gpt-oss": "<|start|>assistant",
    "beam": "<|start|>assistant",
    "functionary": "<|start_header_id|>assistant<|end_header_id|>\n\n>>>",
    "hyperclova": "<|im_start|>assistant",
    "inkling": "<|message_model|>",
    "muse": "<|start|>assistant",
    "muse-glimmer": "<|start|>assistant",
}
"""Formats of messages with headers, and what their prompts end with."""
THINKERS = [name for name in MACHINES if name != "beam"]
"""Those of them with a reasoning parser of their own."""
CONTENT_FIRST = {name for name in CALLS if name not in ("llama3", "pythonic", "xlam", *MACHINES)}
"""Formats in which an answer may go before its calls."""

TAGS = {
    "deepseek-r1": ("<think>", "</think>", "\n", "\n", "\n\n", "in"),
    "deepseek-v3": ("<think>", "</think>", "", "", "", "open"),
    "qwen3": ("<think>", "</think>", "\n", "\n", "\n\n", "open"),
    "qwen3-thinking": ("<think>", "</think>", "\n", "\n", "\n\n", "in"),
    "kimi": ("◁think▷", "◁/think▷", "", "", "", "open"),
    "kimi-k2": ("<think>", "</think>", "", "", "", "open"),
    "glm45": ("<think>", "</think>", "", "", "\n", "open"),
    "mistral": ("[THINK]", "[/THINK]", "", "", "", "open"),
    "minimax-m2": ("<think>", "</think>", "\n", "\n", "\n\n", "in"),
    "seed-oss": ("<seed:think>", "</seed:think>", "", "", "", "open"),
    "step3": ("<think>", "</think>", "\n", "\n", "\n\n", "in"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "", "", "", "open"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "\n", "\n", "\n", "in"),
    "cohere-command3": ("<|START_THINKING|>", "<|END_THINKING|>", "", "", "", "open"),
    "cohere-command4": ("<|START_THINKING|>", "<|END_THINKING|>", "", "", "", "open"),
    "ernie45": ("<think>", "</think>", "\n", "\n", "\n\n", "in"),
    "gemma4": ("<|channel>thought\n", "<channel|>", "", "\n", "", "open"),
    "granite": ("Here is my thought process:", "Here is my response:", "\n", "\n\n", "\n", "open"),
    "hunyuan-a13b": ("<think>", "</think>", "\n", "\n", "\n", "open"),
    "hy-v3": ("<think>", "</think>", "", "", "", "open"),
    "kimi-k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>", "", "", "", "open"),
    "minimax-m3": ("<mm:think>", "</mm:think>", "", "", "", "open"),
    "solar": ("<|think|>", "<|end|>", "", "", "", "open"),
    "k2-horizon": ("<ifm|think>", "</ifm|think>", "", "", "", "in"),
    "plamo3": (plamo("begin_think"), plamo("end_think"), "", "", "", "in"),
}
"""Start, end, the newlines behind the one, before and behind the other, and the state without a prompt."""


def reasoning_rows(name: str) -> list[Row]:
    """Every state of a format with markers, with and without what may go wrong."""
    start, end, after_start, before_end, after_end, initial = TAGS[name]
    header = "<assistant>"
    opened, closed = header + start + after_start, header + start + after_start + before_end + end + after_end
    thought = f"why 🎉{before_end}{end}{after_end}"
    rows = [
        Row(f"{thought}so it is", "why 🎉", "so it is", tail=opened),
        Row(f"{start}{after_start}{thought}so", "why 🎉", "so", tail=opened),
        Row("why", "why", None, tail=opened),
        Row(f"{end}{after_end}so", None, "so", tail=opened),
        Row(f"why {start} x{before_end}{end}so", f"why {start} x", "so", tail=opened),
        Row("so it is", None, "so it is", tail=closed),
        Row(f"so {start}x{end}", None, f"so {start}x{end}", tail=closed),
        Row("so", None, "so", tail=header + end),
        Row("so it is", None, "so it is", tail=header),
        Row(f"{start}{after_start}{thought}so", "why 🎉", "so", tail=header),
        Row(f"Well. {start}{after_start}{thought}so", "why 🎉", "Well. so", tail=header),
        Row(f"\n {start}why{end}so", "why", "so", tail=header),
        Row(f"{start}{end}so", None, "so", tail=header),
        Row(f"{start}why", "why", None, tail=header),
        Row(f"{start}why{end}so {start}x{end}", "why", f"so {start}x{end}", tail=header),
        Row(f"so {end} what", None, f"so {end} what", tail=header),
        Row(f"{thought}so", "why 🎉", "so") if initial == "in" else Row("so", None, "so"),
        Row(f"{start}why{end}so", "why", "so"),
    ]
    if name in ANSWERS:
        before, behind = ANSWERS[name]
        rows += [
            Row(f"{start}{after_start}{thought}{before}so it is{behind}", "why 🎉", "so it is", tail=header),
            Row(f"{before}so it is{behind}", None, "so it is", tail=header),
            Row(f"{before}so", None, "so", tail=header),
        ]
    return [row for row in rows if row.tail is not None or row.text]


A, F, C = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary"
NEXT = "<|start|>assistant"
ARGS = '{"city": "Paris"}'
CALL = (("get_weather", ARGS),)
HARMONY = [
    Row(f"{A}why 🎉<|end|>{NEXT}{F}so<|return|>", "why 🎉", "so"),
    Row(f"{A}why", "why", None),
    Row(f"{F}so", None, "so"),
    Row(f"{C}<|message|>Let me look.<|end|>{NEXT}{F}so", None, "Let me look.so"),
    Row(
        f"{A}why<|end|>{NEXT}{C} to=functions.get_weather <|constrain|>json<|message|>{ARGS}<|call|>", "why", None, CALL
    ),
    Row(f"{A}why<|end|>{NEXT} to=functions.get_weather{C} json<|message|>{ARGS}<|call|>", "why", None, CALL),
    Row(f" to=functions.get_weather<|channel|>analysis code<|message|>{ARGS}<|call|>", None, None, CALL),
    Row(f"{C} to=functions.get_weather json<|message|>{ARGS}<|call|>", None, None, CALL),
    Row(f"{C} to=functions.get_weather<|channel|>json<|message|>{ARGS}", None, None, CALL),
    Row(f"{C}{C} to=functions.get_weather<|message|>{ARGS}<|end|>", None, None, CALL),
    Row(f"{C} to=functions.now<|message|><|call|>", None, None, (("now", "{}"),)),
    Row(f'{C} to=browser.search<|message|>{{"q": 1}}<|call|>', None, None, (("browser.search", '{"q": 1}'),)),
    Row(f"{C} to=functions.get_weather<|message|>not json<|call|>", None, None, (("get_weather", "not json"),)),
    Row(f"{A}why{F}so", "why", "so"),
    Row(f"{A}why<|start|>assistant{F}so<|return|>", "why", "so"),
    Row("just so", None, "just so"),
    Row("The answer<|return|>", None, "The answer"),
    Row("<|channel|>The answer<|return|>", None, "<|channel|>The answer"),
    Row("<|channel|>final", None, None),
    Row("<|channel|>final</x>w0w<|channel|>final<|message|>so", None, "final</x>w0wso"),
    Row("<|channel|>report<|message|>so", None, "so"),
    Row("<|channel|>ana", None, None),
    Row(f"{F}so <|message|> it<|constrain|>", None, "so <|message|> it<|constrain|>"),
    Row(f"{F}so<|end|>\n and more", None, "soand more"),
    Row("<|message|>so<|end|>", None, "so"),
    Row("x" * 600, None, "x" * 600),
    Row("", None, None),
]
HARMONY = [Row(r.text, r.reasoning, r.content, r.calls, tail="<|start|>assistant") for r in HARMONY] + [
    Row(f"{A}why<|end|>{NEXT}{F}so", "why", "so"),
    Row(", world<|return|>", None, ", world", tail=f"<|start|>assistant{F}Hello"),
    Row("y<|end|>", "y", None, tail=f"<|start|>assistant{A}wh"),
]

EOM = "<|eom|><|start|>assistant"
ROME = '<atem:invoke name="get_weather">\n<atem:parameter name="city">Rom</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
IN_ROME = (("get_weather", '{"city": "Rom"}'),)
MUSE = [
    Row(f" to=self<|message|>why 🎉{EOM} to=user<|message|>so<|eot|>", "why 🎉", "so"),
    Row(" to=self<|message|>why", "why", None),
    Row(" to=user<|message|>so it is", None, "so it is"),
    Row(f" to=developer<|message|>hm{EOM} to=user<|message|>so", "hm", "so"),
    Row(" to=user<|message|>walk to=\nthe to=b <|eot|>", None, "walk to=\nthe to=b "),
    Row(" to=user<|message|>walto=self<|message|>so<|eot|>", None, "walto=self<|message|>so"),
    Row(f" to=self<|message|>to=get_weather<|message|>{ATEM}{ROME}<|eot|>", None, None, IN_ROME),
    Row(" to=user<|message|>so <atem:invoke", None, "so <atem:invoke"),
    Row(f" to=get_weather<|message|>{ATEM}{ROME}<|eot|>", None, None, IN_ROME),
    Row(f" to=self<|message|>why{EOM} to=get_weather<|message|>{ATEM}{ROME}<|eot|>", "why", None, IN_ROME),
    Row(f" to=self<|message|>why to=get_weather<|message|>{ATEM}{ROME}<|eot|>", "why ", None, IN_ROME),
    Row(f" to=user<|message|>so {ATEM}{ROME}<|eot|>", None, f"so {ATEM}{ROME}"),
    Row(" to=get_weather<|message|>no call<|eot|>", None, "no call"),
    Row(
        f' to=get_weather<|message|>{ATEM}<atem:invoke name="get_weather" id="1">\n<atem:parameter name="city" string="true">'
        "a <|eot|> b</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
        None,
        None,
        (("get_weather", '{"city": "a <|eot|> b"}'),),
    ),
    Row(
        f'<|start|>assistant to=now<|message|>{ATEM}<atem:invoke name="now">\n</atem:invoke>',
        None,
        None,
        (("now", "{}"),),
    ),
    Row("just so", None, "just so"),
    Row("Hm to=user<|message|>so", None, "Hm to=userso"),
    Row(f" to=commentary<|message|>Let me look.{EOM} to=user<|message|>so", None, "Let me look.so"),
    Row("", None, None),
]
MUSE = [Row(r.text, r.reasoning, r.content, r.calls, tail="<|start|>assistant") for r in MUSE] + [
    Row("y<|eom|>", "y", None, tail="<|start|>assistant to=self<|message|>wh"),
    Row("y<|eot|>", None, "y", tail="<|start|>assistant to=user<|message|>wh"),
]
THINKING, TEXT, INVOKE = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
MODEL, DONE = "<|message_model|>", "<|end_message|>"
INKLING = [
    Row(f"{THINKING}why 🎉{DONE}{MODEL}{TEXT}so{DONE}<|content_model_end_sampling|>", "why 🎉", "so"),
    Row(f"{THINKING}why", "why", None),
    Row(f"{TEXT}so it is", None, "so it is"),
    Row(f"{THINKING}why{INVOKE}{{\"name\": \"now\", \"args\": {{}}}}", "why", None, (("now", "{}"),)),
    Row(f"now{INVOKE}{{\"name\": \"now\", \"args\": {{\"q\": \"a {DONE} b\"}}}}{DONE}", None, None,
        (("now", f'{{"q": "a {DONE} b"}}'),)),
    Row(f"now<|content_invoke_tool_text|>raw{DONE}", None, "raw"),
    Row(f"{INVOKE}no call{DONE}{MODEL}{TEXT}so", None, "no callso"),
    Row(f"{TEXT}so{DONE}{INVOKE}{{\"name\": \"now\"}}{DONE}", None, "so", (("now", "{}"),)),
    Row("one two three", None, "one two three"),
    Row("", None, None),
]  # fmt: skip
INKLING = [Row(r.text, r.reasoning, r.content, r.calls, tail=MODEL) for r in INKLING]
INKLING += [Row(f"{MODEL}{r.text}", r.reasoning, r.content, r.calls, tail="") for r in INKLING[:7]]
FUNCTIONARY = [
    Row("all\nso\n it is\n", None, "so\n it is\n"),
    Row(f"all\nLet me look.>>>get_weather\n{ARGS}", None, "Let me look.", CALL),
    Row("now\n{}", None, None, (("now", "{}"),)),
    Row("now\n", None, None, (("now", "{}"),)),
    Row('get_weather\n{"city": ">>>now\\n"}', None, None, (("get_weather", '{"city": ">>>now\\n"}'),)),
    Row("all\n>>> print(1)\n1\n>>>x", None, ">>> print(1)\n1\n>>>x"),
    Row("nobody\n{}", None, "nobody\n{}"),
    Row("get_wea", None, None),
    Row("just so", None, "just so"),
]
FUNCTIONARY = [Row(r.text, r.reasoning, r.content, r.calls, tail=MACHINES["functionary"]) for r in FUNCTIONARY]
_CLOVA = "<|im_end|>\n<|im_start|>assistant"
_LISTED = ' -> tool/function_call\n[{"name": "now", "arguments": {}}]'
HYPERCLOVA = [
    Row(f"/think\nwhy 🎉\nso{_CLOVA}\nso\n it is<|im_end|><|endofturn|>", "why 🎉\nso", "so\n it is"),
    Row("/think\nwhy", "why", None),
    Row("\nso it is<|im_end|>", None, "so it is"),
    Row(f"/think\nwhy{_CLOVA}{_LISTED}<|im_end|><|stop|>", "why", None, (("now", "{}"),)),
    Row(f"\nso{_CLOVA}{_LISTED}<|im_end|><|stop|>", None, "so", (("now", "{}"),)),
    Row(_LISTED, None, None, (("now", "{}"),)),
    Row(' -> tool/function_call\n[{"name": "f", "arguments": {"a": "<|im_end|> b"}}]<|im_end|>', None, None,
        (("f", '{"a": "<|im_end|> b"}'),)),
    Row(" -> tool/fun", None, None),
    Row("/thi", None, None),
    Row("just so\n2", None, "just so\n2"),
    Row("just so", None, "just so"),
    Row("\nso /think\n it<|im_end|>", None, "so /think\n it"),
]  # fmt: skip
HYPERCLOVA = [Row(r.text, r.reasoning, r.content, r.calls, tail=MACHINES["hyperclova"]) for r in HYPERCLOVA] + [
    Row("so<|im_end|>", None, "so", tail="<|im_start|>assistant\n"),
    Row(f"so{_CLOVA}\nyes", "so", "yes", tail="<|im_start|>assistant/think\n"),
]
_P = '<rfl:parameter name="'
_BEAM = " to=get_weather<|channel|>analysis <|constrain|>xml<|message|>"
BEAM = [
    Row(f'{_BEAM}{_P}city">\n\nRom\n\n</rfl:parameter><|call|>', None, None, (("get_weather", '{"city": "\\nRom\\n"}'),)),
    Row(f'{_BEAM}{_P}city">\na\n{_P}days">\n3\n</rfl:parameter><|call|>', None, None,
        (("get_weather", '{"city": "a", "days": 3}'),)),
    Row(f'{_BEAM}{_P}city">\na <|call|> b\n</rfl:parameter><|call|>', None, None,
        (("get_weather", '{"city": "a <|call|> b"}'),)),
    Row(f"{_BEAM}oops<|call|>", None, "oops", (("get_weather", "{}"),)),
]  # fmt: skip
BEAM = [Row(r.text, r.reasoning, r.content, r.calls, tail=MACHINES["beam"]) for r in BEAM]
MACHINE_ROWS = {
    "gpt-oss": HARMONY,
    "beam": [*HARMONY, *BEAM],
    "functionary": FUNCTIONARY,
    "hyperclova": HYPERCLOVA,
    "inkling": INKLING,
    "muse": MUSE,
    "muse-glimmer": [*MUSE, Row("<|message|>so", None, "so", tail="<|start|>assistant")],
}


def thinking_rows(name: str) -> list[Row]:
    """The rows of a format of messages that say nothing of calls."""
    calls = ("to=f", "to=g", "to=n", "to=b", "invoke", "get_w", " -> ")
    rows = [row for row in MACHINE_ROWS[name] if not row.calls and not any(text in row.text for text in calls)]
    return rows + ([Row("<|message|>hm", "hm", None, tail="<|start|>assistant")] if name == "muse" else [])


def tool_rows(name: str) -> list[Row]:
    """The two calls alone, cut off, and where the format allows it, behind and before an answer."""
    if name in MACHINES:
        rows = [row for row in MACHINE_ROWS[name] if not row.reasoning and row.tail]
        return [*rows, Row(CALLS[name], None, None, TWO, tail=MACHINES[name])]
    rows = [Row(CALLS[name], None, None, TWO), Row("no call", None, "no call"), *TOOL_ROWS.get(name, [])]
    if name in CONTENT_FIRST:
        between = {
            "hermes": "\n",
            "qwen3-coder": "\n",
            "glm45": "\n",
            "deepseek-v32": "\n\n",
            "minimax-m2": "\n",
            "seed-oss": "\n",
            "deepseek-v4": "\n\n",
            "deepseek-v41": "\n\n",
            "gigachat35": "\n\n",
            **dict.fromkeys(
                ("dots", "granite-20b-fc", "hunyuan-a13b", "iquest-q1", "longcat", "minicpm5", "nemotron", "olmo3"),
                "\n",
            ),
        }.get(name, "")
        rows.append(Row("so" + between + CALLS[name], None, "so", TWO))
    return rows


def weather(arguments: str, name: str = "get_weather") -> tuple[tuple[str, str], ...]:
    return ((name, arguments),)


_QC = "<tool_call>\n<function=get_weather>\n"
_K0 = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0{_K2}"
_31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
_DS = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
ANSWERS = {
    "cohere-command3": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "cohere-command4": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "ernie45": ("<response>\n", "\n</response>\n"),
    "hunyuan-a13b": ("<answer>\n", "\n</answer>"),
    "kimi-k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
    "solar": ("<|begin|>assistant<|content|>", "<|end|>"),
}
"""What stands around an answer, in formats that mark it."""
TOOL_ROWS = {
    "hermes": [
        Row('<tool_call>{"name": "f", "arguments": {"a": 1', None, None, (("f", '{"a": 1'),)),
        Row('<tool_call>{"name": "nobody", "arguments": [1]}</tool_call>', None, None, (("nobody", "[1]"),)),
    ],
    "qwen3-coder": [
        Row(f"{_QC}<parameter=city>\na </parameter> b\n</parameter>\n</function>\n</tool_call>", None, None,
            weather('{"city": "a </parameter> b"}')),
        Row(f"{_QC}<parameter=city>\n</parameter> </function\n</parameter>\n</function>\n</tool_call>", None, None,
            weather('{"city": "</parameter> </function"}')),
        Row(f"{_QC}<parameter=city>\n\nx\n\n</parameter>\n</function>\n</tool_call>", None, None,
            weather('{"city": "\\nx\\n"}')),
        Row(f"{_QC}<parameter=city>x</parameter></function></tool_call>", None, None, weather('{"city": "x"}')),
        Row(f"{_QC}<parameter=days>\n03\n</parameter>\n</function>\n</tool_call>", None, None, weather('{"days": "03"}')),
        Row(f"{_QC}<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>", None, None, weather('{"note": null}')),
        Row(f"{_QC}<parameter=note>\n12\n</parameter>\n</function>\n</tool_call>", None, None, weather('{"note": "12"}')),
        Row(f'{_QC}<parameter=tags>\n["a", "</parameter>"]\n</parameter>\n</function>\n</tool_call>', None, None,
            weather('{"tags": ["a", "</parameter>"]}')),
        Row(f"{_QC}<parameter=other>\nTrue\n</parameter>\n</function>\n</tool_call>", None, None, weather('{"other": true}')),
        Row(f"{_QC}<parameter=city>\nPar", None, None, weather('{"city": "Par"}')),
        Row(f"{_QC}<parameter=city>\nParis\n</parameter>\n</tool_call>", None, None, weather('{"city": "Paris"}')),
        Row("so\n<function=now>\n</function>", None, "so", (("now", "{}"),)),
        Row("<tool_call>\n<function=nobody>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>", None, None,
            (("nobody", '{"a": "x"}'),)),
        Row("<tool_call>\nnot a call\n</tool_call>", None, "<tool_call>\nnot a call\n</tool_call>"),
        Row('<tool_call>\n{"name": "f"}\n</tool_call>', None, '<tool_call>\n{"name": "f"}\n</tool_call>'),
    ],
    "llama3": [
        Row(f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', None, None, weather(WEATHER)),
        Row(f'  {{"type": "function", "name": "f", "parameters": {WEATHER}}}', None, None, weather(WEATHER, "f")),
        Row(f'{{"parameters": {WEATHER}, "name": "f"}}', None, None, weather(WEATHER, "f")),
        Row('{"name": "now"}', None, None, (("now", "{}"),)),
        Row('{"name": "Bob", "age": 3}', None, '{"name": "Bob", "age": 3}'),
        Row('{"answer": {"name": "x"}} done', None, '{"answer": {"name": "x"}} done'),
        Row('so {"name": "now"}', None, 'so {"name": "now"}'),
        Row('<|python_tag|>brave_search.call(query="x")', None, '<|python_tag|>brave_search.call(query="x")'),
    ],
    "pythonic": [
        Row("<|python_start|>[now()]<|python_end|>", None, None, (("now", "{}"),)),
        Row("[get_weather('Rom', 2)]", None, None, weather('{"city": "Rom", "days": 2}')),
        Row("[f(a=[1, (2, None)], b={'k': True, 'l': -1.5}, c='x\\n\\'y\\'')]", None, None,
            weather('{"a": [1, [2, null]], "b": {"k": true, "l": -1.5}, "c": "x\\n\'y\'"}', "f")),
        Row("[1] says so", None, "[1] says so"),
        Row("[link](http://x)", None, "[link](http://x)"),
        Row("[f(a=open('x'))]", None, "[f(a=open('x'))]"),
        Row("[f(a=1, b=oops)] so", None, " b=oops)] so", weather('{"a": 1', "f")),
        Row("[f(a=1, b='cut", None, " b='cut", weather('{"a": 1', "f")),
        Row("so [now()]", None, "so [now()]"),
    ],
    "mistral": [
        Row(f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]',
            None, None, TWO),
        Row(f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{WEATHER}", None, None, weather(WEATHER)),
        Row(f"[TOOL_CALLS]get_weather{WEATHER}", None, None, weather(WEATHER)),
        Row("[TOOL_CALLS]not a call at all", None, "[TOOL_CALLS]not a call at all"),
    ],
    "deepseek-v3": [
        Row(f"<｜tool▁calls▁begin｜>{_V3}get_weather\n{WEATHER}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", None, None, weather(WEATHER)),
        Row(f"<｜tool▁calls▁begin｜>{_V3}get_weather\n```json\n{WEATHER}\n", None, None, weather(WEATHER)),
    ],
    "deepseek-v31": [
        Row(f"{_31}<｜tool▁sep｜>{WEATHER}", None, None, weather(WEATHER)),
        Row(f"{_31}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", None, None, weather("{}")),
        Row(f"{_31}<｜tool▁sep｜>3<｜tool▁call▁end｜><｜tool▁calls▁end｜>", None, None, weather("3")),
        Row("<｜tool▁calls▁begin｜>oops oops<｜tool▁calls▁end｜>", None, "<｜tool▁calls▁begin｜>oops oops<｜tool▁calls▁end｜>"),
    ],
    "deepseek-v32": [
        Row(f'{_DS}<｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>", None, None, weather('{"city": "3"}')),
        Row(f'{_DS}<｜DSML｜parameter name="x" string="false">[1, {{"a": null}}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>", None, None, weather('{"x": [1, {"a": null}]}')),
        Row(f'{_DS}<｜DSML｜parameter name="city">Rom</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>", None, None, weather('{"city": "Rom"}')),
    ],
    "kimi-k2": [
        Row("<|tool_calls_section_begin|><|tool_call_begin|>functions.ge", None, "<|tool_calls_section_begin|><|tool_call_begin|>functions.ge"),
        Row(f"{_K0}{WEATHER}", None, None, weather(WEATHER)),
        Row(f"{_K0}{WEATHER}<|tool_call_end|><|tool_calls_section_end|>so", None, "so", weather(WEATHER)),
        Row(f"{_K0}<|tool_call_end|><|tool_calls_section_end|>", None, None, weather("{}")),
    ],
    "glm45": [
        Row("<tool_call>now</tool_call>", None, None, (("now", "{}"),)),
        Row("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", None, None, (("f", '{"a": 1}'),)),
        Row("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a\n</arg_value> b</arg_value>\n</tool_call>",
            None, None, weather('{"city": "a\\n</arg_value> b"}')),
        Row("<tool_call>not a call</tool_call>", None, "<tool_call>not a call</tool_call>"),
    ],
}  # fmt: skip
