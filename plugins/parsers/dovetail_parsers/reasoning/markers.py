"""Reasoning formats that are a pair of markers of their own: a class each, with a sample and its source."""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, State
from dovetail_parsers.reasoning.declared import Declared

_COHERE = Markers("<|START_THINKING|>", "<|END_THINKING|>", "", "", "", ended_by_tools=True, ended_by_answer=True)


class ApertusReasoning(Declared):
    r"""`apertus`: Apertus-8B and -70B Instruct.

    ```
    <|inner_prefix|>Paris is the capital.<|inner_suffix|>The capital of France is Paris.
    ```

    The model opens thinking, or not. No newlines stand around the markers.

    Defined by the `chat_template` of swiss-ai/Apertus-8B-Instruct-2509.
    """

    form = FormatSpec(reasoning=Markers("<|inner_prefix|>", "<|inner_suffix|>", "", "", "", ended_by_tools=True))


class AprielReasoning(Declared):
    r"""`apriel`: Apriel-1.5 and 1.6 Thinker.

    ```
    Here are my reasoning steps:
    Paris is the capital.
    [BEGIN FINAL RESPONSE]
    The capital of France is Paris.
    ```

    Both markers are plain text; the template puts the first into the prompt. Text without a prompt to look at is
    taken to start inside thinking.

    Defined by the `chat_template` of ServiceNow-AI/Apriel-1.6-15b-Thinker.
    """

    form = FormatSpec(
        reasoning=Markers(
            "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", after_end="\n", ended_by_tools=True
        ),
        initial=State.IN,
    )


class CohereCommand3Reasoning(Declared):
    r"""`cohere-command3`: Cohere Command R7B, Command A Reasoning.

    ```
    <|START_THINKING|>Paris is the capital.<|END_THINKING|><|START_RESPONSE|>It is Paris.<|END_RESPONSE|>
    ```

    The template appends the start marker, or an empty thought. The answer stands between markers too, also of
    models that do not think.

    Defined by the `chat_template` of CohereLabs/command-a-reasoning-08-2025 and c4ai-command-r7b-12-2024.
    """

    form = FormatSpec(reasoning=_COHERE, answer=Markers("<|START_RESPONSE|>", "<|END_RESPONSE|>", "", "", ""))


class CohereCommand4Reasoning(Declared):
    r"""`cohere-command4`: Cohere Command 4.

    ```
    <|START_THINKING|>Paris is the capital.<|END_THINKING|><|START_TEXT|>It is Paris.<|END_TEXT|>
    ```

    As `cohere-command3`, with other markers around the answer.

    Defined by the `chat_template` of the model.
    """

    form = FormatSpec(reasoning=_COHERE, answer=Markers("<|START_TEXT|>", "<|END_TEXT|>", "", "", ""))


class Gemma4Reasoning(Declared):
    r"""`gemma4`: Gemma 4.

    ```
    <|channel>thought
    Paris is the capital.
    <channel|>The capital of France is Paris.
    ```

    The template appends an empty thought when thinking is off; else the model opens it, or not. The line break belongs
    to the header: `<|channel>thoughtful` is no thought.

    Defined by the `chat_template` of google/gemma-4-31B-it.
    """

    form = FormatSpec(
        reasoning=Markers("<|channel>thought\n", "<channel|>", after_start="", after_end="", ended_by_tools=True)
    )


class GraniteReasoning(Declared):
    r"""`granite`: Granite 3.2 and 3.3.

    ```
    Here is my thought process: Paris is the capital. Here is my response: It is Paris.
    ```

    Both markers are sentences of plain text; `Here's` stands for `Here is` at times.

    Defined by the model card of ibm-granite/granite-3.2-8b-instruct.
    """

    form = FormatSpec(
        reasoning=Markers(
            "Here is my thought process:",
            "Here is my response:",
            after_start="\n",
            before_end="\n\n",
            after_end="\n",
            ended_by_tools=True,
            also=(("Here's my thought process:", "Here's my response:"),),
        )
    )


class KimiReasoning(Declared):
    r"""`kimi`: Kimi-VL-Thinking and other models that write `◁think▷`.

    ```
    ◁think▷Paris is the capital.◁/think▷The capital of France is Paris.
    ```

    The markers are plain text that tokens cut anywhere. The template appends nothing of them: the model opens
    thinking.

    Defined by the model card and `chat_template` of moonshotai/Kimi-VL-A3B-Thinking-2506.
    """

    form = FormatSpec(
        reasoning=Markers("◁think▷", "◁/think▷", after_start="", before_end="", after_end="", ended_by_tools=True)
    )


class KimiK3Reasoning(Declared):
    r"""`kimi-k3`: Kimi-K3.

    ```
    <|open|>think<|sep|>Paris is the capital.<|close|>think<|sep|>
    <|open|>response<|sep|>It is Paris.<|close|>response<|sep|>
    ```
    (without the line break).

    The template appends the first marker. A marker is several tokens, of which `<|open|>`, `<|close|>` and
    `<|sep|>` are special. The answer stands between markers too.

    Defined by the `chat_template` of moonshotai/Kimi-K3.
    """

    form = FormatSpec(
        reasoning=Markers(
            "<|open|>think<|sep|>", "<|close|>think<|sep|>", "", "", "", ended_by_tools=True, ended_by_answer=True
        ),
        answer=Markers("<|open|>response<|sep|>", "<|close|>response<|sep|>", "", "", ""),
        dropped=("<|close|>message<|sep|>", "<|end_of_msg|>"),
    )


class MiniMaxM3Reasoning(Declared):
    r"""`minimax-m3`: MiniMax-M3.

    ```
    <mm:think>Paris is the capital.</mm:think>The capital of France is Paris.
    ```

    The model opens thinking, or writes the bare end marker. No newlines stand around the markers.

    Defined by the `chat_template` of MiniMaxAI/MiniMax-M3.
    """

    form = FormatSpec(reasoning=Markers("<mm:think>", "</mm:think>", "", "", "", ended_by_tools=True))


class MistralReasoning(Declared):
    r"""`mistral`: Magistral and other Mistral models that reason, with tokenizers of version 13 and later.

    ```
    [THINK]Paris is the capital.[/THINK]The capital of France is Paris.
    ```

    Both markers are special tokens. The prompt ends with `[/INST]`; the model opens thinking itself. A tool call's
    marker ends it too, since it cannot be a quotation.

    Defined by mistral-common, `tokens/tokenizers/instruct.py`, and the `chat_template` of
    mistralai/Magistral-Small-2509.
    """

    form = FormatSpec(
        reasoning=Markers("[THINK]", "[/THINK]", after_start="", before_end="", after_end="", ended_by_tools=True)
    )


class Plamo3Reasoning(Declared):
    r"""`plamo3`: PLaMo 3.

    ```
    <|plamo:begin_think:plamo|>Paris is the capital.<|plamo:end_think:plamo|>The capital of France is Paris.
    ```

    Each marker is several tokens. Text without a prompt to look at is taken to start inside thinking.

    Defined by the description of the format in vLLM's `parser/plamo3.py`.
    """

    form = FormatSpec(
        reasoning=Markers("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", "", "", "", ended_by_tools=True),
        dropped=("<|plamo:tag|>",),
        initial=State.IN,
    )


class SeedOssReasoning(Declared):
    r"""`seed-oss`: Seed-OSS.

    ```
    <seed:think>Paris is the capital.</seed:think>The capital of France is Paris.
    ```

    The template appends the assistant's header; with `thinking_budget` 0 it appends a closed thought as well. No
    newlines stand around the markers.

    Defined by the `chat_template` of ByteDance-Seed/Seed-OSS-36B-Instruct.
    """

    form = FormatSpec(
        reasoning=Markers(
            "<seed:think>", "</seed:think>", after_start="", before_end="", after_end="", ended_by_tools=True
        )
    )


class SolarReasoning(Declared):
    r"""`solar`: Solar Open.

    ```
    <|think|>Paris is the capital.<|end|><|begin|>assistant<|content|>The capital of France is Paris.<|end|>
    ```

    A message for thinking and one for the answer. The template appends `<|begin|>assistant`.

    Defined by the `chat_template` of upstage/Solar-Open-100B.
    """

    form = FormatSpec(
        reasoning=Markers("<|think|>", "<|end|>", "", "", "", ended_by_tools=True, ended_by_answer=True),
        answer=Markers("<|content|>", "<|end|>", "", "", ""),
        dropped=("<|begin|>assistant",),
    )
