"""After start and chores, a CUDA engine compiles nothing more, whatever mixes of prompts and decode rows come."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

pytestmark = pytest.mark.gpu
SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1, "max_position_embeddings": 8192}
"""The widths of a 0.5B model, for which there are kernels of a few rows."""


@triton.jit
def _probe_kernel(out, VALUE: tl.constexpr):
    """Something that nobody else compiles."""
    tl.store(out, VALUE)


def submit(core: EngineCore, rid: str, length: int, num_new: int, temperature: float) -> None:
    """A prompt of its own, which no cache knows."""
    rng = random.Random(rid)
    params = SamplerParams(max_tokens=num_new, temperature=temperature, top_p=0.9, ignore_eos=True)
    core.handle(
        Submit(
            rid=rid,
            handle=zlib.crc32(rid.encode()),
            prompt_ids=[rng.randrange(190) for _ in range(length)],
            params=params,
        )
    )


def serve_mixes(core: EngineCore) -> None:
    """Several prompts at once, of all lengths, with no, one, few and many rows decoding beside them."""
    rng = random.Random(0)
    for num_decode in (0, 1, 2, 5, 7, 16, 20, 33, 50, 63):
        for prompts in ([40] * 6, [1] * 5, [2500], [17, 600, 3], [5000, 16, 16]):
            name = f"{num_decode}/{prompts}"
            for i in range(num_decode):
                submit(core, f"{name}/decode/{i}", rng.choice([3, 16, 50, 130]), 12, i % 2)
            for _ in range(4):
                core.step()
            for i, length in enumerate(prompts):
                submit(core, f"{name}/prompt/{i}", length, 3, i % 2)
            while core.has_work:
                core.step()


@pytest.mark.parametrize("changes", [{}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 700}], ids=str)
@pytest.mark.parametrize("heads", [(14, 2, 64), (8, 8, 128)], ids=str)
def test_served_requests_compile_nothing(
    heads: tuple[int, int, int], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the engine has done its chores, no step of a served mix needs a kernel that Triton has yet to make."""
    num_qo, num_kv, dim = heads
    shape = {"num_attention_heads": num_qo, "num_key_value_heads": num_kv, "head_dim": dim}
    folder = make_model(tmp_path, "Qwen3ForCausalLM", **SMALL, **shape)
    settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "max_running_requests": 64}
    core = make_core(folder, max_total_tokens=65536, **settings, **changes)
    while core.has_idle_tasks:
        core.run_idle_task()
    compiled: list[str] = []

    def note(**facts: Any) -> None:
        compiled.append(facts["fn"].name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    serve_mixes(core)
    assert compiled == []
    core.close()


COLD_START = """
import sys
from pathlib import Path
import triton
from dovetail_testing.engine import make_core

late = []

def note(*, src, cache_hit, **facts):
    if not cache_hit:
        late.append(src.name)

if __name__ == "__main__":
    triton.knobs.compilation.listener = note
    settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "max_running_requests": 32}
    core = make_core(Path(sys.argv[1]), max_total_tokens=65536, disable_compile_ahead=False, **settings)
    while core.has_idle_tasks:
        core.run_idle_task()
    core.close()
    print("late", late)
"""


def test_an_engine_finds_its_kernels_compiled(tmp_path: Path) -> None:
    """With an empty cache, start and chores compile nothing in the engine's own process; a second start finds all."""
    folder = make_model(tmp_path / "model", "Qwen3ForCausalLM", **SMALL, num_attention_heads=14, num_key_value_heads=2)
    script = tmp_path / "start.py"
    script.write_text(COLD_START)
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script), str(folder)], env=env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "late []"
    assert len(list((tmp_path / "cache" / "dovetail").iterdir())) == 1


def test_compilations_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that the other test counts with is called for a variant that is new."""
    compiled: list[str] = []

    def note(**facts: Any) -> None:
        compiled.append(facts["fn"].name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    out = torch.zeros(1, device="cuda")
    for _ in range(2):
        _probe_kernel[(1,)](out, VALUE=3.0)
    assert compiled == ["_probe_kernel"]
    assert out.item() == 3.0


def test_warm_leaves_nothing_to_compile_for_dummies_or_weights(tmp_path: Path) -> None:
    """`dovetail warm` in a new cache, with dummy weights, then as it is served: no kernel is left, no list is made."""
    folder = make_model(tmp_path / "model", "Qwen3ForCausalLM", **SMALL, num_attention_heads=14, num_key_value_heads=2)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    told = []
    for flags in (["--load-format", "dummy"], []):
        command = [sys.executable, "-m", "dovetail_server", "warm", str(folder), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr
        told.append((done.stdout, "Compiled" in done.stderr))
    assert "kernels compiled" in told[0][0]
    assert "nothing was left to compile" in told[1][0]
    assert [compiled for _, compiled in told] == [True, False]
