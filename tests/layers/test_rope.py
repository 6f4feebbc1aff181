"""Rotary embeddings of every kind equal transformers' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4 import modeling_glm4
from transformers.models.phi3 import modeling_phi3

from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec, RopeConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.rope import frequencies, head_order
from dovetail.sdk.layers.rotary import Rotaries, Rotary
from dovetail_models.llama import Llama
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.models import make_model

CTX = BuildContext(device=torch.device("cpu"), dtype=torch.float32, factory=PLAIN)
DIM, POSITIONS = 32, 256
FACTORS = {"short_factor": [1.0 + i / 10 for i in range(16)], "long_factor": [2.0 + i / 3 for i in range(16)]}
ORIGINAL = {"original_max_position_embeddings": 64}
BOUNDS = ("low_freq_factor", "high_freq_factor")
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "llama3, one bound": {"rope_type": "llama3", "factor": 16.0, **dict.fromkeys(BOUNDS, 1.0), **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn, every number": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        **ORIGINAL,
    },
    "yarn, mscale alone": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, **ORIGINAL},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 32.0, "truncate": False, **ORIGINAL},
    "yarn, factor from lengths": {"rope_type": "yarn", "factor": None, "attention_factor": 1.3, **ORIGINAL},
    "longrope": {"rope_type": "longrope", **FACTORS, **ORIGINAL},
    "longrope, own temperature": {"rope_type": "longrope", "attention_factor": 1.7, **FACTORS, **ORIGINAL},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}


def theirs(rope: dict[str, Any], length: int | None, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Transformers' frequencies and factor."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=DIM, max_position_embeddings=POSITIONS
    )
    config.rope_parameters = {"rope_theta": 5e3, **rope}
    if rope["rope_type"] == "default":
        dim = int(DIM * rope.get("partial_rotary_factor", 1.0))
        return 1 / 5e3 ** (torch.arange(0, dim, 2).float() / dim), 1.0
    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
    return found


def ours(rope: dict[str, Any]) -> RopeConfig:
    """Read from `config.json` as a plugin does."""
    return dense_config(config(rope_parameters={"rope_theta": 5e3, **rope}), rotates_parts=True).rope


def config(**changes: Any) -> dict[str, Any]:
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8}
    base |= {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": POSITIONS}
    return {**base, **changes}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("length", [None, 40, POSITIONS, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers(kind: str, length: int | None, partial: float) -> None:
    """Of every kind, for contexts that are short, long and beyond the training, whole heads and halves."""
    rope = dict(KINDS[kind])
    if partial != 1.0 and kind != "proportional":
        rope["partial_rotary_factor"] = partial
        rope |= {key: value[:8] for key, value in FACTORS.items() if key in rope}
    want, want_factor = theirs(rope, length if length is not None else POSITIONS)
    got, got_factor = frequencies(ours(rope), DIM, POSITIONS, length)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert got_factor == pytest.approx(want_factor, rel=1e-6)


def rotate(rope: RopeConfig, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate `[T, N, D]` as a layer does whose rows were reordered when they were loaded."""
    order = head_order(rope, DIM)
    cos, sin = Rotary(rope, DIM, POSITIONS, CTX)(positions)
    return reference.norm_rotate(x if order is None else x[..., order], None, 0.0, cos, sin)


LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "part of the head": ({"rope_type": "default", "partial_rotary_factor": 0.75}, modeling_phi3),
    "part, with a temperature": (
        {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5, **ORIGINAL},
        modeling_phi3,
    ),
    "neighbours": ({"rope_type": "default"}, modeling_glm4),
    "neighbours, part of the head": (
        {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
        modeling_glm4,
    ),
    "neighbours, part, temperature": (
        {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5, **ORIGINAL},
        modeling_glm4,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_other_layouts_equal_transformers(layout: str) -> None:
    """Reordered heads have the scores that transformers gets with neighbours as pairs, or with a part rotated."""
    rope, module = LAYOUTS[layout]
    torch.manual_seed(0)
    q, k, positions = torch.randn(6, 2, DIM), torch.randn(6, 2, DIM), torch.tensor([0, 1, 2, 17, 100, 255])
    freqs, factor = theirs(rope, POSITIONS)
    angles = positions[:, None].float() * freqs
    cos, sin = (torch.cat((x, x), -1)[None] * factor for x in (angles.cos(), angles.sin()))
    theirs_q, theirs_k = module.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    want = theirs_q[0] @ theirs_k[0].transpose(-1, -2)
    mine = replace(ours(rope), interleaved=module is modeling_glm4)
    got = rotate(mine, q, positions).transpose(0, 1) @ rotate(mine, k, positions).transpose(0, 1).transpose(-1, -2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_proportional_leaves_the_last_frequencies_alone() -> None:
    """Gemma 4's layout needs no reordering: unrotated dimensions have frequency zero."""
    rope = ours(KINDS["proportional"])
    assert head_order(rope, DIM) is None
    x = torch.randn(3, 1, DIM)
    rotated = rotate(rope, x, torch.tensor([3, 9, 27]))
    still = [*range(4, 16), *range(20, 32)]
    assert torch.equal(rotated[..., still], x[..., still])
    assert not torch.equal(rotated[..., :4], x[..., :4])


def test_layers_have_the_embedding_of_their_type() -> None:
    """Each type of layer has its own; those of one type share one computation."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    made = dense_config(config(rope_parameters=ropes, layer_types=types, sliding_window=8), rotates_parts=True)
    rotaries = Rotaries(made, CTX)
    assert len(rotaries.kinds) == 2
    found, positions = rotaries(torch.tensor([5, 250])), torch.tensor([5, 250])
    assert found[0] is found[2]
    for index, kind in enumerate(types):
        flat = dense_config(config(rope_parameters=ropes[kind]), rotates_parts=True).rope
        want = Rotary(flat, DIM, POSITIONS, CTX)(positions)
        assert all(torch.equal(mine, right) for mine, right in zip(found[index], want, strict=True))


@pytest.mark.parametrize("partial", [0.0, 0.1, 1.5])
def test_a_part_that_is_no_pairs_is_refused(partial: float) -> None:
    """A share of the head that gives no dimensions, an odd number or too many."""
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        frequencies(RopeConfig(partial=partial), DIM, POSITIONS)


@pytest.mark.parametrize("kind", ["none", "default"])
def test_an_odd_head_is_refused(kind: Any) -> None:
    """Kernels pair dimensions, also where nothing turns."""
    with pytest.raises(ModelError, match="a head dim of 3 is odd; possible: even ones"):
        frequencies(RopeConfig(kind=kind), 3, POSITIONS)


def test_factors_of_another_number_than_frequencies_are_refused() -> None:
    """LongRoPE has one factor for each frequency."""
    rope = ours({"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 3, **ORIGINAL})
    with pytest.raises(ModelError, match="long_factor has 3 numbers for 16 frequencies"):
        frequencies(rope, DIM, POSITIONS)


@pytest.mark.parametrize("context", [64, 96])
def test_a_whole_model_with_longrope_over_part_of_its_heads(context: int, tmp_path: Path) -> None:
    """Phi-3: fused matrices, part of each head rotated, factors by the context's length: logits as transformers'."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.5, 1.7], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}
    folder = make_model(
        tmp_path,
        "Phi3ForCausalLM",
        num_attention_heads=4,
        max_position_embeddings=context,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 5e3, "partial_rotary_factor": 0.75, **factors},
    )
    prompt = [(7 * i + 3) % 190 for i in range(80 if context > 64 else 40)]
    engine = TinyEngine(Phi3, folder)
    [got] = engine.prefill_logits([prompt])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


class Phi3(Llama):
    """Llama with fused matrices in the checkpoint."""

    rotates_parts = True

    architectures = ("Phi3ForCausalLM",)


def test_layers_with_states_have_no_rope() -> None:
    """A hybrid made of the scaffold's parts: its layers without heads need no width that can be rotated."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = dense_config({"architectures": ["X"], "num_hidden_layers": 2, "num_attention_heads": 4, **sizes})
    state = LayerSpec(index=0, reach=Recurrent(4), state=(CacheTensor("s", (4, 4)),))
    ropes = Rotaries(replace(config, layers=(state, config.layers[1])), CTX)(torch.arange(5))
    plain = Rotaries(config, CTX)(torch.arange(5))
    assert len(ropes) == 2
    assert all(torch.equal(mine, own) for mine, own in zip(ropes[1], plain[1], strict=True))
