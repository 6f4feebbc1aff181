"""The built-ins pass the kit that is offered to everybody."""

from __future__ import annotations

from dovetail.testing import (
    AttentionBackendConformance,
    ModelConformance,
    ReasoningParserConformance,
    Sample,
    ToolParserConformance,
)

ARGUMENTS = '{"city": "Rom, \\"die\\" Stadt", "n": [1, {"é": null}]}'
WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
THINKING = [
    Sample("<think>\nwhy 🎉\n</think>\n\nso", "why 🎉", "so", prompt_tail="<|im_start|>assistant\n"),
    Sample("so it is", None, "so it is", prompt_tail="<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    Sample("why\n</think>\n\nso", "why", "so", prompt_tail="<think>\n"),
    Sample("why", "why", None, prompt_tail="<think>\n"),
]


class TestQwen3(ReasoningParserConformance):
    name = "qwen3"
    samples = [*THINKING, Sample("so", None, "so"), Sample("<think>why</think>so", "why", "so")]


class TestDeepSeekR1(ReasoningParserConformance):
    name = "deepseek-r1"
    samples = [
        *THINKING,
        Sample("why\n</think>\n\nso", "why", "so"),
        Sample("<think>\nwhy\n</think>\n\nso", "why", "so"),
        Sample("so", None, "so", prompt_tail="<\uff5cAssistant\uff5c>"),
        Sample("<tool_call>{}</tool_call></think>so", "<tool_call>{}</tool_call>", "so"),
    ]


class TestHermes(ToolParserConformance):
    name = "hermes"
    samples = [
        Sample(
            f"so\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n" + '{"name": "g", "arguments": {}}\n</tool_call>',
            content="so",
            tool_calls=[("get_weather", ARGUMENTS), ("g", "{}")],
        ),
        Sample("no call", content="no call"),
        Sample('<tool_call>{"name": "f", "arguments": {"a": 1', tool_calls=[("f", '{"a": 1')]),
    ]


class TestTorchNative(AttentionBackendConformance):
    name = "torch_native"


class TestLlama(ModelConformance):
    name = "LlamaForCausalLM"
    configs = [*ModelConformance.configs, {"attention_bias": True, "mlp_bias": True}]


class TestQwen2(ModelConformance):
    name = "Qwen2ForCausalLM"


class TestQwen3ForCausalLM(ModelConformance):
    name = "Qwen3ForCausalLM"
    configs = [*ModelConformance.configs, {"head_dim": 32}]
