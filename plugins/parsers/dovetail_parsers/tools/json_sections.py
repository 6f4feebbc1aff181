"""Formats of calls as JSON between markers: a class each, with a sample and its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody
from dovetail_parsers.tools.sections import JsonSection


class ApertusTools(JsonSection):
    r"""`apertus`: Apertus-8B and -70B Instruct.

    ```
    <|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>
    ```

    The key of an object is the name, its value the arguments. One list holds all calls.

    Defined by the `chat_template` of swiss-ai/Apertus-8B-Instruct-2509.
    """

    start, end = "<|tools_prefix|>", "<|tools_suffix|>"
    keys = ("", "")


class CohereCommandTools(JsonSection):
    r"""`cohere-command`: Cohere Command R7B, Command A and Command 4.

    ```
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>
    ```

    One list holds all calls. Their ids are numbers that mean nothing beyond the reply.

    Defined by the `chat_template` of CohereLabs/c4ai-command-r7b-12-2024 and
    CohereLabs/command-a-reasoning-08-2025.
    """

    start, end = "<|START_ACTION|>", "<|END_ACTION|>"
    keys = ("tool_name", "parameters")


class GigaChat3Tools(JsonSection):
    r"""`gigachat3`: GigaChat 3 and 3.1.

    ```
    <|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}
    ```

    GigaChat 3 begins a message of its own, `function call<|role_sep|>` and a newline. One call per reply.

    Defined by the `chat_template` of ai-sage/GigaChat3-10B-A1.8B and GigaChat3.1-10B-A1.8B.
    """

    start = "<|function_call|>"
    before = "\n\n"
    starts = ("function call<|role_sep|>",)
    inner = ("<|role_sep|>", "<|message_sep|>")
    ignored = ("function call<|role_sep|>", "<|message_sep|>")
    listed = False

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers; what ends the message before a call is none of it."""
        return replace(super().extend(spec, tools), dropped=(*spec.dropped, "<|message_sep|>"))


class GraniteTools(JsonSection):
    r"""`granite`: Granite 3.0 to 3.3.

    ```
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    ```

    Granite 3.0 writes the marker as a token, later ones `<tool_call>` as text. Nothing closes the list.

    Defined by the `chat_template` of ibm-granite/granite-3.0-8b-instruct and granite-3.3-8b-instruct.
    """

    start = "<|tool_call|>"
    starts = ("<tool_call>",)
    ignored = ("<tool_call>", "</tool_call>")


class Granite20bFcTools(JsonSection):
    r"""`granite-20b-fc`: Granite-20B-FunctionCalling.

    ```
    <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}
    ```

    The marker is repeated for each call; nothing closes one.

    Defined by the model card of ibm-granite/granite-20b-functioncalling.
    """

    start = "<function_call>"
    before = "\n"
    listed = False
    written = (" ", "")


class HunyuanA13bTools(JsonSection):
    r"""`hunyuan-a13b`: Hunyuan-A13B-Instruct, others with a list between `<tool_calls>` (Jamba, MiniMax-M1).

    ```
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
    ```

    One section holds all calls, in a list or on lines of their own.

    Defined by the `chat_template` of tencent/Hunyuan-A13B-Instruct, ai21labs/AI21-Jamba-Mini-1.6 and
    MiniMaxAI/MiniMax-M1-80k.
    """

    start, end = "<tool_calls>", "</tool_calls>"
    before = "\n"


class InternLmTools(JsonSection):
    r"""`internlm`: InternLM2, 2.5 and 3, Intern-S1.

    ```
    <|action_start|><|plugin|>
    {"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>
    ```

    One call per section; a space may stand between the markers.

    Defined by the `chat_template` of internlm/internlm2_5-7b-chat and docs/tool_calling of internlm/Intern-S1.
    """

    start, end = "<|action_start|>", "<|action_end|>"
    keys = ("name", "parameters")
    listed = False
    written = ("<|plugin|>\n", "")
    inner = ("<|plugin|>",)
    ignored = ("<|plugin|>",)


class LongCatTools(JsonSection):
    r"""`longcat`: LongCat-Flash.

    ```
    <longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>
    ```

    One call per section.

    Defined by the `chat_template` of meituan-longcat/LongCat-Flash-Chat.
    """

    start, end = "<longcat_tool_call>", "</longcat_tool_call>"
    before = "\n"
    listed = False
    written = ("\n", "\n")


class NemotronTools(JsonSection):
    r"""`nemotron`: Nemotron-Nano 8B v1, 9B and 12B v2, Llama-Nemotron.

    ```
    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>
    ```

    One list holds all calls.

    Defined by the `chat_template` of nvidia/NVIDIA-Nemotron-Nano-9B-v2.
    """

    start, end = "<TOOLCALL>", "</TOOLCALL>"
    before = "\n"


class Phi4MiniTools(JsonSection):
    r"""`phi4-mini-json`: Phi-4-mini-instruct.

    ```
    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    ```

    The marker is plain text; nothing closes the list.

    Defined by the model card of microsoft/Phi-4-mini-instruct (function calling).
    """

    start = "functools"


class XlamTools(JsonSection):
    r"""`xlam`: xLAM-2 and xLAM-1.

    ```
    [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    ```

    The whole answer is a list of calls. Models put it into a fence, between `<tool_call>` or behind `[TOOL_CALLS]`
    at times. Lists and fences are ordinary text, too, so the first call names a tool of the request, or there is none.

    Defined by the `chat_template` and model card of Salesforce/xLAM-2-8b-fc-r.
    """

    starts = ("```json", "<tool_call>", "[TOOL_CALLS]")
    bare = "["
    ignored = ("```", "json", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read a list whose first name is known."""
        made = super().body(new_call, tools)
        made.doubt_names()
        return made
