"""What a quantised checkpoint says of itself: which configurations are read, and which keys."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from families import make_checkpoint
from packers import METHODS
from quantised_models import edit, logits, make, plugin_of, same

from dovetail.contracts.errors import PluginError
from dovetail.contracts.quantization import Stored
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.checkpoint.quantization import choose_quantization, made_by
from dovetail.runtime.hf_config import quant_method, read_config


def test_a_configuration_beside_the_models(tmp_path: Path) -> None:
    """`hf_quant_config.json` is read where `config.json` says nothing, and counts for the choice of the plugin."""
    folder = make(tmp_path, "modelopt-nvfp4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    assert quant_method(read_config(folder)) == "modelopt"
    same(logits(folder, "modelopt"), logits(folder.with_name("plain")))


@pytest.mark.parametrize(
    ("way", "config", "said"),
    [
        ("awq", {"bits": 3}, "bits is 3; possible: 4"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; possible: 'gemm'"),
        ("awq", {"group_size": 0}, "group_size is 0; possible: a number from 1, or -1"),
        ("gptq", {"bits": 2}, "bits is 2; possible: 4 and 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; possible: gptq, gptq_v2"),
        ("fp8-blocks", {"weight_block_size": [128]}, "possible: two numbers from 1"),
        ("modelopt-nvfp4", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; possible: FP8"),
        ("nf4", {"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit is true"),
        ("awq", {"version": None, "format": "gemv"}, "format is 'gemv'; possible: 'gemm'"),
        ("awq", {"backend": "llm-awq"}, "backend is 'llm-awq'; possible: 'autoawq'"),
        ("gptq", {"format": "marlin"}, "checkpoint_format is 'marlin'; possible: gptq, gptq_v2"),
        ("fp8-blocks", {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'; possible: 'fp8'"),
    ],
)
def test_a_configuration_that_is_not_served_is_named(way: str, config: dict[str, Any], said: str) -> None:
    """With the key, and what is possible."""
    plugin = plugin_of("quantization", METHODS[way].plugin)
    assert said in plugin.why_not({**METHODS[way].config, **config})


def test_zeros_of_the_second_format_are_known_by_either_key(tmp_path: Path) -> None:
    """Newer tools say `format` where older ones said `checkpoint_format`: others are off by one."""
    folder = make(tmp_path, "gptq-v2")
    edit(folder, checkpoint_format=None, format="gptq_v2")
    same(logits(folder, "gptq"), logits(folder.with_name("plain")))


@pytest.mark.parametrize("way", METHODS)
def test_keys_that_nobody_heeds_are_named(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a tool writes is known, what it may write some day is told in one line."""
    name, config = METHODS[way].plugin, dict(METHODS[way].config)
    plugin = plugin_of("quantization", name)
    assert list(plugin.unknown(config)) == []
    method = "none" if name == "int8" else str(config["quant_method"])
    made = make_plan(
        Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", device="cpu",
        quantization="int8" if name == "int8" else "auto", quant_method=method,
    )  # fmt: skip
    with caplog.at_level("WARNING"):
        choose_quantization(load(made, "engine"), {"quantization_config": config | {"turns": 3}})
    assert caplog.messages == [f"quantization_config: {name} does not know turns, and leaves it out."]


def test_keys_of_schemes_that_nobody_heeds_are_named() -> None:
    """With the way to them."""
    plugin, config = plugin_of("quantization", "compressed-tensors"), json.loads(json.dumps(METHODS["ct-int4"].config))
    config["config_groups"]["group_0"] |= {"turns": 1}
    config["config_groups"]["group_0"]["weights"] |= {"twists": 2}
    assert plugin.unknown(config) == ["config_groups.group_0.turns", "config_groups.group_0.weights.twists"]


@pytest.mark.parametrize("method", [None, "none", "None", ""])
def test_a_method_that_is_none_is_a_plain_checkpoint(method: str | None, tmp_path: Path) -> None:
    """Tools that leave a model as it is write so; packed tensors of such a file are refused by the loader."""
    make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=1)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    hf = config | {"quantization_config": {"quant_method": method, "bits": 4}}
    assert quant_method(hf) == ""
    made = make_plan(
        Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", device="cpu", quantization="auto",
        quant_method=quant_method(hf),
    )  # fmt: skip
    assert choose_quantization(load(made, "engine"), hf) is None


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"linear": lambda ctx, name, in_features, parts, *, bias, shard, act: None}, "linear(ctx, name, in_features,"),
        (
            {"linear": lambda ctx, name, *sizes, **options: None},
            "linear(ctx, name, sizes, options), and is called as linear(ctx, spec)",
        ),
        (
            {"linear": lambda ctx, spec: None, "experts": lambda ctx, name, *sizes, **options: None},
            "take ExpertsSpec of dovetail.contracts",
        ),
        ({"linear": lambda ctx, spec: None, "experts": lambda *given, **options: None}, ""),
        ({"linear": lambda ctx, matrix: None}, ""),
    ],
)
def test_a_factory_of_earlier_contracts_is_told(methods: dict[str, Any], said: str) -> None:
    """Its plugin is named before any weight is read, not the model that asks it for a matrix."""

    class Old:
        def __init__(self, config: Any, stored: Any) -> None:
            del config, stored

        def factory(self, plain: Any) -> Any:
            return SimpleNamespace(**methods)

    plugin: Any = Old
    if not said:
        assert made_by(plugin, {}, Stored({})).linear is methods["linear"]
        return
    with pytest.raises(PluginError, match="; upgrade the package, or have its author") as error:
        made_by(plugin, {}, Stored({}))
    assert said in str(error.value)
    assert f"quantization Old of {__name__}: SimpleNamespace has " in str(error.value)
