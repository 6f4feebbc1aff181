"""Configurations that nobody wrote down: random sizes of each family give transformers' logits.

A few families with one seed each; `make test-all` takes all of them with four.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from families import DECODERS, OWN, config_of, make_checkpoint
from parity import check_logits

from dovetail.contracts.config import ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError
from dovetail.runtime.checkpoint.config_keys import translate

KINDS = ["llama", "qwen2", "qwen3", *OWN]
SAMPLE = ["qwen3_moe", "gemma3_text", "gemma4_text", "olmo3", "deepseek_v3"]
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TURNS = ("sliding_attention", "full_attention")


def random_changes(kind: str, rng: random.Random) -> dict[str, Any]:
    """Draw sizes that are no powers of two, numbers of heads and experts that are odd, types of layers in any order."""
    known, own = config_of(kind).to_dict(), DECODERS.get(kind, {})
    changes: dict[str, Any] = {
        "vocab_size": rng.choice([131, 197, 251]),
        "intermediate_size": 4 * rng.randrange(9, 30),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if "kv_lora_rank" not in own:
        kv = rng.choice([1, 2, 3])  # heads are multiples of 8: a quarter of one may be rotated, in pairs
        heads = kv * rng.choice([1, 2, 3])
        changes |= {"num_key_value_heads": kv, "num_attention_heads": heads, "head_dim": 8 * rng.randrange(2, 8)}
        changes["hidden_size"] = heads * changes["head_dim"]  # some families derive one from the other
        changes |= dict.fromkeys((name for name in EXPERTS if name in own), rng.choice([3, 5, 6, 9]))
        changes |= {"num_heads": 2 * heads} if kind == "mamba2" else {}
        changes |= {"mamba_d_head": "auto"} if known.get("mamba_d_head") else {}  # its heads' widths add up to others
    else:
        heads, groups = rng.choice([1, 3, 5]), rng.choice([1, 2, 3])
        changes |= {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "hidden_size": heads * 4 * rng.randrange(5, 12),
        }
        changes |= {"qk_nope_head_dim": 4 * rng.randrange(2, 8), "v_head_dim": 4 * rng.randrange(2, 12)}
        changes |= {
            "kv_lora_rank": 4 * rng.randrange(3, 10),
            "q_lora_rank": rng.choice([None, 20, 36] if kind != "deepseek_v32" else [20, 36]),
        }
        experts = "num_local_experts" if kind in ("kimi_linear", "bailing_hybrid") else "n_routed_experts"
        if kind == "bailing_hybrid":
            changes["q_lora_rank"] = None
        changes |= {experts: groups * rng.choice([3, 4, 5]), "n_group": groups, "topk_group": groups}
    types = known.get("layer_types") or ()
    if types and set(types) <= set(TURNS) and known.get("sliding_window"):
        changes["layer_types"] = [rng.choice(TURNS) for _ in types[:-1]] + ["full_attention"]
        changes["sliding_window"] = rng.randrange(5, 40)
    return changes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SAMPLE else pytest.mark.full) for k in KINDS])
def test_random_sizes(kind: str, seed: int, tmp_path: Path) -> None:
    """A prompt in chunks and some decoded tokens."""
    changes = random_changes(kind, random.Random(f"{kind} {seed}"))
    model = make_checkpoint(tmp_path, kind, seed=seed, **changes)
    check_logits(tmp_path, model, chunk=13, num_new=4, model_impl="dovetail")


def read(config: dict[str, Any]) -> ModelConfig:
    """What the plugin of a config's architecture makes of it."""
    [entry] = entry_points(group="dovetail.models.v1", name=config["architectures"][0])
    found: ModelConfig = translate(entry.load().config_from_hf, config)
    return replace(found, rope=RopeConfig()) if found.layer_ropes else found  # it is no layer's then


def as_file(config: Any) -> dict[str, Any]:
    """Return what `config.json` says of transformers' configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return {
        **json.loads(config.to_json_string(use_diff=False)),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__],
    }


def in_older_words(config: dict[str, Any]) -> dict[str, Any]:
    """The rope and the dtype under the keys of transformers 4."""
    older = dict(config)
    if "dtype" in older:
        older["torch_dtype"] = older.pop("dtype")
    rope: dict[str, Any] = older.pop("rope_parameters", None) or {}
    if "sliding_attention" in rope:
        local, rope = rope["sliding_attention"], rope["full_attention"]
        if local["rope_theta"] != rope["rope_theta"] or local["rope_type"] != rope["rope_type"]:
            older["rope_local_base_freq"] = local["rope_theta"]
    if not rope:  # nothing is rotated
        return older
    older["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    older["rope_scaling"] = None if rest.get("rope_type") == "default" else rest
    return older


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_of_every_renamed_key(kind: str, seed: int) -> None:
    """Transformers' own second names, and the words of transformers 4, mean the same in every random configuration."""
    from transformers import AutoConfig

    config = config_of(kind, **random_changes(kind, random.Random(f"{kind} {seed}")))
    newer = as_file(config)
    want = read(newer)
    for second, first in config.attribute_map.items():
        if first in newer and second not in newer:
            assert read({second if key == first else key: value for key, value in newer.items()}) == want, second
    if kind == "gemma4_text":  # it came with transformers 5
        return
    older = in_older_words(newer)
    known = {key: value for key, value in older.items() if key not in ("architectures", "time_step_limit")}
    told = AutoConfig.for_model(**known)  # without infinity, which only a file's reader understands
    assert getattr(told, "rope_parameters", None) == getattr(
        config, "rope_parameters", None
    )  # transformers itself reads it so
    assert read(older) == want


@pytest.mark.parametrize(
    ("groups", "chosen", "said"),
    [
        (0, 0, "8 experts in 0 groups .n_group., of which 0 "),
        (-1, -1, "8 experts in -1 groups"),
        (1, 0, "8 experts in 1 groups .n_group., of which 0 are chosen .topk_group.*; possible: "),
        (4, 0, "of which 0 "),
        (4, -1, "of which -1 "),
        (4, None, "of which 0 "),
        (3, 1, "8 experts in 3 groups"),
        (2, 3, "of which 3 "),
        (1, 2, "of which 2 "),
        (4, 1, "for 3 experts of a token .num_experts_per_tok."),
        (8, 4, "possible: .* of 2 experts or more"),
    ],
)
@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear", "bailing_hybrid", "nemotron_h"]
)
def test_groups_of_experts_that_cannot_be_are_one_line(kind: str, groups: int, chosen: int | None, said: str) -> None:
    """Before a weight is read: 0 was taken for 1, and others ended in the first request."""
    config = as_file(config_of(kind)) | {"num_experts_per_tok": 3, "topk_group": chosen}
    config |= {"num_expert_group" if "num_expert_group" in config else "n_group": groups}
    config |= {"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else {}
    config |= dict.fromkeys((name for name in EXPERTS if name in config), 8)
    if kind == "deepseek_v2" and groups == 8:  # its groups are chosen by their best expert
        assert read(config).extra["routing"].groups == 8
        return
    with pytest.raises(ModelError, match=said) as error:
        read(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "nemotron_h"])
def test_no_groups_of_experts_are_none(kind: str) -> None:
    """Null, and one group of all, choose among all experts."""
    for groups in (None, 1):
        config = as_file(config_of(kind)) | {"n_group": groups, "topk_group": groups}
        config |= {"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else {}
        routing = read(config).extra["routing"]
        assert (routing.groups, routing.top_groups) == (1, 1)
