"""Every built-in passes the kit that is offered to everybody."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dovetail.base.distribution import DISTRIBUTION
from dovetail.plugins import KINDS
from dovetail_backends.kernels.triton import DRAWS, MADE, MIXTURES
from dovetail_testing import Sample, check_class, conformance_class
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.kernels_mixers import FOLDS

TESTS = Path(__file__).parents[1]
COMPARED = {"latent_rows", "norm_rotate", "norm_gate", "finish_step", "write_changes"}
"""Dear ones of Triton's kernels, which `make test` holds against their meanings elsewhere.

That is test_fused_ops.py in tests/layers, test_step_ops.py and test_row_changes.py in tests/runtime.
"""


def beside(name: str, file: str) -> Any:
    """Import a module of other tests."""
    spec = importlib.util.spec_from_file_location(name, TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


IMAGES = beside("image_references", "models/image_references.py")
TABLE_OF = beside("parser_samples", "parsers/samples.py")
TEMPLATES = beside("parser_templates", "parsers/test_round_trip.py")
METHODS = beside("quantisation_packers", "models/packers.py").METHODS
ONE_OF = {method.plugin: method for method in METHODS.values()}


def quantised(name: str) -> dict[str, Any]:
    """One of the ways in which a quantisation finds matrices stored: all stand in the models' own tests."""
    method = ONE_OF[name]
    pack = lambda self, weight: method.pack(weight)  # noqa: E731 - methods of a class
    return {"config": method.config, **method.kit, "pack": pack, "unpack": lambda self, tensors: method.unpack(tensors)}


def samples(rows: list[Any]) -> list[Sample]:
    """One of the golden table's rows as a sample: all stand in the parsers' own tests."""
    return [Sample(row.text, row.reasoning, row.content, row.calls, prompt_tail=row.tail) for row in rows[:1]]


def gguf_file(folder: Path) -> dict[str, Any]:
    """Write a GGUF file; its tensors."""
    from safetensors.torch import load_file

    plain = folder.with_name(f"{folder.name}-plain")
    FAMILIES.make_checkpoint(plain, "llama")
    beside("gguf_files", "models/gguf_files.py").write_gguf(plain, folder / "tiny.gguf")
    return load_file(plain / "model.safetensors")


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<why>{{ m.reasoning_content }}</why>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<do>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</do>{% endfor %}'
    "<|stop|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Thinking and calls of no known family, for the parsers that read templates."""
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True, "temperature": 0.5}
CALLED: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
ATTRS: dict[tuple[str, str], dict[str, Any]] = {
    ("api", "openai"): {
        "samples": {
            "/v1/chat/completions": [
                ASKED,
                {**ASKED, "logprobs": True, "top_logprobs": 2, "n": 2},
                {
                    **ASKED,
                    "tools": [{"type": "function", "function": CALLED}],
                    "stream_options": {"include_usage": True},
                },
            ],
            "/v1/completions": [{"prompt": "a", "stream": True}, {"prompt": ["a", "b"], "logprobs": 2, "n": 2}],
        },
        "wrong": {"/v1/chat/completions": [{}, {**ASKED, "audio": {}}], "/v1/completions": [{"prompt": 5.5}]},
    },
    ("api", "anthropic"): {
        "samples": {
            "/v1/messages": [
                {"model": "m", "max_tokens": 9, "messages": ASKED["messages"], "stream": True},
                {
                    "model": "m",
                    "max_tokens": 9,
                    "messages": ASKED["messages"],
                    "thinking": {"type": "adaptive"},
                    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                },
            ]
        },
        "wrong": {"/v1/messages": [{"model": "m", "max_tokens": 0, "messages": ASKED["messages"]}]},
    },
    ("api", "sglang"): {
        "samples": {
            "/generate": [
                {"text": "a", "stream": True, "sampling_params": {"temperature": 0.5}},
                {"text": ["a", "b"], "return_logprob": True, "top_logprobs_num": 2},
            ]
        },
        "merging": ("/generate",),
        "wrong": {"/generate": [{}]},
    },
    ("hooks", "otel"): {"remembers": 20_000},  # tests/plugins/test_otel.py::test_what_is_remembered_is_bounded
    **{("reasoning_parser", name): {"samples": samples(TABLE_OF.reasoning_rows(name))} for name in TABLE_OF.TAGS},
    **{
        ("reasoning_parser", name): {"samples": samples(TABLE_OF.thinking_rows(name))}
        for name in TABLE_OF.MACHINES
        if name != "beam"
    },
    **{
        ("tool_parser", name): {"samples": samples(TABLE_OF.tool_rows(name)), "tools": TABLE_OF.TOOLS}
        for name in TABLE_OF.CALLS
    },
    ("reasoning_parser", "minimax-m2-append-think"): {
        "samples": [Sample("why\n</think>\n\nso", "why", "so", prompt_tail="<think>\n")]  # the stream joins them
    },
    **{(f"{kind}_parser", "template"): {"chat_template": TEMPLATE} for kind in ("reasoning", "tool")},
    **{("quantization", name): quantised(name) for name in ONE_OF},
    ("kernels", "triton"): {
        "dtypes": ("float32",),
        "rows": (0, 1, 17),
        "few_rows": (5,),
        "many_rows": (),
        "ops": tuple(op for op in MADE if op not in MIXTURES | FOLDS | DRAWS | COMPARED),
    },  # interpreted; all: tests/layers/test_kernels.py. Draws: tests/runtime/test_draw.py
    ("logits_processor", "no-repeat-ngram"): {
        "params": [{"size": 1}, {"size": 2}, {"size": 4, "prompt": False}, {"size": 16}],
        "wrong_params": [{}, {"size": 0}, {"size": 17}, {"size": "2"}, {"size": 2, "prompt": 1}],
    },
    ("processor", "gemma3"): IMAGES.GEMMA3,
    ("processor", "gemma4"): IMAGES.GEMMA4,
    ("processor", "glm4v"): IMAGES.GLM4V,
    ("processor", "internvl"): IMAGES.INTERNVL,
    ("processor", "llama4"): IMAGES.LLAMA4,
    ("processor", "pixtral"): IMAGES.PIXTRAL,
    ("processor", "qwen2-vl"): IMAGES.QWEN2_VL,
    ("processor", "qwen3-vl"): IMAGES.QWEN3_VL,
    ("checkpoint", "gguf"): {"write": lambda self, folder: gguf_file(folder), "place": "tiny.gguf"},
    ("model", "LlamaForCausalLM"): {"configs": [{}, {"attention_bias": True, "mlp_bias": True}]},
    ("model", "Qwen3ForCausalLM"): {"configs": [{}, {"head_dim": 32}]},
    ("model", "transformers"): {"architecture": "Qwen3ForCausalLM", "configs": [{}, {"tie_word_embeddings": True}]},
}
"""What the kit cannot know of each."""
for style, case in TEMPLATES.CASES.items():
    for found in (("reasoning_parser", case.reasoning), ("tool_parser", case.tools)):
        if found[1] is not None:
            ATTRS[found].setdefault("auto_templates", []).append(TEMPLATES.template(style).source)

FAMILIES = beside("families", "models/families.py")
ENCODERS = beside("encoders", "models/encoders.py")
TESTED = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "transformers"}
"""Models in the kit's own sizes; the others get those of their family."""


def family(architecture: str) -> dict[str, Any]:
    """Make checkpoints of a model's family: its experts are few and small."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture.endswith("ForConditionalGeneration"):
        return seeing(architecture)
    if not architecture.endswith("ForCausalLM"):
        return headless(architecture)
    kind = next(k for k in FAMILIES.DECODERS if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(k) == architecture)

    def make_checkpoint(self: Any, folder: Path, **changes: Any) -> Path:
        FAMILIES.make_checkpoint(folder, kind, **{"vocab_size": 199, **changes})
        return folder

    configs: list[dict[str, Any]] = [{}, {"tie_word_embeddings": True}]
    if hasattr(FAMILIES.config_of(kind), "use_sliding_window"):
        configs.append({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1})
    return {"make_checkpoint": make_checkpoint, "configs": configs}


def headless(architecture: str) -> dict[str, Any]:
    """Make checkpoints of an encoder, or of a decoder without its output head."""
    import torch
    import transformers

    kinds = [*ENCODERS.ENCODERS, "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"]
    task = next((task for task in ("ForMaskedLM", "ForSequenceClassification") if architecture.endswith(task)), "")
    auto = getattr(transformers, f"AutoModel{task}")
    kind = next(k for k in kinds if auto._model_mapping[transformers.CONFIG_MAPPING[k]].__name__ == architecture)

    def make_checkpoint(self: Any, folder: Path, **changes: Any) -> Path:
        if kind in ENCODERS.ENCODERS:
            ENCODERS.make_encoder(folder, kind, task.removeprefix("For"), **{"vocab_size": 199, **changes})
            return folder
        torch.manual_seed(0)
        config = FAMILIES.config_of(kind, vocab_size=199, pad_token_id=0, **changes)
        model = auto.from_config(config, attn_implementation="eager").float()
        FAMILIES.perturb(model)
        model.save_pretrained(folder)
        return folder

    return {"make_checkpoint": make_checkpoint, "configs": [{}]}


SEEN = {
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    *("Gemma3ForConditionalGeneration", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
    *("Gemma4ForConditionalGeneration", "InternVLForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    "Llama4ForConditionalGeneration",
}
"""Models whose towers are served, too."""


def seeing(architecture: str) -> dict[str, Any]:
    """Make checkpoints of a model that takes images, whose text part is compared."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = next(k for k in FAMILIES.SEEING if MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[k] == architecture)

    def make_checkpoint(self: Any, folder: Path, **changes: Any) -> Path:
        FAMILIES.make_seeing(folder, kind, **{"vocab_size": 199, **changes})
        if architecture in SEEN:
            return folder
        file = folder / "model.safetensors"
        tensors = {name: t for name, t in load_file(file).items() if not re.search(r"visual|vision|projector", name)}
        save_file(tensors, file, {"format": "pt"})  # the kit tries what happens without each tensor, which uses all
        return folder

    def reference_logits(self: Any, folder: Path, ids: Sequence[int]) -> Any:
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return model(torch.tensor([list(ids)])).logits[0]

    return {"make_checkpoint": make_checkpoint, "reference_logits": reference_logits, "configs": [{}]}


SAMPLE = {
    "LlamaForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Gemma3ForConditionalGeneration",
    "BertForSequenceClassification",
    *("internvl", "qwen2-vl"),  # one cuts images into tiles, the other into patches of any number
}
"""Models, and processors of images, that take the kit at every run."""
WHOLE = {
    *("qwen3", "gpt-oss", "hermes", "glm45", "pythonic"),  # one parser for each way in which formats are read
    *(
        "LlamaForCausalLM",
        "torch_native",
        "llguidance",
        "fp8",
        "fcfs",
        "ngram",
        "no-repeat-ngram",
        "openai",
        "anthropic",
        "sglang",
    ),
}
"""Built-ins that take all of the kit at every run: one of each kind. Other parsers are tried in tests/parsers."""
OF_THE_PACKAGE = "listing or child_process or loads_twice or core_is or left_behind or no_torch"
"""Each is a process, and all built-ins are of one package."""
BUILTINS = {
    f"{kind.name}-{entry.name}": (kind.name, entry.name)
    for kind in KINDS.values()
    for entry in entry_points(group=kind.entry_point_group)
    if entry.dist is not None and entry.dist.name == DISTRIBUTION
}


ABSENT = find_spec("flash_attn_interface") is None and os.path.exists("/dev/nvidiactl")
MARKS = {
    "attention_backend-fa3": pytest.mark.skipif(
        ABSENT, reason="FlashAttention-3 is not installed; tests/backends/test_fa3.py runs the kit on a stand-in"
    ),
    "attention_backend-fa4": pytest.mark.skipif(
        find_spec("flash_attn") is None,
        reason="FlashAttention-4 is not installed; tests/backends/test_fa4.py runs the kit on a stand-in",
    ),
    "kernels-humming": pytest.mark.skipif(
        find_spec("humming") is None,
        reason="humming-kernels is not installed; tests/layers/test_humming.py has a stand-in",
    ),
}
"""Built-ins that cannot run everywhere."""


def cases(keys: Iterable[str]) -> list[Any]:
    return [pytest.param(key, marks=MARKS.get(key, ())) for key in keys]


def builtin_class(kind: str, name: str) -> type[Conformance]:
    """Return the conformance class of a built-in."""
    is_family = kind == "model" and name not in TESTED
    return conformance_class(kind, name, **(family(name) if is_family else ATTRS.get((kind, name), {})))


def is_tried(kind: str, name: str) -> bool:
    """Return whether `make test` tries a built-in: models have their parity test, parsers their tables in any case.

    Processors of images have theirs in tests/media.
    """
    return name in WHOLE or (name in SAMPLE if kind in ("model", "processor") else not kind.endswith("_parser"))


def check_builtin(kind: str, name: str, select: str) -> None:
    report = check_class(builtin_class(kind, name), select)
    assert report.passed, report.text()


@pytest.mark.parametrize("key", cases(key for key, found in BUILTINS.items() if is_tried(*found)))
def test_a_builtin_passes_the_kit(key: str) -> None:
    """All of it for one built-in of each kind, for others what is not the same for all."""
    check_builtin(*BUILTINS[key], "" if BUILTINS[key][1] in WHOLE else f"not ({OF_THE_PACKAGE})")


@pytest.mark.full
@pytest.mark.parametrize("key", cases(key for key, found in BUILTINS.items() if found[1] not in WHOLE))
def test_a_builtin_passes_what_is_left(key: str) -> None:
    """The rest of the kit for each other one, and all of it for those that `make test` leaves out."""
    check_builtin(*BUILTINS[key], OF_THE_PACKAGE if is_tried(*BUILTINS[key]) else "")


def test_every_parser_has_samples() -> None:
    """A parser cannot be added to the distribution without them."""
    assert {found for found in BUILTINS.values() if found[0].endswith("_parser")} <= ATTRS.keys()


def test_parsers_import_no_torch() -> None:
    """All of them together: a parser author's tests start at once."""
    groups = [KINDS[kind].entry_point_group for kind in ("reasoning_parser", "tool_parser")]
    code = (
        "import sys\nfrom importlib.metadata import entry_points\n"
        f"for group in {groups}:\n"
        "    for entry in entry_points(group=group):\n"
        "        entry.load() if entry.value.startswith('dovetail_parsers') else None\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
