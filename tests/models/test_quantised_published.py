"""Quantised checkpoints as tools and makers publish them, in ways of which one method's usual file has none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from packers import FP8, GPTQ, METHODS, Method, gptq, scheme
from quantised_models import edit, loaded, logits, make, matrices, plugin_of, same
from safetensors.torch import load_file, save_file

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import Stored
from dovetail.runtime.hf_config import quantization_config, read_config
from dovetail.sdk.layers.packed import PackedLinear
from dovetail_backends.kernels.cpu import CpuKernels


def make_mixed(root: Path, config: Mapping[str, Any], ways: Mapping[str, Method], family: str = "qwen3") -> Path:
    """Write a checkpoint each of whose matrices is packed in the first way whose name its own contains, or plain."""
    make_checkpoint(root / "plain", family)
    shutil.copytree(root / "plain", root / "packed")
    plain, made = load_file(root / "plain/model.safetensors"), {}
    wanted = matrices(root / "plain")
    for name, tensor in list(plain.items()):
        way = next((way for part, way in ways.items() if part in name), None) if name in wanted else None
        if way is None:
            made[name] = tensor
            continue
        parts, stands_for = way.make(tensor.float())
        made |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        plain[name] = stands_for.contiguous()
    save_file(plain, root / "plain/model.safetensors")
    save_file(made, root / "packed/model.safetensors")
    whole = json.loads((root / "packed/config.json").read_text())
    (root / "packed/config.json").write_text(json.dumps(whole | {"quantization_config": dict(config)}))
    return root / "packed"


def add(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put further tensors into a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def biases_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return a bias of zeros for every matrix in GPTQ."""
    scales = {name: t for name, t in load_file(folder / "model.safetensors").items() if name.endswith(".scales")}
    return {name.replace(".scales", ".bias"): torch.zeros(t.shape[1], dtype=t.dtype) for name, t in scales.items()}


def test_gptq_with_a_bias_of_zeros_for_every_matrix(tmp_path: Path) -> None:
    """AutoGPTQ wrote one, whether the model adds it or not: it is served, and one that is not zero is named."""
    folder = make(tmp_path, "gptq", "llama")
    biases = biases_of(folder)
    add(folder, biases)
    same(logits(folder, "gptq"), logits(folder.with_name("plain")))
    name = "model.layers.1.mlp.down_proj.bias"
    add(folder, {name: biases[name] + 1})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight: \.bias is not zero, and the model has"):
        loaded(folder, "gptq")


def test_gptq_of_a_model_with_biases_has_its_own(tmp_path: Path) -> None:
    """Those of query, key and value in Qwen2 are added; the others are zeros and left out."""
    folder = make(tmp_path, "gptq", "qwen2")
    file = folder / "model.safetensors"
    own = load_file(file)
    assert any(name.endswith("q_proj.bias") and bool(tensor.any()) for name, tensor in own.items())
    save_file({**biases_of(folder), **own}, file)
    same(logits(folder, "gptq"), logits(folder.with_name("plain")))


RULES: dict[str, tuple[str, dict[str, Any], Method | None]] = {
    "bits": (r"+:.*\.mlp\.down_proj.*", {"bits": 8}, METHODS["gptq-8"]),
    "groups": (r".*\.mlp\.down_proj", {"group_size": 32}, Method("gptq", {}, gptq(32))),
    "zeros": (r"+:.*\.mlp\.down_proj", {"sym": False, "mse": 2.4}, METHODS["gptq-asymmetric"]),
    "order": (r"+:model\.layers\.\d+\.mlp\.down_proj", {"desc_act": True}, METHODS["gptq-desc-act"]),
    "plain": (r"-:.*\.mlp\.down_proj", {}, None),
    "plain in a fused one": (r"-:.*\.up_proj", {}, None),
    "bits in a fused one": (r"+:.*\.v_proj", {"bits": 8}, METHODS["gptq-8"]),
}
"""Of GPTQModel's `dynamic`: a rule, its changes, and how those modules are packed."""


@pytest.mark.parametrize("what", RULES)
def test_rules_for_some_modules(what: str, tmp_path: Path) -> None:
    """GPTQModel packs modules of some names otherwise, the first rule for a name holds, and others are as ever."""
    rule, changes, way = RULES[what]
    part = rule.rpartition(".")[2] if rule[-2:] != ".*" else "down_proj"
    ways = {part: Method("gptq", {}, way.make) if way else None, "_proj": METHODS["gptq"]}
    dynamic = {"+:no.such.name": {"bits": 4}, rule: changes, r"+:.*_proj": {}}
    folder = make_mixed(tmp_path, {**GPTQ, "dynamic": dynamic}, ways)  # type: ignore[arg-type]
    assert list(plugin_of("quantization", "gptq").unknown({**GPTQ, "dynamic": dynamic})) == []
    same(logits(folder, "gptq"), logits(folder.with_name("plain")))


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"+:*": {}}, r"dynamic has '+:*', which is no regular expression"),
        ({"+:a": {"bits": 3}}, "dynamic, '+:a': bits is 3; possible: 4 and 8"),
        ({"a": {"group_size": 0}}, "dynamic, 'a': group_size is 0; possible"),
        ({"a": 4}, "dynamic has 4 for 'a'; possible: changes"),
        (["a"], "dynamic is ['a']; possible: changes"),
    ],
)
def test_rules_that_are_none_are_named(dynamic: Any, said: str) -> None:
    """With the rule, before a tensor is looked at; null is none, and a plain module's rule needs no numbers."""
    plugin = plugin_of("quantization", "gptq")
    assert said in plugin.why_not({**GPTQ, "dynamic": dynamic})
    assert plugin.why_not({**GPTQ, "dynamic": None}) is None
    assert plugin.why_not({**GPTQ, "dynamic": {"-:a": {"bits": 3}}}) is None


@pytest.mark.parametrize("bits", [4.0, True, "4", None])
def test_bits_that_are_no_whole_number_are_named(bits: Any) -> None:
    """A 4.0 was taken, and failed under a name of its own."""
    assert f"bits is {bits!r}; possible: 4" in plugin_of("quantization", "gptq").why_not({**GPTQ, "bits": bits})
    config = scheme("int", bits, "channel")  # type: ignore[arg-type]
    assert f"num_bits is {bits!r}; possible: 4" in plugin_of("quantization", "compressed-tensors").why_not(config)


@pytest.mark.parametrize(
    "name", ["kv_scale", "k_proj.output_scale", "v_proj.output_scale", "k_proj.k_scale", "prob_scale"]
)
def test_older_names_of_scales_of_a_cache(name: str, tmp_path: Path) -> None:
    """AutoFP8, early compressed-tensors and Quark wrote them: left out, and the memory table says so."""
    folder = make(tmp_path, "fp8-tensor", num_hidden_layers=1)
    add(folder, {f"model.layers.0.self_attn.{name}": torch.tensor(0.5)})
    _, read = loaded(folder, "fp8")
    assert any("cache" in note for note in read.notes)
    same(logits(folder, "fp8"), logits(folder.with_name("plain")))


def test_int8_in_the_order_of_a_device_is_named(tmp_path: Path) -> None:
    """Early bitsandbytes saved tiles of Turing or Ampere under the same names as rows."""
    folder = make(tmp_path, "bnb-int8", num_hidden_layers=1)
    add(folder, {"model.layers.0.mlp.down_proj.weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(ModelError, match=r"down_proj\.weight: \.weight_format is \[2\], an order .* possible: 0, rows"):
        loaded(folder, "bitsandbytes")


def test_what_a_text_part_says_of_quantisation_counts(tmp_path: Path) -> None:
    """Models of several kinds of input say it there, or twice; two different ones are left to be refused."""
    config = {"quant_method": "gptq", "bits": 4}
    for given, found, left in (
        ({"text_config": {"quantization_config": config}}, config, {}),
        ({"text_config": {"compression_config": config}}, config, {}),
        ({"text_config": {"quantization_config": config}, "quantization_config": config}, config, {}),
        (
            {"text_config": {"quantization_config": config}, "quantization_config": FP8},
            FP8,
            {"quantization_config": config},
        ),
        ({"text_config": {"quantization_config": None}}, {}, {"quantization_config": None}),
        ({"text_config": None}, {}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(given))
        read = read_config(tmp_path)
        assert quantization_config(read) == found
        assert read["text_config"] == left


@pytest.mark.parametrize(
    ("way", "file", "said"),
    [
        ("gptq", "quantize_config.json", {**GPTQ, "model_file_base_name": "model", "quant_method": None}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_a_file_of_early_tools_beside_the_config(way: str, file: str, said: dict[str, Any], tmp_path: Path) -> None:
    """Without a method of its own it is that of its name; what `config.json` says holds."""
    folder = make(tmp_path, way)
    whole = json.loads((folder / "config.json").read_text())
    del whole["quantization_config"]
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / file).write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    config = quantization_config(read_config(folder))
    assert config["quant_method"] == way
    plugin = plugin_of("quantization", way)
    assert plugin.why_not(config) is None
    assert list(plugin.unknown(config)) == []
    same(logits(folder, way), logits(folder.with_name("plain")))
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": FP8}))
    assert quantization_config(read_config(folder)) == FP8


SEVERAL: dict[str, tuple[str, dict[str, Any], dict[str, Method]]] = {
    "fp8, some plain": ("fp8", FP8, {"q_proj": METHODS["fp8-rows"], "gate_proj": METHODS["fp8-rows"]}),
    "fp8, rows and tensors": ("fp8", FP8, {"q_proj": METHODS["fp8-rows"], "_proj": METHODS["fp8-tensor"]}),
    "modelopt, fp8 and nvfp4": (
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        {"v_proj": METHODS["modelopt-fp8"], "_proj": METHODS["modelopt-nvfp4"]},
    ),
    "modelopt, some plain": (
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"q_proj": METHODS["modelopt-fp8"], "up_proj": METHODS["modelopt-fp8"]},
    ),
    "compressed-tensors, 4 and 8 bits": (
        "compressed-tensors",
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                name: {"targets": [f"re:.*{name}"], **METHODS[way].config["config_groups"]["group_0"]}
                for name, way in (("v_proj", "ct-int8-packed"), ("_proj", "ct-int4"))
            },
        },
        {"v_proj": METHODS["ct-int8-packed"], "_proj": METHODS["ct-int4"]},
    ),
}
"""Matrices whose parts are stored in several ways: the plugin, its configuration, and the ways by names."""


@pytest.mark.sampled
@pytest.mark.parametrize("what", SEVERAL)
@pytest.mark.parametrize("stays", [False, True])
def test_parts_in_several_forms_are_written_out(
    what: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they would stay packed, as on CUDA; the memory table says so, and other matrices stay packed."""
    name, config, ways = SEVERAL[what]
    folder = make_mixed(tmp_path, config, ways)
    if stays:
        monkeypatch.setattr(CpuKernels, "keeps_packed", lambda _, ask: True)
        model, read = loaded(folder, name)
        is_one_form = what == "fp8, rows and tensors"
        assert isinstance(model.layers[0].attention.qkv, PackedLinear) == is_one_form
        assert any("stored in several ways" in note for note in read.notes) != is_one_form
        assert isinstance(model.layers[0].mlp.down, PackedLinear) == ("_proj" in ways and name != "modelopt")
    same(logits(folder, name), logits(folder.with_name("plain")))


def test_experts_of_which_some_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the layer's are written out, where others would have been said to be missing."""
    ways = {f"experts.{each}.": METHODS["fp8-rows"] for each in (0, 1)}
    folder = make_mixed(tmp_path, FP8, ways, "qwen3_moe")
    monkeypatch.setattr(CpuKernels, "keeps_packed", lambda _, ask: True)
    same(logits(folder, "fp8"), logits(folder.with_name("plain")))


def test_a_name_that_is_no_expression_is_named(tmp_path: Path) -> None:
    """In `ignore`, which is read where there are no tensors to ask."""
    folder = make(tmp_path, "ct-float-rows", num_hidden_layers=1)
    edit(folder, ignore=["re:*mlp"])
    plugin = plugin_of("quantization", "compressed-tensors")
    made = plugin(quantization_config(read_config(folder)), Stored({}, is_known=False))
    with pytest.raises(ModelError, match=r"ignore: 're:\*mlp' is no regular expression"):
        made.dummy()
