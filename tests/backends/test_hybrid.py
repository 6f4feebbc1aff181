"""One backend for prompts and another for decoding: the kit, the engine's tokens, the flags and the refusals."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.contracts.attention import AttentionBackend, Phase
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.messages import SamplerParams
from dovetail.plugins import Registry, make_plan
from dovetail.runtime.attention.hybrid import common_caps, hybrid
from dovetail.runtime.device.devices import choose, installed
from dovetail.runtime.runner import ModelRunner
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention import AttentionBackendConformance
from dovetail_testing.conformance.attention_cases import DECODE, MIXED, PREFILL
from dovetail_testing.conformance.attention_graph import capture_and_replay
from dovetail_testing.conformance.attention_world import Case, make_world, verify
from dovetail_testing.engine import generate, tokens
from dovetail_testing.models import make_model

CPU = torch.device("cpu")
GREEDY = SamplerParams(max_tokens=3, temperature=0)


class Interpreted(TritonBackend):
    """Triton in its interpreter."""

    caps = replace(
        TritonBackend.caps, devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), head_dims=frozenset({16})
    )


class OtherNative(TorchNativeBackend):
    """Another class that does the same."""


class TestTwoHalves(AttentionBackendConformance):
    """The kit on a hybrid; with DOVETAIL_SOAK its decode half is Triton, which takes a minute in the interpreter."""

    plugin_class: ClassVar[Any] = hybrid(
        TorchNativeBackend, Interpreted if "DOVETAIL_SOAK" in os.environ else OtherNative
    )
    page_sizes: ClassVar[tuple[int, ...]] = (3,)


@pytest.mark.parametrize("lengths", [DECODE[:1], MIXED[1:]])
def test_torch_prefill_and_triton_decode_agree_with_float64(lengths: Any) -> None:
    """The halves read each other's pages."""
    verify(hybrid(TorchNativeBackend, Interpreted), Case(lengths=lengths, num_kv_heads=2), CPU)


@pytest.mark.parametrize("lengths", [PREFILL[2:4]])
def test_triton_prefill_and_torch_decode_agree_with_float64(lengths: Any) -> None:
    """The halves the other way round read each other's pages too."""
    verify(hybrid(Interpreted, TorchNativeBackend), Case(lengths=lengths, num_kv_heads=2), CPU)


def test_greedy_tokens_do_not_depend_on_who_computes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine with `--decode-attention-backend` generates what it generates with one backend, cache hits included."""
    folder = make_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    prompts = [[7, 8, 9] * 3, [7, 8, 9] * 3 + [1]]
    changes = {"chunked_prefill_size": 7, "page_size": 4}
    want = [tokens(deltas) for deltas in generate(folder, prompts, GREEDY, **changes)]
    monkeypatch.setattr(TritonBackend, "caps", Interpreted.caps)
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    with caplog.at_level(logging.INFO, "dovetail"):
        found = generate(folder, prompts, GREEDY, decode_attention_backend="triton", **changes)
    assert [tokens(deltas) for deltas in found] == want


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [(TorchNativeBackend, TritonBackend), (TritonBackend, TorchNativeBackend)])
def test_halves_agree_with_float64_on_a_gpu(pair: tuple[type[AttentionBackend], type[AttentionBackend]]) -> None:
    """Compiled kernels and torch read each other's pages; a hybrid that decodes in graphs is captured and replayed."""
    for lengths in (DECODE, PREFILL, MIXED):
        verify(hybrid(*pair), Case(lengths=lengths, num_kv_heads=2), torch.device("cuda"))
    if hybrid(*pair).caps.graph != "none":
        capture_and_replay(hybrid(*pair), Case(lengths=DECODE))


def test_the_decode_half_says_how_many_rows_read_a_prefix_once() -> None:
    """`prefix_group` is the decode half's, whatever the other one does."""
    for prefill, decode, want in ((TorchNativeBackend, Interpreted, 16), (Interpreted, TorchNativeBackend, 0)):
        world = make_world(Case(lengths=DECODE), CPU)
        assert hybrid(prefill, decode)(world.case.config(), world.pool, CPU).prefix_group == want


class Spy(TorchNativeBackend):
    """Notes what it is asked to do."""

    calls: ClassVar[list[str]]

    def plan(self, batch: Any, phase: Phase) -> None:
        self.calls.append("plan")
        super().plan(batch, phase)

    def write_kv(self, *args: Any) -> None:
        self.calls.append("write")
        super().write_kv(*args)

    def forward_extend(self, *args: Any) -> None:
        self.calls.append("extend")
        super().forward_extend(*args)

    def forward_decode(self, *args: Any) -> None:
        self.calls.append("decode")
        super().forward_decode(*args)


@pytest.mark.parametrize(
    ("lengths", "prefill", "decode"),
    [
        (DECODE, [], ["plan", "write", "decode"]),
        (PREFILL, ["plan", "write", "extend"], []),
        (MIXED, ["plan", "extend"], ["plan", "write", "decode"]),
    ],
)
def test_each_half_does_its_part_and_no_more(lengths: Any, prefill: list[str], decode: list[str]) -> None:
    """A half is planned only for steps with rows for it, and keys and values are written once."""
    one, other = type("One", (Spy,), {"calls": []}), type("Other", (Spy,), {"calls": []})
    world = make_world(Case(lengths=lengths), CPU)
    world.run(hybrid(one, other)(world.case.config(), world.pool, CPU))
    assert (one.calls, other.calls) == (prefill, decode)


def test_caps_are_those_of_both() -> None:
    """Sets are cut, features need both; graphs follow the decode half, prefill graphs both."""
    native, triton = TorchNativeBackend.caps, TritonBackend.caps
    paged = replace(triton, page_sizes=frozenset({1, 16}), sinks=False)
    both = common_caps(native, paged)
    assert (both.devices, both.page_sizes, both.sinks) == (frozenset({"cuda"}), frozenset({1, 16}), False)
    assert (both.head_dims, both.needs_cpu_lens, both.sliding_window) == (triton.head_dims, True, True)
    decode = replace(triton, graph="decode")
    graphs = [common_caps(*pair).graph for pair in ((native, triton), (triton, native), (triton, triton))]
    assert graphs == ["decode", "none", "mixed"]
    assert common_caps(decode, triton).graph == "decode"
    assert common_caps(triton, decode).graph == "mixed"


def test_a_refusal_names_the_half() -> None:
    """`why_not` says which half refuses and why; latent rows are served where both halves serve them."""
    config = Case(lengths=DECODE).config()
    both = hybrid(TorchNativeBackend, TritonBackend, ("torch_native", "triton"))
    why = both.why_not(config, CPU, torch.float32, 16) or ""
    assert why.startswith("decode by triton: device 'cpu' is not supported")
    caps = replace(TorchNativeBackend.caps, mixers=frozenset({"kv"}))
    plain = type("Plain", (TorchNativeBackend,), {"caps": caps})
    latent = Case(lengths=DECODE, latent=True, num_kv_heads=1).config()
    why = hybrid(TorchNativeBackend, plain, ("latent", "plain")).why_not(latent, CPU, torch.float32, 16) or ""
    assert why == "decode by plain: KitForCausalLM needs latent rows (MLA), which it does not provide"
    both = hybrid(TorchNativeBackend, TorchNativeBackend, ("latent", "latent"))
    assert both.why_not(latent, CPU, torch.float32, 16) is None


def test_a_plan_holds_the_halves() -> None:
    """Each half is planned by its name or alias; an unknown one is refused under its own flag."""
    plan = make_plan(Registry.scan(), attention_backend="auto", prefill_attention_backend="sdpa", device="cpu")
    assert [(p.name, p.use, p.requested) for p in plan.of_kind("attention_backend")] == [
        ("torch_native", "", False),
        ("torch_native", "prefill", True),
    ]
    plan = make_plan(Registry.scan(), attention_backend="auto", decode_attention_backend="auto", device="cpu")
    assert [p.use for p in plan.of_kind("attention_backend")] == [""]
    with pytest.raises(PluginError, match=r"^--decode-attention-backend 'nope': not installed"):
        make_plan(Registry.scan(), attention_backend="auto", decode_attention_backend="nope", device="cpu")
    with pytest.raises(PluginError, match=r"^--prefill-attention-backend 'triton'.*runs on cuda, not on cpu"):
        make_plan(Registry.scan(), attention_backend="auto", prefill_attention_backend="triton", device="cpu")


def test_auto_explains_its_choice_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One log line says what was chosen, and why each other candidate was not."""
    folder = make_model(tmp_path, "LlamaForCausalLM")

    def refuse(self: TritonBackend, *args: Any) -> None:
        raise RuntimeError("no\ncompiler")

    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    for caps, method, reason in (
        (TritonBackend.caps, TritonBackend.__init__, "triton: device 'cpu' is not supported; it runs on cuda"),
        (Interpreted.caps, refuse, "triton: it cannot be made: RuntimeError: no compiler"),
    ):
        monkeypatch.setattr(TritonBackend, "caps", caps)
        monkeypatch.setattr(TritonBackend, "__init__", method)
        caplog.clear()
        with caplog.at_level(logging.INFO, "dovetail"):
            generate(folder, [], [], device="auto")
        lines = [record.getMessage() for record in caplog.records if "Attention backend" in record.getMessage()]
        assert len(lines) == 1
        assert lines[0].startswith("Attention backend: auto chose torch_native (")
        assert reason in lines[0]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"attention_backend": "triton", "dtype": "bfloat16"}, ["--attention-backend 'triton'", "dtype bfloat16"]),
        ({"attention_backend": "triton", "head": 24}, ["needs head dim 24 (possible: 16)", "auto"]),
        ({"attention_backend": "triton", "broken": True}, ["cannot be made: RuntimeError: no compiler", "triton"]),
        ({"decode_attention_backend": "triton", "head": 24}, ["--decode-attention-backend 'triton'", "head dim 24"]),
    ],
)
def test_a_backend_that_cannot_serve_is_one_line_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], parts: list[str]
) -> None:
    """An unsupported head size or dtype, or a failing constructor, is refused before any weight is read."""

    def refuse(self: TritonBackend, *args: Any) -> None:
        raise RuntimeError("no\ncompiler")

    folder = make_model(tmp_path, "LlamaForCausalLM", head_dim=changes.pop("head", 16))
    if changes.pop("broken", False):
        monkeypatch.setattr(TritonBackend, "__init__", refuse)
    monkeypatch.setattr(TritonBackend, "caps", Interpreted.caps)
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    monkeypatch.setattr("dovetail.runtime.start.load.load", lambda checked: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError) as caught:
        generate(folder, [], [], **changes)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_device_that_is_absent_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` without one says whether torch or the driver lacks it, and the way out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, part in ((None, "built without CUDA"), ("12.8", "torch finds no CUDA device here (its CUDA is 12.8)")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(ConfigError) as caught:
            choose(installed(Registry.scan(), "cuda"))
        assert part in str(caught.value)
        assert str(caught.value).endswith("or use --device cpu")


def test_a_half_that_was_not_planned_is_an_error(tmp_path: Path) -> None:
    """A setting that the plan knows nothing of is refused, not ignored."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    client_plan = make_plan(Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", device="cpu")
    from dovetail.plugins import load

    settings = EngineSettings(model_path=str(folder), device="cpu", decode_attention_backend="torch_native")
    with pytest.raises(PluginError, match="--decode-attention-backend 'torch_native': not in the plugin plan"):
        ModelRunner(settings, load(client_plan, "engine"))


def test_a_model_config_is_passed_on() -> None:
    """Both halves are made of the same facts."""
    seen: list[ModelConfig] = []

    class Notes(TorchNativeBackend):
        def __init__(self, config: ModelConfig, *rest: Any) -> None:
            seen.append(config)
            super().__init__(config, *rest)

    world = make_world(Case(lengths=DECODE), CPU)
    made: AttentionBackend = hybrid(Notes, Notes)(world.case.config(), world.pool, CPU)
    assert seen == [world.case.config()] * 2
    assert made.kv_pool is world.pool
