"""Packed checkpoints from files to tokens on CUDA: as what was packed stands for, however it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from families import make_checkpoint
from logprobs_of import assert_same
from packers import METHODS
from quantised_models import make_gpt_oss, pack_model

from dovetail.messages import SamplerParams
from dovetail_testing.engine import generate

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
EXPERTS = {**SIZES, "moe_intermediate_size": 128}
WAYS = [way for way in METHODS if way not in ("mxfp4", "int8")]
OF_EXPERTS = ("fp8-blocks-of-128", "ct-int4", "awq", "gptq-8", "ct-mxfp4", "nf4")
LATENT = ("fp8-blocks-of-128", "ct-int4-asymmetric", "gptq")
PAIRS = [("qwen3", way) for way in WAYS]
PAIRS += [("qwen3_moe", way) for way in OF_EXPERTS] + [("deepseek_v3", way) for way in LATENT]
LENGTHS = (1, 3, 15, 70, 130, 240)
"""Prompts alone reach the kernels for one row, some, many; together, a step has more."""
PROMPTS = [[(7 * at + length) % 130 for at in range(length)] for length in LENGTHS]
ENGINE = {"device": "cuda", "disable_cuda_graph": True, "max_total_tokens": 4096, "disable_radix_cache": True}


def logprobs(folder: Path, dtype: str, prompts: Sequence[list[int]]) -> list[float]:
    """Return what each token of some prompts after its first was expected with."""
    params = SamplerParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    deltas = generate(folder, prompts, params, dtype=dtype, **ENGINE)
    entries = [entry for each in deltas for delta in each for entry in delta.prompt_logprobs or ()]
    told = [entry.logprob for entry in entries if entry.logprob is not None]
    assert len(told) == sum(len(prompt) - 1 for prompt in prompts)
    return told


def compare(packed: Path, plain: Path) -> None:
    """Greedy tokens in float32 are the same; in bfloat16, tokens are as likely as without packing."""
    greedy = SamplerParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    mine, right = (generate(folder, PROMPTS, greedy, dtype="float32", **ENGINE) for folder in (packed, plain))
    assert_same(mine, right, atol=1e-3)
    for prompts in (PROMPTS, PROMPTS[2:3]):
        exact, rounded, found = (logprobs(*which, prompts) for which in
                                 ((plain, "float32"), (plain, "bfloat16"), (packed, "bfloat16")))  # fmt: skip
        usual, error = (
            sum(abs(one - want) for one, want in zip(told, exact, strict=True)) / len(exact)
            for told in (rounded, found)
        )
        assert error < 2 * usual + 0.01  # experts that are nearly as good change places


@pytest.mark.parametrize(("family", "way"), PAIRS)
def test_a_packed_checkpoint(family: str, way: str, tmp_path: Path) -> None:
    """Dense layers, experts, latent attention."""
    make_checkpoint(tmp_path / "plain", family, **(SIZES if family == "qwen3" else EXPERTS))
    assert pack_model(tmp_path / "plain", tmp_path / "packed", METHODS[way]) > 3
    compare(tmp_path / "packed", tmp_path / "plain")


def test_gpt_oss(tmp_path: Path) -> None:
    """Experts in mxfp4, in one tensor each."""
    make_gpt_oss(tmp_path, hidden_size=256, intermediate_size=384)
    compare(tmp_path / "packed", tmp_path / "plain")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    """Against the same file written out by its library."""
    gguf_files = pytest.importorskip("gguf_files", reason="gguf writes the files")
    make_checkpoint(tmp_path / "plain", "qwen3", **gguf_files.WIDE, num_key_value_heads=2)
    gguf_files.write_gguf(tmp_path / "plain", tmp_path / "packed.gguf", lambda name: kind)
    gguf_files.write_out(tmp_path / "plain", tmp_path / "packed.gguf", tmp_path / "plain.gguf")
    compare(tmp_path / "packed.gguf", tmp_path / "plain.gguf")
