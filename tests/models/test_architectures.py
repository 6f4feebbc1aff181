"""Every causal architecture of transformers is served and right in every schedule, or refused by name: none is wrong.

Each of 189, tiny and random, in two configurations: four minutes in `make test-all`, a sample otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CHANGES, LEFT_OUT, REFUSED, SECOND, UNBUILT
from families import DECODERS, SIZES, perturb
from parity import check_logits, check_schedules
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.errors import ConfigError

SAMPLE = {"opt", "jamba", "bloom", "lfm3"}
KINDS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in UNBUILT]
LONGEST = 400
"""Characters of a refusal."""


def config_of(kind: str, **changes: Any) -> Any:
    """Make transformers' config of a tiny model."""
    given = {**SIZES, **DECODERS.get(kind, {}), **CHANGES.get(kind, {}), **changes}
    return CONFIG_MAPPING[kind](**{key: value for key, value in given.items() if value is not LEFT_OUT})


def second(kind: str) -> dict[str, Any]:
    """What of `SECOND` the config of a model has, unless its first configuration says it."""
    has = CONFIG_MAPPING[kind]().to_dict().keys() - DECODERS.get(kind, {}).keys() - CHANGES.get(kind, {}).keys()
    return {key: value for key, value in SECOND.items() if key in has}


def make(folder: Path, config: Any, seed: int) -> Any:
    """Write a random checkpoint; returns transformers' model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    perturb(model)
    model.save_pretrained(folder)
    return model.requires_grad_(False)


def check(folder: Path, model: Any) -> None:
    check_logits(folder, model, chunk=7, num_new=8, model_impl="transformers")
    check_schedules(folder, model, model_impl="transformers")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SAMPLE else pytest.mark.full) for k in KINDS])
def test_it_is_served_and_right_or_refused(kind: str, tmp_path: Path) -> None:
    """In chunks, decoding, from the cache and retracted; or in one line that says what is missing."""
    model = make(tmp_path, config_of(kind), seed=0)
    if kind not in REFUSED:
        check(tmp_path, model)
        return
    with pytest.raises(ConfigError, match=REFUSED[kind]) as caught:
        check(tmp_path, model)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < LONGEST
    assert "Error" not in said


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_another_configuration_is_right_too(kind: str, tmp_path: Path) -> None:
    """With other weights, and whatever a config can say otherwise; one that transformers refuses is left out."""
    try:
        model = make(tmp_path, config_of(kind, **second(kind)), seed=1)
    except Exception as error:  # transformers' own check of the config, of several types
        pytest.skip(f"transformers does not build it: {error}")
    try:
        check(tmp_path, model)
    except ConfigError as error:
        pytest.skip(f"refused: {error}")
