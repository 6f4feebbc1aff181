"""Prefill of latent layers by keys and values of heads: over prefixes, chunks and page borders, in pieces or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionLayer
from dovetail.messages import SamplerParams, Submit
from dovetail_backends import latent_heads
from dovetail_backends.latent_heads import PrefillChunk, is_less_work
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_backends.triton import TritonBackend
from dovetail_testing.conformance.attention_qkv import verify_latent_heads
from dovetail_testing.conformance.attention_world import Case
from dovetail_testing.engine import make_core

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LATENT: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": 56, "v_dim": 48, "scale": 0.2}
GRID: list[tuple[Any, dict[str, Any]]] = [
    (((0, 33),), {"page_size": 1}),
    (((0, 64), (0, 65), (0, 40)), {"page_size": 64}),
    (((7, 1), (40, 1), (63, 130), (0, 31)), {"page_size": 16, "num_qo_heads": 5}),
    (((64, 100), (65, 100)), {"page_size": 3, "head_dim": 48}),
]
REAL: list[tuple[Any, dict[str, Any]]] = [
    (((0, 700), (2000, 400), (63, 190)), {"num_qo_heads": 16}),
    (((5, 1), (300, 513)), {"num_qo_heads": 128, "page_size": 64}),
]
BOTH = pytest.mark.parametrize("backend", [TorchNativeBackend, TritonBackend])


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("piece", [0, 9000, 64 << 20])
@pytest.mark.parametrize(("lengths", "changes"), GRID, ids=str)
def test_it_equals_float64(
    lengths: Any, changes: dict[str, Any], piece: int, backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of a page, of a few, and in one."""
    if piece == 0 and backend is TritonBackend and DEVICE.type == "cpu" and changes["page_size"] < 16:
        pytest.skip("the interpreter takes half a minute for so many pieces")
    if backend is TorchNativeBackend and DEVICE.type != "cpu":
        pytest.skip("on a GPU it is the reference, in the absorbed form")
    monkeypatch.setattr(latent_heads, "PIECE_BYTES", piece)
    assert verify_latent_heads(backend, Case(lengths=lengths, **{**LATENT, **changes}), DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1 << 20, 64 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "changes"), REAL, ids=str)
def test_real_widths(
    lengths: Any, changes: dict[str, Any], dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of DeepSeek V2 Lite and V3."""
    monkeypatch.setattr(latent_heads, "PIECE_BYTES", piece)
    widths = {**LATENT, "head_dim": 576, "v_dim": 512, "scale": 0.07, "dtype": dtype}
    assert verify_latent_heads(
        TritonBackend, Case(lengths=lengths, **{**widths, **changes}), DEVICE, made=128, value=128
    )


@pytest.mark.parametrize(
    ("chunks", "is_less"),
    [
        ([(0, 32)], True),
        ([(0, 31)], False),  # too few rows for products of its own
        ([(100_000, 170)], False),
        ([(100_000, 172)], True),
        ([(100_000, 64), (0, 6000)], True),  # the step as a whole
        ([(0, 4)] * 500, False),
    ],
)
def test_the_choice(chunks: list[tuple[int, int]], is_less: bool) -> None:
    """At DeepSeek's widths, by the new and the cached tokens of a step."""
    layer = AttentionLayer(index=0, num_qo_heads=16, num_kv_heads=1, qk_dim=576, v_dim=512, scale=1.0, latent=True)
    given = [PrefillChunk(0, 0, new, cached) for cached, new in chunks]
    assert is_less_work(layer, torch.empty(16, 256, 512, device="meta"), given) is is_less


def test_models_are_served_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a latent model goes this way, whole and behind a cached prefix, and its decode rows do not."""
    served: list[bool] = []
    inner = TorchNativeBackend.forward_extend_latent

    def noted(self: Any, *given: Any) -> bool:
        served.append(inner(self, *given))
        return served[-1]

    monkeypatch.setattr(TorchNativeBackend, "forward_extend_latent", noted)
    core = make_core(latent_model(tmp_path), page_size=4, chunked_prefill_size=48)
    served.clear()  # what the start tries is shorter
    params = SamplerParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    core.handle(Submit(rid="", handle=1, prompt_ids=[3 + i % 100 for i in range(96)], params=params))
    while core.has_work:
        core.step()
    assert served == [True] * 6  # two chunks in each of three layers


def latent_model(folder: Path) -> Path:
    """Write a tiny DeepSeek."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=131, hidden_size=64, intermediate_size=96, moe_intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
