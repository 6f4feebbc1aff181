"""LFM2 and LFM2-MoE: transformers' logits, and with `--batch-invariant` the same bits anyhow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import config_of, make_checkpoint, make_seeing
from parity import check_logits, check_pieces, check_schedules
from recurrent_replies import LENGTHS, check_reply, check_retracted
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from dovetail.contracts.errors import ModelError
from dovetail_models.lfm2 import Lfm2, adjusted_inner

TURNS = ["full_attention", "conv", "conv"]
PERTURBED: dict[str, list[dict[str, Any]]] = {
    "lfm2": [
        {"hidden_size": 60, "head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "conv_L_cache": 4},
        {"conv_bias": True, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
        {"layer_types": TURNS, "num_hidden_layers": 3, "conv_L_cache": 2, "block_multiple_of": 7,
         "block_ffn_dim_multiplier": 1.3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
    "lfm2_moe": [
        {"hidden_size": 60, "head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "conv_L_cache": 4,
         "use_expert_bias": False},
        {"conv_bias": True, "tie_word_embeddings": False, "routed_scaling_factor": 2.5, "num_dense_layers": 0},
        {"layer_types": TURNS, "num_hidden_layers": 3, "num_dense_layers": 2, "norm_topk_prob": False,
         "num_experts": 6, "num_experts_per_tok": 3},
    ],
}  # fmt: skip
"""Three changes of each."""
CASES = [pytest.param(kind, {}, marks=pytest.mark.full) for kind in PERTURBED]  # as schedules give tokens below
CASES += [(kind, one) for kind, changes in PERTURBED.items() for one in changes]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_logits_and_tokens_are_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A prompt whole, in chunks that cut pieces, and decoded tokens."""
    check_pieces(tmp_path, make_checkpoint(tmp_path, kind, **changes))


@pytest.mark.parametrize("kind", PERTURBED)
def test_schedules_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """Requests that hit cached states, and that are retracted."""
    outcome = check_schedules(tmp_path, make_checkpoint(tmp_path, kind), model_impl="dovetail")
    assert outcome.cached
    assert outcome.retractions


def test_the_text_part_of_a_model_that_sees_is_served(tmp_path: Path) -> None:
    """Its files name `model.language_model.` and the rest, which is left out."""
    check_logits(tmp_path, make_seeing(tmp_path, "lfm2_vl"), chunk=100, num_new=8, model_impl="dovetail")


@pytest.fixture(scope="module", params=PERTURBED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose context is long enough."""
    made = tmp_path_factory.mktemp("lfm2")
    make_checkpoint(made, request.param, max_position_embeddings=8192)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("length", LENGTHS[1:4])
def test_a_reply_has_the_same_bits_however_it_came(length: int, folder: Path) -> None:
    """Cold, behind a cached state, in other chunks, and beside others."""
    check_reply(folder, length)


@pytest.mark.first(1)
def test_a_retracted_reply_goes_on_with_the_same_bits(folder: Path) -> None:
    """What was decoded is computed again as a prompt, and behind it nothing differs."""
    check_retracted(folder)


@pytest.mark.parametrize(
    ("changes", "inner"),
    [({}, 64 * 4), ({"block_ff_dim": 300}, 256), ({"block_ff_dim": 96, "block_multiple_of": 10}, 70),
     ({"block_ffn_dim_multiplier": 4.5}, 512), ({"block_auto_adjust_ff_dim": False}, 96)],
)  # fmt: skip
def test_the_width_of_mlps_is_what_transformers_makes_of_it(changes: dict[str, Any], inner: int) -> None:
    """Two thirds, times a factor, up to a multiple; an older name of it holds first."""
    given = {"intermediate_size": 96, **changes}
    assert adjusted_inner(given) == inner
    assert Lfm2MLP(config_of("lfm2", **changes)).w1.out_features == inner


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["conv", "moe"]}, "layer_types is .*; possible: 4 of conv and full_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; possible: silu"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    """The message says what was given, and what is possible."""
    hf = {**config_of("lfm2").to_dict(), "architectures": ["Lfm2ForCausalLM"], **changes}
    with pytest.raises(ModelError, match=said):
        Lfm2.config_from_hf(hf)
