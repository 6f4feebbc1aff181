"""What a model's layers need and what backends provide: compared before a weight is read; capped scores are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.contracts.attention import AttentionCaps
from dovetail.contracts.model import LayerSpec, ModelConfig
from dovetail.contracts.needs import Needs, needs_of, one_shape, unmet
from dovetail.engine.messages import SamplingParams
from dovetail.errors import ConfigError
from dovetail.runtime.hf_config import dense_config
from dovetail.runtime.hybrid import common_caps
from dovetail.testing.conformance.attention import COMMON, COMMON_TOKENS, DECODE, MIXED, PREFILL
from dovetail.testing.conformance.attention_graph import padded_prefill, rerun
from dovetail.testing.conformance.attention_qkv import verify_qkv
from dovetail.testing.conformance.attention_world import Case, verify
from dovetail.testing.engine import generate
from dovetail.testing.models import make_model
from dovetail_backends.fa3 import FlashAttention3Backend
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_backends.triton import TritonBackend
from dovetail_models.llama import Llama

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
ALL = AttentionCaps(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32"}),
    head_dims=frozenset({16, 64}),
    sliding_window=True,
    sinks=True,
    soft_cap=True,
    bidirectional=True,
)


def with_layers(change: Callable[[LayerSpec], LayerSpec]) -> ModelConfig:
    """A model whose second layer differs."""
    config = dense_config(HF)
    layers = list(config.layer_specs)
    layers[1] = change(layers[1])
    return replace(config, layers=tuple(layers))


NEEDS: dict[str, tuple[Callable[[LayerSpec], LayerSpec], AttentionCaps, str]] = {
    "window": (lambda s: replace(s, sliding_window=4), replace(ALL, sliding_window=False), "needs a sliding window"),
    "cap": (lambda s: replace(s, soft_cap=30.0), replace(ALL, soft_cap=False), "needs a soft cap on attention scores"),
    "sinks": (lambda s: replace(s, sinks=True), replace(ALL, sinks=False), "needs attention sinks"),
    "both ways": (lambda s: replace(s, causal=False), replace(ALL, bidirectional=False), "in both directions"),
    "width": (lambda s: replace(s, v_dim=24), ALL, r"needs head dim 24 \(possible: 16, 64\)"),
}


@pytest.mark.parametrize("need", NEEDS)
def test_needs_follow_from_the_layers(need: str) -> None:
    """One layer is enough; the message names the model and what is lacking; a backend that has it is silent."""
    change, lacking, message = NEEDS[need]
    config = with_layers(change)
    reason = unmet(config, lacking)
    assert reason is not None
    assert reason.startswith("LlamaForCausalLM needs")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)
    assert unmet(dense_config(HF), lacking) is None
    assert need == "width" or unmet(config, ALL) is None


def test_a_plain_model_needs_its_head_dim_only() -> None:
    """Layers that the config does not write out are plain."""
    config = replace(dense_config(HF), layers=())
    assert needs_of(config) == Needs(head_dims=frozenset({16}))


def test_several_lacks_are_one_line() -> None:
    """All are named at once."""
    config = with_layers(lambda s: replace(s, sinks=True, soft_cap=1.0))
    reason = unmet(config, FlashAttention3Backend.caps)
    assert reason == (
        "LlamaForCausalLM needs a soft cap on attention scores, attention sinks, which it does not provide"
    )


def test_two_halves_provide_what_both_do() -> None:
    """A hybrid lacks what one of its halves lacks."""
    assert common_caps(ALL, ALL) == ALL
    for name in ("sliding_window", "sinks", "soft_cap", "bidirectional"):
        assert not getattr(common_caps(ALL, replace(ALL, **{name: False})), name)  # type: ignore[arg-type]


def test_a_cache_of_one_shape_serves_layers_of_one_shape() -> None:
    """Two widths, another number of KV heads, and another number of layers are told apart."""
    assert one_shape(dense_config(HF)) is None
    wide = one_shape(with_layers(lambda s: replace(s, qk_dim=64, v_dim=64)))
    assert wide is not None
    assert "2 KV heads, keys 16, values 16 wide; 2 KV heads, keys 64, values 64 wide" in wide
    assert one_shape(with_layers(lambda s: replace(s, num_kv_heads=1))) is not None
    config = dense_config(HF)
    assert one_shape(replace(config, layers=config.layer_specs[:2])) is not None


class Boastful(TorchNativeBackend):
    """Says that it serves everything, with caps that do not."""

    caps = replace(TorchNativeBackend.caps, soft_cap=False)

    @classmethod
    def why_not(cls, *args: Any) -> str | None:
        return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"soft_cap": 20.0},
            r"torch_native.* LlamaForCausalLM needs a soft cap on attention scores, which",
        ),
        ({"qk_dim": 64, "v_dim": 64}, r"LlamaForCausalLM has 3 attention layers of these shapes"),
    ],
)
def test_an_unmet_need_ends_the_start_before_a_weight_is_read(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names model and backend, whatever the backend's own `why_not` says."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    plain = Llama.config_from_hf

    def changed(hf: Mapping[str, Any]) -> ModelConfig:
        config = plain(hf)
        first, second, third = config.layer_specs
        return replace(config, layers=(first, replace(second, **change), third))

    monkeypatch.setattr(Llama, "config_from_hf", changed)
    monkeypatch.setattr(TorchNativeBackend, "caps", Boastful.caps)
    monkeypatch.setattr(TorchNativeBackend, "why_not", Boastful.why_not)
    monkeypatch.setattr("dovetail.runtime.runner.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=message):
        generate(folder, [[1]], SamplingParams(max_tokens=1))


class Interpreted(TritonBackend):
    """Triton in its interpreter where there is no GPU."""

    caps = replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"}))


CAPPED: dict[str, dict[str, Any]] = {
    "decode": {"lengths": DECODE[:3], "soft_cap": 0.7},
    "decode, grouped": {"lengths": DECODE[:2], "soft_cap": 1.5, "num_qo_heads": 6, "num_kv_heads": 2, "window": 9},
    "prefill": {"lengths": PREFILL[2:5], "soft_cap": 0.7},
    "prefill, window and sinks": {"lengths": PREFILL[2:4], "soft_cap": 1.5, "window": 5, "sinks": True},
    "mixed": {"lengths": MIXED[1:], "soft_cap": 0.7, "num_kv_heads": 2, "scale": 0.9},
    "shared prefix": {"lengths": COMMON[:4], "soft_cap": 0.7, "common": COMMON_TOKENS[0][:4], "num_kv_heads": 1},
}


@pytest.mark.parametrize("name", CAPPED)
def test_triton_caps_scores(name: str) -> None:
    """Every kernel of it agrees with float64 on capped scores."""
    verify(Interpreted, Case(**CAPPED[name]), DEVICE, name)


def test_triton_caps_scores_from_the_projection() -> None:
    """So does the kernel that normalises, rotates and writes as well, over shared prefixes too."""
    for changes in ({}, {"lengths": COMMON[:4], "common": COMMON_TOKENS[0][:4]}):
        case = Case(**{"lengths": DECODE[:2], "soft_cap": 0.7, "num_qo_heads": 4, "num_kv_heads": 2, **changes})
        assert verify_qkv(Interpreted, case, DEVICE, normed=True)


def test_a_very_large_score_is_capped() -> None:
    """Scores of which the exponential overflows are the cap, not NaN."""
    for lengths in (DECODE[:2], PREFILL[2:4]):
        verify(Interpreted, Case(lengths=lengths, soft_cap=0.5, scale=400.0), DEVICE, "large scores")


def test_triton_is_planned_once_for_a_graph() -> None:
    """What it records serves other lengths, and other divisions of a prefill's tokens, without another plan."""
    rerun(Interpreted, Case(lengths=DECODE[:2]), DEVICE)
    padded_prefill(Interpreted, Case(lengths=PREFILL, num_kv_heads=1, num_qo_heads=2), DEVICE)
