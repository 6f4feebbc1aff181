"""What a model's layers need and what backends provide: compared before a weight is read; capped scores are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.contracts.cache import CacheTensor, Chunk, Full, Recurrent, Window
from dovetail.contracts.config import LayerSpec, ModelConfig
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.needs import AttentionCaps, Needs, needs_of, unmet, unserved
from dovetail.messages import SamplerParams
from dovetail.runtime.attention.hybrid import common_caps
from dovetail.sdk.config import dense_config
from dovetail_backends.fa3 import FlashAttention3Backend
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_backends.triton import TritonBackend
from dovetail_models.llama import Llama
from dovetail_testing.conformance.attention_cases import (
    COMMON,
    COMMON_TOKENS,
    DECODE,
    MIXED,
    PREFILL,
    SEEING,
    SEEN_SPANS,
)
from dovetail_testing.conformance.attention_graph import padded_prefill, rerun
from dovetail_testing.conformance.attention_qkv import verify_qkv
from dovetail_testing.conformance.attention_steps import part_of
from dovetail_testing.conformance.attention_world import Case, make_backend, make_world, verify
from dovetail_testing.engine import generate
from dovetail_testing.models import make_model

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
    spans=True,
    mixers=frozenset({"kv", "latent"}),
    unequal_dims=True,
)


def with_layers(change: Callable[[LayerSpec], LayerSpec]) -> ModelConfig:
    """A model whose second layer differs."""
    config = dense_config(HF)
    layers = list(config.layers)
    layers[1] = change(layers[1])
    return replace(config, layers=tuple(layers))


NEEDS: dict[str, tuple[Callable[[LayerSpec], LayerSpec], AttentionCaps, str]] = {
    "window": (lambda s: replace(s, reach=Window(4)), replace(ALL, sliding_window=False), "needs a sliding window"),
    "cap": (lambda s: replace(s, soft_cap=30.0), replace(ALL, soft_cap=False), "needs a soft cap on attention scores"),
    "sinks": (lambda s: replace(s, sinks=True), replace(ALL, sinks=False), "needs attention sinks"),
    "both ways": (lambda s: replace(s, causal=False), replace(ALL, bidirectional=False), "in both directions"),
    "images": (lambda s: replace(s, spans=True), replace(ALL, spans=False), "in both directions within images"),
    "latent": (
        lambda s: replace(s, mixer="latent", num_kv_heads=1),
        replace(ALL, mixers=frozenset({"kv"})),
        "needs latent rows",
    ),
    "unequal": (
        lambda s: replace(s, v_dim=64),
        replace(ALL, unequal_dims=False),
        "needs keys and values of different widths",
    ),
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
    """Layers without anything special need nothing special, nor do recurrent ones: those serve themselves."""
    recurrent = changed(dense_config(HF), reach=Recurrent(64), state=STATE)
    assert needs_of(recurrent) == Needs(head_dims=frozenset({16}))
    assert needs_of(dense_config(HF)) == Needs(head_dims=frozenset({16}))


def test_several_lacks_are_one_line() -> None:
    """All are named at once."""
    config = with_layers(lambda s: replace(s, sinks=True, soft_cap=1.0))
    reason = unmet(config, replace(FlashAttention3Backend.caps, sinks=False, soft_cap=False))
    assert reason == (
        "LlamaForCausalLM needs a soft cap on attention scores, attention sinks, which it does not provide"
    )


def test_widths_at_equal_distances_are_named_as_a_range() -> None:
    """Triton's, of which there are 64; a width between them is refused, and `auto` takes another backend."""
    for width in (20, 520):
        reason = unmet(with_layers(lambda s, width=width: replace(s, v_dim=width)), TritonBackend.caps)
        assert reason is not None
        assert f"head dim {width} (possible: 8 to 512 in steps of 8)" in reason
    assert unmet(with_layers(lambda s: replace(s, v_dim=512)), TritonBackend.caps) is None


def test_two_halves_provide_what_both_do() -> None:
    """A hybrid lacks what one of its halves lacks."""
    assert common_caps(ALL, ALL) == ALL
    assert common_caps(ALL, replace(ALL, mixers=frozenset({"kv"}))).mixers == {"kv"}
    for name in ("sliding_window", "chunked", "sinks", "soft_cap", "bidirectional", "spans", "unequal_dims"):
        assert not getattr(common_caps(ALL, replace(ALL, **{name: False})), name)  # type: ignore[arg-type]


STATE = (CacheTensor("state", (2, 4, 4), "float32"),)
UNSERVED: dict[str, tuple[Callable[[ModelConfig], ModelConfig], str]] = {
    "another's": (lambda c: changed(c, cache_layer=2), "layer 1 reads the cache of layer 2, which is none before it"),
    "its own": (lambda c: changed(c, cache_layer=1), "layer 1 reads the cache of layer 1, which is none before it"),
    "nobody's": (lambda c: changed(c, cache_layer=9), "layer 1 reads the cache of layer 9, which is none before it"),
    "other heads": (lambda c: changed(c, cache_layer=0, num_kv_heads=1), "layer 0, and has another reach, heads or"),
    "other reach": (lambda c: changed(c, cache_layer=0, reach=Window(4)), "layer 0, and has another reach, heads or"),
    "none": (lambda c: replace(c, layers=()), "its layer specs are for no layer; give one for each of its 3"),
    "twice": (lambda c: changed(c, index=2), r"its layer specs are for layers \[0, 2\]; give one for each"),
    "beyond": (lambda c: changed(c, index=3), r"its layer specs are for layers \[0, 2, 3\]; give one for each"),
}


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The model with another second layer."""
    first, second, third = config.layers
    return replace(config, layers=(first, replace(second, **changes), third))


@pytest.mark.parametrize("what", UNSERVED)
def test_what_no_cache_holds_is_one_line(what: str) -> None:
    """Whatever a backend claims; a plain model, and one of several widths, is served."""
    change, message = UNSERVED[what]
    reason = unserved(change(dense_config(HF)))
    assert reason is not None
    assert "\n" not in reason
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)
    assert unserved(dense_config(HF)) is None
    assert unserved(changed(dense_config(HF), qk_dim=64, v_dim=32)) is None
    assert unserved(changed(dense_config(HF), cache_layer=0)) is None
    assert unserved(changed(dense_config(HF), reach=Recurrent(64), state=STATE)) is None
    assert unserved(changed(dense_config(HF), mixer="latent", num_kv_heads=1)) is None


def test_groups_follow_from_the_layers() -> None:
    """One for each lifetime and shape, full ones first, with the tensors of each layer."""
    plain = dense_config(HF)
    (group,) = plain.cache_groups
    heads = (CacheTensor("k", (2, 16)), CacheTensor("v", (2, 16)))
    assert (group.name, group.reach, group.layers) == ("full", Full(), dict.fromkeys(range(3), heads))
    windowed = replace(plain, layers=tuple(replace(s, reach=Window(8)) if s.index != 1 else s for s in plain.layers))
    assert [(g.name, list(g.layers)) for g in windowed.cache_groups] == [("full", [1]), ("window-8", [0, 2])]
    wide = changed(plain, num_kv_heads=1)
    assert [(g.name, list(g.layers)) for g in wide.cache_groups] == [("full", [0, 2]), ("full-2", [1])]
    recurrent = changed(plain, reach=Recurrent(64), state=STATE)
    assert [(g.name, g.tensors) for g in recurrent.cache_groups] == [("full", heads), ("recurrent", STATE)]
    alone = replace(plain, layers=tuple(LayerSpec(index=i, reach=Recurrent(), state=STATE) for i in range(3)))
    assert unserved(alone) is None
    found = [(g.name, g.tensors, list(g.layers)) for g in alone.cache_groups]
    assert found == [("tokens", (), []), ("recurrent", STATE, [0, 1, 2])]


def test_layers_that_share_are_of_one_group() -> None:
    """They have no tensors and so take no memory; others' latent rows and further tensors are named."""
    (group,) = changed(dense_config(HF), cache_layer=0).cache_groups
    assert (list(group.layers), group.writers, dict(group.sources)) == ([0, 1, 2], [0, 2], {1: 0})
    assert group.layers[1] == ()
    index = CacheTensor("index", (8,), "float8_e4m3fn")
    latent = changed(dense_config(HF), mixer="latent", num_kv_heads=1, qk_dim=20, v_dim=16, extra=(index,))
    assert latent.cache_groups[1].tensors == (CacheTensor("latent", (20,), values=16), index)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"mixer": "latent", "num_kv_heads": 2}, "layer 3: a latent row is one key.* num_kv_heads is 2"),
        ({"mixer": "latent", "num_kv_heads": 1, "qk_dim": 8, "v_dim": 9}, r"v_dim 9 \(at most qk_dim, 8\)"),
        ({"spans": True, "causal": False}, "layer 3: images see both ways in causal layers that keep keys and values"),
        ({"spans": True, "reach": Chunk(4)}, "whose reach is Full or a Window; leave out `spans`"),
        ({"extra": (CacheTensor("v", (2,)),)}, "layer 3: two tensors of its cache have one name: k, v, v"),
        (
            {"extra": (CacheTensor("a", (2,), "float64"),)},
            "layer 3: dtype 'float64': not one of float32, int32",
        ),
        (
            {"state": (CacheTensor("a", (2,), "int8"),), "reach": Recurrent()},
            "layer 3: dtype 'int8': not one of float",
        ),
        ({"extra": (CacheTensor("a", (2,)),) * 2}, "layer 3: two tensors of its cache have one name: k, v, a, a"),
        ({"extra": (CacheTensor("a", (2,)),), "cache_layer": 0}, "reads the cache of layer 0 and has no `extra`"),
        ({"extra": (CacheTensor("a", (2,)),), "state": STATE, "reach": Recurrent()}, "it is recurrent; give its"),
    ],
)
def test_a_cache_that_fits_nothing_is_refused(facts: dict[str, Any], message: str) -> None:
    """Where the spec is made, with the number of the layer."""
    with pytest.raises(ModelError, match=message):
        LayerSpec(index=3, **facts)


def test_a_reach_says_what_a_query_sees() -> None:
    """The first position, by the position of the query; a state is copied where pages and its kernel's chunks end."""
    assert [Full().start(p) for p in (0, 9)] == [0, 0]
    assert [Window(4).start(p) for p in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert [Chunk(4).start(p) for p in (0, 3, 4, 9)] == [0, 0, 4, 8]
    assert (Recurrent().grid(16), Recurrent(64).grid(16), Recurrent(24).grid(16)) == (16, 64, 48)


class Boastful(TorchNativeBackend):
    """Says that it serves everything, with caps that do not."""

    caps = replace(
        TorchNativeBackend.caps,
        chunked=False, soft_cap=False, unequal_dims=False, spans=False, mixers=frozenset({"kv"}),
    )  # fmt: skip

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
        ({"mixer": "latent", "num_kv_heads": 1}, r"torch_native.* LlamaForCausalLM needs latent rows \(MLA\), which"),
        ({"v_dim": 64}, r"torch_native.* LlamaForCausalLM needs keys and values of different widths, which"),
        ({"cache_layer": 0, "v_dim": 8}, "LlamaForCausalLM: layer 1 reads the cache of layer 0, and has another"),
        ({"spans": True}, "torch_native.* LlamaForCausalLM needs attention in both directions within images, which"),
        ({"reach": Chunk(8)}, "torch_native.* LlamaForCausalLM needs attention within chunks, which it does not"),
    ],
)
def test_an_unmet_need_ends_the_start_before_a_weight_is_read(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names model and backend, whatever the backend's own `why_not` says."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    plain = Llama.config_from_hf

    monkeypatch.setattr(Llama, "config_from_hf", lambda hf: changed(plain(hf), **change))
    monkeypatch.setattr(TorchNativeBackend, "caps", Boastful.caps)
    monkeypatch.setattr(TorchNativeBackend, "why_not", Boastful.why_not)
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=message):
        generate(folder, [[1]], SamplerParams(max_tokens=1))


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


SEEN: dict[str, dict[str, Any]] = {
    "all keys": {},
    "a short window": {"window": 5},
    "a window and sinks": {"window": 64, "sinks": True, "soft_cap": 0.7},
    "int8": {"cache_dtype": "int8", "page_size": 3},
}


@pytest.mark.parametrize("name", SEEN)
def test_triton_sees_images_both_ways(name: str) -> None:
    """Its prefill kernel agrees with float64 on images cut by what is cached, and longer than a tile."""
    case = Case(lengths=SEEING[1:], spans=SEEN_SPANS[1:], num_kv_heads=2, **SEEN[name])
    verify(Interpreted, case, DEVICE, name)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_triton_sees_images_in_any_chunk(is_fixed: bool) -> None:
    """Chunks that end between images agree with the whole prompt; batch-invariant ones to the bit on a GPU."""
    whole = make_world(Case(lengths=((0, 90),), spans=(((3, 41), (41, 80)),), window=24), DEVICE)
    found = []
    for first, end in ((0, 90), (0, 3), (3, 41), (41, 90)):
        world = part_of(whole, 0, first, end)
        backend = make_backend(Interpreted, world)
        backend.batch_invariant = is_fixed
        found.append(world.run(backend))
    assert torch.allclose(found[0], torch.cat(found[1:]), atol=1e-5)
    assert not is_fixed or DEVICE.type == "cpu" or torch.equal(found[0], torch.cat(found[1:]))


@pytest.mark.parametrize("lengths", [DECODE[:2], PREFILL[2:4], MIXED[1:]], ids=["decode", "prefill", "mixed"])
def test_triton_reads_another_layers_cache(lengths: Any) -> None:
    """Its kernels take keys and values from the pool, where a layer has none of its own."""
    verify(Interpreted, Case(lengths=lengths, reads_another=True, num_kv_heads=2), DEVICE, "another layer's cache")


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


def test_a_layer_is_recurrent_or_keeps_no_state() -> None:
    """A state that nobody would keep, and a recurrent layer without one, are refused."""
    with pytest.raises(ModelError, match="layer 3: its reach is full, and it keeps a state"):
        LayerSpec(index=3, state=STATE)
    with pytest.raises(ModelError, match="layer 3: its reach is Recurrent and names no tensors"):
        LayerSpec(index=3, reach=Recurrent())
