"""Several GPUs of one host: sums, graphs and engines of ranks against one, and what becomes of a rank that is gone."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail_testing.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
BENCH = Path(__file__).parents[1] / "benchmarks"
RANKS = [num for num in (2, 4, 8) if num <= torch.cuda.device_count()]
PROMPTS = [[(7 * i + j * j) % 190 for j in range(5 + 23 * i)] for i in range(6)]
NUM_KILLED = 380
"""Tokens of the streams that lose a rank: what the longest prompt leaves of the model's 512, nearly."""
SETS = ("auto", "plain")
SIZES = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "Qwen3MoeForCausalLM": SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


@pytest.fixture(scope="module")
def engines() -> Any:
    """The module that starts engines of several ranks, which a benchmark has too."""
    sys.path.insert(0, str(BENCH))
    try:
        import ranked_engine
    finally:
        sys.path.remove(str(BENCH))
    return ranked_engine


@pytest.mark.parametrize("changes", [{}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("num", RANKS)
def test_ranks_are_one(num: int, architecture: str, changes: dict[str, Any], engines: Any, tmp_path: Path) -> None:
    """In float32 they say the same; in bfloat16 they are as near to that as one is, within half of its error."""
    folder = make_model(tmp_path / "model", architecture, **MODELS[architecture])
    usual: dict[str, Any] = {"max_total_tokens": 8192, "context_length": 512, **changes}

    def said(num: int, dtype: str, **more: Any) -> Any:
        found, restarts = engines.said(folder, num, PROMPTS, dtype=dtype, **usual, **more)
        assert restarts == 0
        return found

    exact = said(1, "float32")
    one = engines.errors(said(1, "bfloat16"), exact)
    for more in [{}, {"expert_parallel": True}] if "Moe" in architecture else [{}]:
        same = engines.errors(said(num, "float32", **more), exact)
        assert len(same) > 0.9 * sum(map(len, exact))
        assert max(same) < 0.01
        several = engines.errors(said(num, "bfloat16", **more), exact)
        assert len(several) > 0.5 * len(one)
        assert statistics.fmean(several) < 1.5 * statistics.fmean(one) + 0.02


@pytest.mark.parametrize("num", RANKS)
def test_streams_go_on_behind_a_rank_that_was_killed(num: int, engines: Any, tmp_path: Path) -> None:
    """The engine is started again with all ranks, and every stream is as long as it was to be."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    found, restarts = engines.said(
        folder, num, PROMPTS, NUM_KILLED, kill=True, max_total_tokens=8192, context_length=512
    )
    assert restarts == 1
    assert [len(one) for one in found] == [NUM_KILLED] * len(PROMPTS)


@pytest.mark.parametrize("num", RANKS)
def test_sums_have_the_reference_bits(num: int, tmp_path: Path) -> None:
    """In memory that all see, one shot and two, in graphs that are replayed in any order: as added in rank order."""
    out, command = tmp_path / "sums.json", [sys.executable, BENCH / "ranks.py", "sums", "--check"]
    subprocess.run([*command, "--ranks", str(num), "--json", out], check=True, timeout=300)
    rows = json.loads(out.read_text())["sums"]
    assert rows
    assert all(row["equal"] for row in rows)


@pytest.mark.parametrize("num", RANKS)
def test_sums_are_bound_as_other_operations_are(num: int, engines: Any, tmp_path: Path) -> None:
    """By the built-in set where few rows are added up, which the table shows; with `--kernels plain` by none."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    usual: dict[str, Any] = {"max_total_tokens": 8192, "context_length": 512}

    async def sums_of(kernels: list[str]) -> dict[str, list[str]]:
        engine = engines.RankedEngine(folder, num, kernels=kernels, **usual)
        await engine.start()
        await engine.close()
        table = {use.operation.split()[0]: [name for *_, name in use.served] for use in engine.info.kernels}
        return {op: names for op, names in table.items() if op.startswith("rank_sum")}

    sums = asyncio.run(sums_of(["auto"]))
    assert sums == {
        "rank_sum": ["triton", "plain"],
        "rank_sum_add": ["triton", "composed"],
        "rank_sum_norm": ["triton", "composed"],
    }
    assert asyncio.run(sums_of(["plain"])) == {op: ["plain"] for op in sums}
    replies = [engines.said(folder, num, PROMPTS, 8, dtype="bfloat16", kernels=[name], **usual)[0] for name in SETS]
    off = engines.errors(*replies)
    assert len(off) >= len(PROMPTS)
    assert statistics.fmean(off) < 0.1
