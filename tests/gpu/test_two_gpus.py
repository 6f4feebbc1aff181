"""Two GPUs of one host: sums, graphs and engines of two ranks against one, and what becomes of a rank that is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.engine.process import ProcessClient, Restarts
from dovetail.messages import SamplingParams, Submit, TokenDelta
from dovetail.plugins import Registry, make_plan
from dovetail.settings import EngineSettings
from dovetail.testing.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
BENCH = Path(__file__).parents[1] / "bench/ranks.py"
PROMPTS = [[(7 * i + j * j) % 190 for j in range(5 + 23 * i)] for i in range(6)]
NUM_KILLED = 380
"""Tokens of the streams that lose a rank: what the longest prompt leaves of the model's 512, nearly."""


def start(folder: Path, architecture: str, num: int, **changes: Any) -> ProcessClient:
    """An engine of so many ranks."""
    settings = EngineSettings(
        model_path=str(folder), device="cuda", tensor_parallel_size=num, max_total_tokens=8192, **changes
    )
    plan = make_plan(Registry.scan(), model=architecture, attention_backend="auto", device="cuda")
    return ProcessClient(settings, plan, log_level="info", restarts=Restarts(hang_s=60))


async def answers(client: ProcessClient, params: SamplingParams, kill: bool = False) -> list[Any]:
    """What all prompts get, log probabilities included; with `kill`, a rank ends when all streams have begun."""
    ranks = subprocess.run(["pgrep", "-P", str(client.pid), "-f", "rank_main"], capture_output=True).stdout.split()
    begun = asyncio.Barrier(len(PROMPTS) + kill)

    async def stream(rid: str, ids: list[int]) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        async for delta in client.submit(Submit(rid=rid, prompt_ids=ids, params=params)):
            if not deltas:
                await begun.wait()
            deltas.append(delta)
        return deltas

    asked = [asyncio.create_task(stream(str(i), ids)) for i, ids in enumerate(PROMPTS)]
    if kill:
        await begun.wait()
        os.kill(int(ranks[0]), signal.SIGKILL)
    return await asyncio.gather(*asked)


def said(folder: Path, architecture: str, num: int, kill: bool = False, **changes: Any) -> tuple[list[Any], int]:
    """Tokens and log probabilities of all prompts, and restarts."""

    async def run() -> tuple[list[Any], int]:
        client = start(folder, architecture, num, **changes)
        await client.start()
        try:
            long = NUM_KILLED if kill else 32
            params = SamplingParams(max_tokens=long, temperature=0.0, ignore_eos=True, logprobs=0)
            deltas = await answers(client, params, kill)
            rows = [[row for delta in one for row in delta.logprobs or ()] for one in deltas]
            return [[(row.token_id, row.logprob) for row in one] for one in rows], client.num_restarts
        finally:
            await client.close()

    return asyncio.run(run())


MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"head_dim": 64, "hidden_size": 256},
    "Qwen3ForCausalLM": {"head_dim": 64, "hidden_size": 256, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "Qwen3MoeForCausalLM": {
        **{"head_dim": 64, "hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    },
}


def errors(found: list[Any], exact: list[Any]) -> list[float]:
    """How far log probabilities are off, up to the first token of each text that is another one."""
    off = []
    for mine, right in zip(found, exact, strict=True):
        for (token, logprob), (other, wanted) in zip(mine, right, strict=True):
            if token != other:
                break
            off.append(abs(logprob - wanted))
    return off


@pytest.mark.parametrize("changes", [{}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("architecture", MODELS)
def test_two_ranks_are_one(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In float32 they say the same; in bfloat16 they are as near to that as one is, within half of its error."""
    folder = make_model(tmp_path / "model", architecture, **MODELS[architecture])
    exact, _ = said(folder, architecture, 1, dtype="float32", **changes)
    one = errors(said(folder, architecture, 1, dtype="bfloat16", **changes)[0], exact)
    total = sum(map(len, exact))
    for more in [{}, {"expert_parallel": True}] if "Moe" in architecture else [{}]:
        found, restarts = said(folder, architecture, 2, dtype="float32", **changes, **more)
        same = errors(found, exact)
        assert restarts == 0
        assert len(same) > 0.9 * total
        assert max(same) < 0.01
        two = errors(said(folder, architecture, 2, dtype="bfloat16", **changes, **more)[0], exact)
        assert len(two) > 0.5 * len(one)
        assert statistics.fmean(two) < 1.5 * statistics.fmean(one) + 0.02


def test_streams_go_on_behind_a_rank_that_was_killed(tmp_path: Path) -> None:
    """The engine is started again with both ranks, and every stream is as long as it was to be."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", **MODELS["LlamaForCausalLM"])
    found, restarts = said(folder, "LlamaForCausalLM", 2, kill=True, dtype="bfloat16")
    assert restarts == 1
    assert [len(one) for one in found] == [NUM_KILLED] * len(PROMPTS)


def test_sums_have_the_reference_bits(tmp_path: Path) -> None:
    """In memory that both see, one shot and two, in graphs that are replayed in any order: as added in rank order."""
    out = tmp_path / "sums.json"
    subprocess.run([sys.executable, BENCH, "sums", "--check", "--json", out], check=True, timeout=300)
    rows = json.loads(out.read_text())["sums"]
    assert rows
    assert all(row["equal"] for row in rows)
