"""An engine on CPU whose decode graphs are stand-ins that compute the step again: order, rows and hint, end to end."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import add_graphs

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.engine import step_builder
from dovetail.engine.core import EngineCore
from dovetail.executor.local import LocalExecutor
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.step import DecodeGraph, Ints
from dovetail.plugins import load
from dovetail.runtime.graphs.decode import Captured, DecodeGraphs
from dovetail.text.tokenizer.ends import end_ids
from dovetail_backends.triton import TritonBackend
from dovetail_testing.engine import make_core, make_plans
from dovetail_testing.models import make_model


def answers(core: EngineCore, prompts: list[list[int]], params: list[SamplerParams]) -> list[list[int]]:
    """Tokens of all prompts, submitted at once."""
    for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        core.handle(Submit(rid="", handle=i, prompt_ids=prompt, params=wanted))
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    while core.has_work:
        for delta in core.step().deltas:
            found[delta.handle] += delta.ids
    return list(found.values())


@pytest.mark.full
def test_an_engine_decodes_behind_common_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prefixes interleaved, ends one by one, seeded and greedy: the tokens of an engine without graphs."""
    folder = make_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=1, head_dim=16)
    rng = random.Random(5)
    starts = [[rng.randrange(190) for _ in range(96)] for _ in range(2)]
    prompts = [starts[i % 2] + [rng.randrange(190) for _ in range(1 + 7 * i)] for i in range(7)]
    params = [
        SamplerParams(max_tokens=2 + i // 2, temperature=0.8 * (i % 3 == 1), seed=i, ignore_eos=True) for i in range(7)
    ]
    want = answers(make_core(folder), prompts, params)

    caps = replace(TritonBackend.caps, devices=frozenset({"cpu"}))
    monkeypatch.setattr(TritonBackend, "caps", caps)
    monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(step_builder, "MIN_SAVED_TOKENS", 64)
    monkeypatch.setattr(step_builder, "MIN_SAVED_SHARE", 0.1)
    used: list[tuple[DecodeGraph, list[int]]] = []
    shared: list[int] = []
    run = DecodeGraphs.run

    def noting(self: DecodeGraphs, rows: Ints, key: DecodeGraph) -> Captured:
        used.append((key, rows.tolist()))
        done = run(self, rows, key)
        if key.shares:
            shared.append(int(backend._prefixes.shared.groups[0].max()))
        return done

    monkeypatch.setattr(DecodeGraphs, "run", noting)
    settings, plan = make_plans(folder, attention_backend="triton")
    plugins = load(plan, "engine")
    executor = LocalExecutor(settings, plugins)
    backend: Any = executor.runner.attention
    add_graphs(executor, max_requests=8, prefill=False)
    assert (
        answers(
            EngineCore(settings, plugins, executor, eos_ids=end_ids(TokenizerFiles.read(folder, folder))),
            prompts,
            params,
        )
        == want
    )
    sharing = [(key, rows) for key, rows in used if key.shares]
    assert {key.rows for key, _ in sharing} >= {4, 8}
    assert max(shared) == 64
    assert any(rows != sorted(rows) for _, rows in sharing)
