"""Configurations that nobody wrote down: random sizes of each family give transformers' logits.

In CI a few families with one seed each; `DOVETAIL_FULL=1` takes all of them with four.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from families import DECODERS, OWN, config_of, make_checkpoint
from parity import check_logits

FULL = bool(os.environ.get("DOVETAIL_FULL"))
KINDS = ["llama", "qwen2", "qwen3", *OWN]
SAMPLE = ["qwen3_moe", "gemma3_text", "gemma4_text", "olmo3"]
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
    types = known.get("layer_types") or ()
    if types and set(types) <= set(TURNS) and known.get("sliding_window"):
        changes["layer_types"] = [rng.choice(TURNS) for _ in types[:-1]] + ["full_attention"]
        changes["sliding_window"] = rng.randrange(5, 40)
    return changes


@pytest.mark.parametrize("seed", range(4 if FULL else 1))
@pytest.mark.parametrize("kind", KINDS if FULL else SAMPLE)
def test_random_sizes(kind: str, seed: int, tmp_path: Path) -> None:
    """A prompt in chunks and some decoded tokens."""
    changes = random_changes(kind, random.Random(f"{kind} {seed}"))
    model = make_checkpoint(tmp_path, kind, seed=seed, **changes)
    check_logits(tmp_path, model, chunk=7, num_new=8, model_impl="dovetail")
