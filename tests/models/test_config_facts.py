"""What manifests name to know a model by without torch says what the models themselves say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.layers import BuildContext
from dovetail.plugins import Registry
from dovetail.plugins.config_facts import config_facts
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.plugins.records import PluginRecord
from dovetail.runtime.checkpoint.folder import ModelFolder, check_fit
from dovetail.runtime.checkpoint.weight_match import match_weights
from dovetail.runtime.checkpoint.weights import model_layers
from dovetail.sdk.layers.plain import PLAIN
from dovetail_testing.models import make_model

NAMING = [record for record in Registry.scan().of_kind("model") if record.facts.config]
"""Plugins whose manifest names a `config`."""
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "a head dim": {"head_dim": 48},
}
Headers = Sequence[TensorHeader]
Change = Callable[[Headers], Headers]


def one_wrong(headers: Headers, **wrong: Any) -> Headers:
    return [*headers[:-1], headers[-1]._replace(**wrong)]


CHANGES: dict[str, Change] = {
    "nothing": lambda headers: headers,
    "one less": lambda headers: headers[1:],
    "one more": lambda headers: [*headers, headers[0]._replace(name="model.layers.99.mlp.up_proj.weight")],
    "another name": lambda headers: one_wrong(headers, name="model.other.weight"),
    "another shape": lambda headers: one_wrong(headers, shape=(3, *headers[-1].shape[1:])),
    "another axis": lambda headers: one_wrong(headers, shape=(*headers[-1].shape, 1)),
    "whole numbers": lambda headers: one_wrong(headers, dtype="I32"),
    "frequencies of the rotary embedding": lambda headers: [
        *headers,
        headers[0]._replace(name="model.layers.0.self_attn.rotary_emb.inv_freq", shape=(8,)),
    ],
    "keys and values as one": lambda headers: joined(headers, "self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    "gates as one": lambda headers: joined(headers, "mlp.", ("gate_proj", "up_proj"), "gate_up_proj"),
}


def joined(headers: Headers, place: str, parts: Sequence[str], name: str) -> Headers:
    """Have the matrices of the first layer as one, where it has no biases."""
    wanted = [f"model.layers.0.{place}{part}.weight" for part in parts]
    found = {header.name: header for header in headers if header.name in wanted}
    shape = (sum(header.shape[0] for header in found.values()), *found[wanted[0]].shape[1:])
    whole = found[wanted[0]]._replace(name=f"model.layers.0.{place}{name}.weight", shape=shape)
    return [header for header in headers if header.name not in wanted] + [whole]


def refusal(check: Callable[[], object]) -> str:
    """Return the kind of what does not fit, "" where all does."""
    try:
        check()
    except ModelError as error:
        return str(error).partition("model; ")[2].partition(":")[0]
    return ""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("record", NAMING, ids=lambda record: record.name)
def test_they_want_what_the_model_wants(record: PluginRecord, variant: str, tmp_path: Path) -> None:
    """Of one configuration: the same facts, and the same checkpoints fit or do not, for the same kind of reason."""
    if variant == "biased" and record.name == "Qwen2ForCausalLM":
        return  # it has biases, and no such key
    mlp = {"mlp_bias": True} if variant == "biased" and record.name == "LlamaForCausalLM" else {}
    folder = ModelFolder.read(make_model(tmp_path, record.name, num_hidden_layers=2, **VARIANTS[variant], **mlp))
    facts, plugin = config_facts(record), import_planned(as_planned(record))
    assert facts is not None
    config = folder.model_config(plugin.config_from_hf)
    assert replace(folder.claimed_config(facts), tie_word_embeddings=config.tie_word_embeddings) == config
    ctx = BuildContext(device=torch.device("meta"), dtype=torch.float32, factory=PLAIN)
    layers, rules = model_layers(plugin.build(config, ctx)), plugin.weight_map(config)
    seen = set()
    for name, change in CHANGES.items():
        headers = list(change(folder.headers or ()))
        wanted = facts.tensors(config, {header.name for header in headers})
        said = refusal(lambda: check_fit(folder.path, wanted, headers, facts.unneeded))  # noqa: B023
        assert said == refusal(lambda: match_weights(layers, rules, headers, folder.path)), name  # noqa: B023
        seen.add(said)
    assert seen >= {"", "missing", "unexpected", "wrong shape or type"}


def test_three_architectures_have_them() -> None:
    """And importing them imports no torch."""
    assert [record.name for record in NAMING] == ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
    modules = {record.facts.config.partition(":")[0] for record in NAMING}
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("dovetail_models.gone:A", "ModuleNotFoundError"),
        ("dovetail_models.dense:Gone", "AttributeError"),
        ("json:JSONDecoder", "AttributeError: type object 'JSONDecoder' has no attribute 'config_from_hf'"),
    ],
)
def test_what_cannot_be_used_is_named(named: str, reason: str) -> None:
    """With the plugin, and what its manifest says."""
    wrong = replace(NAMING[0], facts=NAMING[0].facts._replace(config=named))
    with pytest.raises(PluginError, match=f"model 'LlamaForCausalLM' of .* names {named} as config, .*{reason}"):
        config_facts(wrong)
