"""`--batch-invariant` over Triton's kernels, captured and not, in the interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_graphs import add_graphs
from test_sharing_engine import answers

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.kernels import KernelSet
from dovetail.engine.core import EngineCore
from dovetail.executor.local import LocalExecutor
from dovetail.messages import SamplerParams
from dovetail.plugins import load
from dovetail.runtime.device.device_state import RowParams
from dovetail.text.tokenizer.ends import end_ids
from dovetail_backends.kernels.triton import TritonKernels
from dovetail_backends.triton import TritonBackend
from dovetail_testing import check_class, conformance_class
from dovetail_testing.engine import make_core, make_plans
from dovetail_testing.models import make_model


class OnCpu(TritonBackend):
    """The backend in the interpreter."""

    caps = replace(TritonBackend.caps, devices=frozenset({"cpu"}))


@pytest.mark.full
@pytest.mark.parametrize("check", ["test_batch_invariance", "test_invariance_of_chunks"])
def test_the_kit_finds_equal_bits(check: str, keeps_bits: bool) -> None:
    """Beside others, in chunks, as decode rows; with windows, soft caps and sinks."""
    if check == "test_invariance_of_chunks" and not keeps_bits:
        pytest.skip("NumPy, by which the interpreter multiplies, gives a column other bits at other places here")
    report = check_class(conformance_class("attention_backend", plugin_class=OnCpu), check)
    assert report.passed, report.text()
    assert "1 passed" in report.text()


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 40, "n_routed_experts": 8, "n_group": 4},
    **{"n_shared_experts": 1, "num_experts_per_tok": 3, "topk_group": 2, "first_k_dense_replace": 1},
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", {"head_dim": 16}),
    "packed experts": ("Qwen3MoeForCausalLM", EXPERTS),
    "latent": ("DeepseekV3ForCausalLM", LATENT),
}


@pytest.mark.parametrize("which", ["dense", pytest.param("packed experts", marks=pytest.mark.full), "latent"])
def test_an_engine_answers_alike_in_any_company(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request alone and eagerly, and all at once in graphs, behind a common prefix, in small chunks."""
    architecture, shape = SHAPES[which]
    folder = make_model(tmp_path, architecture, num_hidden_layers=1, **shape)
    more: dict[str, Any] = {}
    if which == "packed experts":  # all in fp8, which a GPU keeps packed, by kernels for one
        more = {"quantization": "fp8", "kernels": "triton"}
        monkeypatch.setattr(TritonKernels, "keeps_packed", KernelSet.keeps_packed)
    rng = random.Random(5)
    start = [rng.randrange(190) for _ in range(32)]
    prompts = [start + [rng.randrange(190) for _ in range(1 + 9 * i)] for i in range(4)]
    params = [
        SamplerParams(max_tokens=4, temperature=0.9 * (i % 2), top_p=0.95, seed=i, ignore_eos=True) for i in range(4)
    ]
    monkeypatch.setattr(TritonBackend, "caps", OnCpu.caps)
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    small: dict[str, Any] = {"attention_backend": "triton", "batch_invariant": True, "max_total_tokens": 1024, **more}
    alone = []
    for prompt, asked in zip(prompts, params, strict=True):
        alone += answers(make_core(folder, **small), [prompt], [asked])
    settings, plan = make_plans(folder, chunked_prefill_size=20, **small)
    plugins = load(plan, "engine")
    executor = LocalExecutor(settings, plugins)
    backend: Any = executor.runner.attention
    assert (backend.batch_invariant, backend.prefix_group) == (True, 0)
    served = {use.operation.split()[0]: use.served[0][2] for use in executor.runner.kernels.table}
    assert more == {} or (served["packed_experts"], served["packed_norm_linear"]) == ("triton", "triton")
    add_graphs(executor, max_requests=4, prefill=False)
    assert (
        answers(
            EngineCore(settings, plugins, executor, eos_ids=end_ids(TokenizerFiles.read(folder, folder))),
            prompts,
            params,
        )
        == alone
    )


def test_what_is_adjusted_leaves_the_graphs() -> None:
    """Rows with penalties are drawn outside of graphs, where that must not tell; others stay."""
    for apart, expected in ((False, [True, True]), (True, [True, False])):
        found = []
        for more in ({}, {"frequency_penalty": 0.5}):
            params = RowParams(2, torch.device("cpu"))
            params.batch_invariant = apart
            params.rows[0].params = SamplerParams(max_tokens=1, temperature=1.0, **more)
            found.append(params.facts_of(np.array([0])).fits_graph)
        assert found == expected
