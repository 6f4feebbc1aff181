"""Whether a model that sees ties its output head, where its configuration is shortened: as transformers does."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
from families import DECODERS, SIZES
from seeing import Prompts, picture, reference

from dovetail.plugins import Registry, load, make_plan
from dovetail_testing.engine import serve, tokens

KEY = "tie_word_embeddings"
LFM2 = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
SAID = list(itertools.product((None, True, False), repeat=2))


def configuration(kind: str) -> Any:
    """A tiny one with transformers' own values."""
    from transformers import CONFIG_MAPPING

    if kind == "lfm2_vl":
        return CONFIG_MAPPING[kind](text_config={**SIZES, **DECODERS["lfm2"], **LFM2})
    return seeing.config_of(kind, {})


@pytest.mark.parametrize("kind", [*seeing.VISION, "lfm2_vl"])
def test_a_head_is_tied_as_transformers_ties_it(kind: str) -> None:
    """Whatever outer and inner configuration say, or leave out."""
    from transformers import AutoModelForImageTextToText

    config = configuration(kind)
    name = AutoModelForImageTextToText._model_mapping[type(config)].__name__
    given = {**config.to_dict(), "architectures": [name]}
    vision = given["vision_config"].get("model_type")
    plan = make_plan(Registry.scan(), model=name, attention_backend="torch_native", processor="auto", vision=vision)
    plugin = load(plan, "engine").get("model", plan.of_kind("model")[0].qualified)
    for outer, inner in SAID:
        said = {key: value for key, value in given.items() if key != KEY} | ({} if outer is None else {KEY: outer})
        text = {key: value for key, value in said["text_config"].items() if key != KEY}
        said["text_config"] = text | ({} if inner is None else {KEY: inner})
        theirs = type(config).from_dict(json.loads(json.dumps(said)))
        theirs = theirs.text_config if kind == "llama4" else theirs  # its decoder is a causal model of its own
        assert plugin.config_from_hf(said).tie_word_embeddings == theirs.tie_word_embeddings, (outer, inner)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["mistral3", "internvl"])
def test_a_shortened_configuration(kind: str, is_tied: bool, tmp_path: Path) -> None:
    """Without the key in either part, files without a head, or with one of their own, give transformers' tokens."""
    from transformers import AutoModelForImageTextToText

    made = seeing.make_vl(tmp_path, kind)
    assert not made.config.text_config.tie_word_embeddings
    made.config.tie_word_embeddings = is_tied
    if is_tied:
        made.lm_head.weight = made.get_input_embeddings().weight
    else:
        made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.lm_head.weight), requires_grad=False)
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop(KEY)
    config["text_config"].pop(KEY, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    assert torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight) == is_tied
    parts = [[3, 9, 14], picture(57, 91), [77, 5]]
    submit = Prompts(tmp_path, tmp_path / "files").submit(parts)
    [found] = serve(tmp_path, [submit])
    assert tokens(found) == reference(theirs, parts, submit)
