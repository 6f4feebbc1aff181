"""Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi-Linear and Ling with weak decays.

They have transformers' logits, and with `--batch-invariant` the same bits however a reply came.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_models import KINDS, make_delta
from families import config_of, make_seeing
from parity import check_logits, check_pieces, check_schedules
from recurrent_replies import LENGTHS, ON, check_reply, check_retracted, seen
from safetensors.torch import load_file, save_file

from dovetail.contracts.errors import ModelError
from dovetail.messages import SamplerParams, Submit
from dovetail_models.kimi_linear import KimiLinear
from dovetail_models.ling import Ling
from dovetail_models.qwen3_next import Qwen3Next
from dovetail_testing.engine import generate, serve

PERTURBED: list[dict[str, Any]] = [
    {},
    {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 20,
     "linear_conv_kernel_dim": 3},
    {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "head_dim": 24, "tie_word_embeddings": True,
     "num_key_value_heads": 1, "attention_bias": True},
    {"layer_types": ["full_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
     "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("changes", PERTURBED, ids=["plain", "odd widths", "a head each", "attention first"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A prompt whole, in chunks that cut pieces, and decoded tokens."""
    check_pieces(tmp_path, make_delta(tmp_path, kind, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"linear_allow_neg_eigval": False, "num_key_value_heads": 4, "linear_num_value_heads": None},
     {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "linear_value_head_dim": None},
     {"linear_num_key_heads": None, "linear_key_head_dim": None, "rms_norm_eps": 1e-3}],
    ids=["rates below 1", "no rotation", "sizes that are not said"],
)  # fmt: skip
def test_what_only_olmo_hybrid_has_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Largest rate, attention that does not rotate, an epsilon of its own, and sizes that follow from others."""
    check_logits(tmp_path, make_delta(tmp_path, "olmo_hybrid", **changes), chunk=33, num_new=8, model_impl="dovetail")


@pytest.mark.parametrize(
    "changes",
    [{},
     {"linear_num_heads": 3, "linear_head_dim": 20, "linear_conv_kernel_dim": 3, "q_lora_rank": None},
     {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
     {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3,
      "mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2, "rms_norm_eps": 1e-3}],
    ids=["plain", "odd widths", "groups of experts", "attention first"],
)  # fmt: skip
def test_kimi_linear_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Decays of each number of a key, latent attention that rotates nothing, and experts."""
    check_pieces(tmp_path, make_delta(tmp_path, "kimi_linear", **changes))


@pytest.mark.parametrize(
    "changes",
    [{},
     {"head_dim": 20, "short_conv_kernel_size": 3, "kda_safe_gate": False, "num_attention_heads": 3, "v_head_dim": 24,
      "num_key_value_heads": 3},
     {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "kda_lower_bound": -2.5, "rope_theta": 1e3},
     {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3,
      "mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2, "rms_norm_eps": 1e-3}],
    ids=["plain", "odd widths, no bound", "groups of experts", "attention first"],
)  # fmt: skip
def test_ling_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Decays with a bound, made of the stream, and latent attention that rotates and weighs its heads."""
    check_pieces(tmp_path, make_delta(tmp_path, "bailing_hybrid", **changes))


def test_ling_in_the_hub_s_words_is_the_same() -> None:
    """Its `head_dim` is that of the layers with states; what is not said is as transformers has it."""
    made, names = config_of("bailing_hybrid").to_dict(), {"architectures": ["BailingHybridForCausalLM"]}
    own = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    hub = {key: value for key, value in made.items() if key not in own} | names | {"head_dim": 16}
    assert Ling.config_from_hf(hub) == Ling.config_from_hf({**made, **names})
    left_out = ("kda_safe_gate", "kda_lower_bound", "short_conv_kernel_size", "rope_parameters", "rope_theta")
    assert Ling.config_from_hf({key: value for key, value in hub.items() if key not in left_out}) == (
        Ling.config_from_hf(hub)
    )
    with pytest.raises(ModelError, match=r"kda_lower_bound is 0\.0; possible: numbers below 0"):
        Ling.config_from_hf({**hub, "kda_lower_bound": 0})


@pytest.mark.parametrize("every", [2, 4])
def test_qwen3_next_in_the_hub_s_words_is_the_same(every: int) -> None:
    """One layer of so many attends where no types of layers are listed."""
    names = {"architectures": ["Qwen3NextForCausalLM"]}
    made = config_of("qwen3_next", num_hidden_layers=4, full_attention_interval=every).to_dict() | names
    hub = {key: value for key, value in made.items() if key != "layer_types"} | {"full_attention_interval": every}
    config = Qwen3Next.config_from_hf(hub)
    assert config == Qwen3Next.config_from_hf(made)
    assert [not spec.state for spec in config.layers] == [(index + 1) % every == 0 for index in range(4)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_value_heads": 6}, "linear_num_value_heads is 6; possible: multiples of linear_num_key_heads, 4"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types is .* at least one of these"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; possible: silu"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    """The message says what was given, and what is possible."""
    hf = config_of("qwen3_next", num_hidden_layers=4).to_dict() | {"architectures": ["Qwen3NextForCausalLM"], **changes}
    with pytest.raises(ModelError, match=said):
        Qwen3Next.config_from_hf(hf)


def test_kimi_linear_in_the_hub_s_words_is_the_same() -> None:
    """Layers counted from one, and sizes, in a mapping of their own; second names of keys."""
    made = config_of("kimi_linear").to_dict()
    own = {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    left_out = ("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "mlp_layer_types")
    hub = {key: value for key, value in made.items() if key not in left_out} | {"linear_attn_config": own}
    names = {"architectures": ["KimiLinearForCausalLM"]}
    assert "model_max_length" in hub
    want = KimiLinear.config_from_hf({**made, **names})
    assert KimiLinear.config_from_hf({**hub, **names, "first_k_dense_replace": 1, "rope_theta": 1e4}) == want
    with pytest.raises(ModelError, match="mla_use_nope False is not supported; possible: True"):
        KimiLinear.config_from_hf({**hub, **names, "mla_use_nope": False})


@pytest.mark.parametrize(("model", "kind"), [(KimiLinear, "kimi_linear"), (Ling, "bailing_hybrid")])
def test_shares_are_normalised_unless_a_null_says_no(model: type[KimiLinear | Ling], kind: str) -> None:
    """As transformers has it, under the hub's name of the key."""
    made = config_of(kind).to_dict() | {"architectures": list(model.architectures)}
    made = {key: value for key, value in made.items() if key not in ("norm_topk_prob", "moe_renormalize")}
    assert model.config_from_hf(made).extra["routing"].normalise
    assert not model.config_from_hf({**made, "moe_renormalize": None}).extra["routing"].normalise


@pytest.mark.parametrize("given", [[], "dense", ["dense", "sparse"], ["dense"] * 5, ["dense", "moe", "moe", "moe"]])
@pytest.mark.parametrize(("model", "kind"), [(KimiLinear, "kimi_linear"), (Ling, "bailing_hybrid")])
def test_types_of_mlps_are_one_for_each_layer(model: type[KimiLinear | Ling], kind: str, given: Any) -> None:
    """The message says what was given, and what is possible."""
    hf = config_of(kind).to_dict() | {"architectures": list(model.architectures), "mlp_layer_types": given}
    with pytest.raises(ModelError, match=r"mlp_layer_types is .*; possible: 4 of dense and sparse"):
        model.config_from_hf(hf)


@pytest.mark.parametrize("kind", [*KINDS, "kimi_linear", "bailing_hybrid"])
def test_schedules_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """Requests that hit cached states, and that are retracted."""
    outcome = check_schedules(tmp_path, make_delta(tmp_path, kind), model_impl="dovetail")
    assert outcome.cached
    assert outcome.retractions


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_what_the_hub_has_beside_the_text_is_left_out(kind: str, tmp_path: Path) -> None:
    """Its files name `model.language_model.`, `model.visual.` and `mtp.`, which predicts further tokens.

    Requests together, behind cached states and retracted have transformers' tokens, too.
    """
    model, file = make_seeing(tmp_path, kind), tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert {name.split(".")[1] for name in tensors if name.startswith("model.")} == {"language_model", "visual"}
    further = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.input_layernorm.weight": torch.ones(64)}
    save_file({**tensors, **further}, file, {"format": "pt"})
    check_logits(tmp_path, model, chunk=100, num_new=8, model_impl="dovetail")
    check_schedules(tmp_path, model, model_impl="dovetail")


@pytest.fixture(scope="module", params=["qwen3_5_moe_text", "olmo_hybrid"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose context is long enough."""
    made = tmp_path_factory.mktemp("delta")
    make_delta(made, request.param, max_position_embeddings=8192)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_in_fewer_bits_lose_a_little_and_no_hit(dtype: str, folder: Path) -> None:
    """Log probabilities differ from those with float32 by little; behind a cached state, and cut, by nothing."""
    rng = random.Random(9)
    prompt = [rng.randrange(5, 130) for _ in range(300)]
    params = SamplerParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    settings = {**ON, "max_total_tokens": 16384, "state_dtype": dtype}
    [cold] = generate(folder, [prompt], params, **settings)
    first = Submit(rid="a", prompt_ids=[*prompt[:200], 7], params=params)
    again = Submit(rid="b", prompt_ids=prompt, params=params)
    hit = serve(folder, [first, again], max_running_requests=1, **settings)[1]
    assert hit[-1].cached_tokens == 192
    [cut] = generate(folder, [prompt], params, **settings, chunked_prefill_size=128)
    assert seen(hit) == seen(cold) == seen(cut)
    asked = SamplerParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    mine, wide = (
        [
            one.logprob or 0
            for delta in generate(folder, [prompt], asked, **way)[0]
            for one in delta.prompt_logprobs or ()
        ]
        for way in (settings, {**settings, "state_dtype": "float32"})
    )
    assert 0 < sum(abs(a - b) for a, b in zip(mine, wide, strict=True)) / len(mine) < 0.05


@pytest.mark.sampled
@pytest.mark.parametrize("length", LENGTHS)
def test_a_reply_has_the_same_bits_however_it_came(length: int, folder: Path) -> None:
    """Cold, behind a cached state, in other chunks, and beside others."""
    check_reply(folder, length)


@pytest.mark.first(1)
def test_a_retracted_reply_goes_on_with_the_same_bits(folder: Path) -> None:
    """What was decoded is computed again as a prompt, and behind it nothing differs."""
    check_retracted(folder)
