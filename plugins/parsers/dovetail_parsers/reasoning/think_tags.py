"""Reasoning formats between `<think>` and `</think>`: a class each, with a sample and its source."""

# ruff: noqa: RUF002 - a marker is written with a full-width bar

from __future__ import annotations

import re
from dataclasses import replace

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.reasoning.declared import Declared


class DeepSeekR1Reasoning(Declared):
    r"""`deepseek-r1`: DeepSeek-R1, R1-0528 and the R1 distillations.

    ```
    <think>
    Paris is the capital.
    </think>

    The capital of France is Paris.
    ```

    The chat template appends `<｜Assistant｜><think>\n`, so that the output starts inside thinking and the start
    marker is missing from it; a model that writes it again is understood. Older templates append `<｜Assistant｜>`
    alone, and the model opens thinking itself, or not. Text without a prompt to look at is taken to start inside
    thinking.

    Defined by the `chat_template` in the tokenizer_config.json of deepseek-ai/DeepSeek-R1 and DeepSeek-R1-0528.
    """

    form = FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)


class DeepSeekV3Reasoning(Declared):
    r"""`deepseek-v3`: DeepSeek-V3.1, V3.2 and later hybrids, with the template's switch `thinking`.

    ```
    Paris is the capital.</think>The capital of France is Paris.
    ```

    The chat template appends `<｜Assistant｜></think>` when thinking is off, which is the default, and
    `<｜Assistant｜><think>` when `thinking` is true; older revisions close with `<think></think>`. No newlines stand
    around the markers.

    Defined by the `chat_template` of deepseek-ai/DeepSeek-V3.1 and the encoding of deepseek-ai/DeepSeek-V3.2.
    """

    form = FormatSpec(
        reasoning=Markers("<think>", "</think>", after_start="", before_end="", after_end="", ended_by_tools=True)
    )


class Ernie45Reasoning(Declared):
    r"""`ernie45`: ERNIE 4.5 Thinking.

    ```
    <think>
    Paris is the capital.
    </think>

    <response>
    The capital of France is Paris.
    </response>
    ```

    The template appends `<think>` and a newline. The answer stands between markers too, which models leave out at
    times.

    Defined by the `chat_template` of baidu/ERNIE-4.5-21B-A3B-Thinking.
    """

    form = FormatSpec(
        reasoning=Markers("<think>", "</think>", ended_by_tools=True),
        answer=Markers("<response>", "</response>", after_end="\n"),
        initial=State.IN,
    )


class Glm45Reasoning(Declared):
    r"""`glm45`: GLM-4.5, 4.6 and 4.7.

    ```
    <think>Paris is the capital.</think>
    The capital of France is Paris.
    ```

    The template of 4.5 and 4.6 appends `<|assistant|>`, and a newline and `<think></think>` when `enable_thinking`
    is false; that of 4.7 appends `<think>`, or a bare `</think>`. A model may go to a `<tool_call>` without closing
    its thinking. One newline may stand behind the end marker.

    Defined by the `chat_template` of zai-org/GLM-4.5 and zai-org/GLM-4.7.
    """

    form = FormatSpec(
        reasoning=Markers(
            "<think>",
            "</think>",
            after_start="",
            before_end="",
            after_end="\n",
            ended_by_tools=True,
            ended_by=("<tool_call>",),
        )
    )


class HunyuanA13bReasoning(Declared):
    r"""`hunyuan-a13b`: Hunyuan-A13B-Instruct.

    ```
    <think>
    Paris is the capital.
    </think>
    <answer>
    The capital of France is Paris.
    </answer>
    ```

    All markers are plain text. The template appends an empty thought when `enable_thinking` is false.

    Defined by the `chat_template` of tencent/Hunyuan-A13B-Instruct.
    """

    form = FormatSpec(
        reasoning=Markers("<think>", "</think>", after_end="\n", ended_by_tools=True),
        answer=Markers("<answer>", "</answer>", after_end=""),
    )


class KimiK2Reasoning(Declared):
    r"""`kimi-k2`: Kimi-K2-Thinking and later.

    ```
    <think>Paris is the capital.</think>The capital of France is Paris.
    ```

    The template appends `<|im_assistant|>assistant<|im_middle|>`, and the model opens thinking, or not. It may go
    to `<|tool_calls_section_begin|>` without closing its thinking. No newlines stand around the markers.

    Defined by the `chat_template` of moonshotai/Kimi-K2-Thinking.
    """

    form = FormatSpec(
        reasoning=Markers(
            "<think>",
            "</think>",
            after_start="",
            before_end="",
            after_end="",
            ended_by_tools=True,
            ended_by=("<|tool_calls_section_begin|>",),
        )
    )


class MiniMaxM2Reasoning(Declared):
    r"""`minimax-m2`: MiniMax-M2 and M2.1.

    ```
    Paris is the capital.
    </think>

    The capital of France is Paris.
    ```

    The template appends `]~b]ai`, a newline, `<think>` and a newline: the output starts inside thinking. Text
    without a prompt to look at is taken to do so.

    Defined by the `chat_template` of MiniMaxAI/MiniMax-M2.
    """

    form = FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)


class MiniMaxM2AppendThinkReasoning(MiniMaxM2Reasoning):
    r"""`minimax-m2-append-think`: MiniMax-M2, its thinking left in the content.

    ```
    <think>Paris is the capital.
    </think>

    The capital of France is Paris.
    ```

    As `minimax-m2`, for clients that send the thinking back as part of the content: the marker that the prompt ends
    with stands before the reply.

    Defined by the parsers of this name in vLLM's and SGLang's documentation.
    """

    form = replace(MiniMaxM2Reasoning.form, reasoning=Markers("<think>", "</think>", ended_by_tools=True, shown=True))


class Qwen3Reasoning(Declared):
    r"""`qwen3`: Qwen3, hybrid (`enable_thinking`) and Thinking models, QwQ.

    ```
    <think>
    Paris is the capital.
    </think>

    The capital of France is Paris.
    ```

    The chat template appends nothing when thinking is on (the model opens it), `<think>\n` in the Thinking models,
    and `<think>\n\n</think>\n\n` when `enable_thinking` is false; some templates close it so unless
    `enable_thinking` is true. A model may go to a `<tool_call>` without closing its thinking.

    Defined by the `chat_template` in the tokenizer_config.json of Qwen/Qwen3-8B and Qwen/Qwen3-4B-Thinking-2507.
    """

    form = FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True, ended_by=("<tool_call>",)))


class Qwen3ThinkingReasoning(Declared):
    r"""`qwen3-thinking`: Qwen3 models that always think, such as Qwen3-235B-A22B-Thinking-2507.

    ```
    Paris is the capital.
    </think>

    The capital of France is Paris.
    ```

    As `qwen3`, except that the template always appends `<think>` and a newline, so the output holds no start
    marker. Text without a prompt to look at is taken to start inside thinking.

    Defined by the `chat_template` of Qwen/Qwen3-235B-A22B-Thinking-2507.
    """

    form = FormatSpec(
        reasoning=Markers("<think>", "</think>", ended_by_tools=True, ended_by=("<tool_call>",)), initial=State.IN
    )


class Step3Reasoning(Declared):
    r"""`step3`: Step3 and Step-3.5.

    ```
    Paris is the capital.
    </think>

    The capital of France is Paris.
    ```

    The template appends `<think>` and a newline: the output starts inside thinking. Text without a prompt to look
    at is taken to do so.

    Defined by the `chat_template` of stepfun-ai/step3.
    """

    form = FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)


_WORD = re.compile(r"<think(:\w+)>")


class HunyuanReasoning(ReasoningParser):
    r"""`hy-v3`: Hunyuan 3 and 4 (Hy3, Hy4).

    ```
    <think>Paris is the capital.</think>The capital of France is Paris.
    ```

    Every marker of a model may end in a word of its own, `<think:opensource>`: it is read off the template, which
    appends an empty thought unless thinking is asked for.

    Defined by the `chat_template` of tencent/Hy3.
    """

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        found = _WORD.search(template.source)
        word = found[1] if found else ""
        return FormatSpec(reasoning=Markers(f"<think{word}>", f"</think{word}>", "", "", "", ended_by_tools=True))


TAGS = {
    "high": ("<ifm|think>", "</ifm|think>"),
    "medium": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "low": ("<ifm|think_faster>", "</ifm|think_faster>"),
}


class K2HorizonReasoning(ReasoningParser):
    r"""`k2-horizon`: K2 Horizon (K2-V3).

    ```
    <ifm|think>Paris is the capital.</ifm|think>The capital of France is Paris.
    ```

    `reasoning_effort` chooses the tags: `think` (high, the default), `think_fast` (medium), `think_faster` (low); all
    are read. Text without a prompt to look at is taken to start inside thinking.

    Defined by the description of the format in vLLM's `reasoning/k2_horizon_reasoning_parser.py`.
    """

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the tags of the request's effort, and the others beside them."""
        effort = str(request.template_kwargs.get("reasoning_effort"))
        start, end = TAGS.get(effort, TAGS["high"])
        others = tuple(pair for pair in TAGS.values() if pair != (start, end))
        markers = Markers(start, end, "", "", "", ended_by_tools=True, also=others)
        return FormatSpec(reasoning=markers, initial=State.IN)
