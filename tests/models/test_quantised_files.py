"""Quantised checkpoints as files: gpt-oss as published, other configurations, shards, and what is wrong with some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from packers import METHODS, four_bits
from quantised_models import loaded, pack_model, plugin_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.contracts.layers import Parallel
from dovetail.errors import ModelError
from dovetail.layers.packed import PackedLinear
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.checkpoint.quantization import built_bytes, choose_quantization, factory_of
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.runtime.hf_config import architecture, quant_method, read_config
from dovetail.runtime.runner import ModelRunner
from dovetail.settings import EngineSettings
from dovetail.testing.conformance.model_runtime import TinyEngine

BLOCKS_OF_128 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}}
    },
}
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [3, 4]]


def logits(folder: Path, name: str = "") -> list[Tensor]:
    """Return a checkpoint's logits; with a quantisation, as that reads them."""
    hf = read_config(folder)
    plain = folder.with_name("plain") if name else folder
    engine = TinyEngine(plugin_of("model", architecture(hf, folder)), plain)
    if name:
        engine.model, _ = loaded(folder, name)
    return list(engine.prefill_logits(PROMPTS))


def same(mine: list[Tensor], right: list[Tensor]) -> None:
    """Compare logits."""
    for got, want in zip(mine, right, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))


def make(root: Path, way: str, family: str = "qwen3", **changes: Any) -> Path:
    """Write a family's checkpoint packed in one way, and what it stands for beside it; returns the folder."""
    make_checkpoint(root / "plain", family, **changes)
    pack_model(root / "plain", root / "packed", METHODS[way])
    return root / "packed"


def edit(folder: Path, **config: Any) -> None:
    """Change keys of `quantization_config`."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    whole["quantization_config"] |= config
    path.write_text(json.dumps(whole))


def change(folder: Path, ending: str, what: Any) -> str:
    """Replace the first tensor whose name ends so by what a function makes of it (None: it is gone)."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    made = what(tensors.pop(name))
    save_file(tensors if made is None else {**tensors, name: made.contiguous()}, file)
    return name


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Blocks and scales of all experts in one tensor each, gate and up in turns, attention plain: equal logits."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    make_checkpoint(tmp_path / "plain", "gpt_oss", **sizes)
    file = tmp_path / "plain/model.safetensors"
    tensors, packed = load_file(file), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        rows = tensor.transpose(1, 2).contiguous()  # [E, N, K]
        powers = (rows.view(*rows.shape[:2], -1, 32).abs().amax(-1) / 6).clamp_min(2.0**-60).log2().ceil()
        each = [four_bits(row, power.exp2(), 32) for row, power in zip(rows, powers, strict=True)]
        packed[f"{name}_blocks"] = torch.stack([pair[0].view(rows.shape[1], -1, 16) for pair in each])
        packed[f"{name}_scales"] = (powers + 127).to(torch.uint8)
        tensors[name] = torch.stack([pair[1] for pair in each]).transpose(1, 2).contiguous()
    save_file(tensors, file)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    save_file(packed, tmp_path / "packed/model.safetensors")
    same(logits(tmp_path / "packed", "mxfp4"), logits(tmp_path / "plain"))


def test_dummies_of_gpt_oss_are_packed_as_published(tmp_path: Path) -> None:
    """Without a checkpoint experts are mxfp4 and the rest is plain; the plan counts what the engine then holds."""
    folder = tmp_path / "model"
    make_checkpoint(folder, "gpt_oss", hidden_size=64, intermediate_size=96)
    config = json.loads((folder / "config.json").read_text())
    plain = memory_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    packed = memory_of(folder)
    numel = config["num_hidden_layers"] * config["num_local_experts"] * 3 * 64 * 96
    assert plain - packed == numel * 4 - numel * 17 // 32, "float32 against 4 bits, and 8 for every 32"


@pytest.mark.parametrize(
    ("quantised", "num_bytes"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, 4),  # no kernel reads such blocks: written out
        (METHODS["ct-float-blocks"].config, 4),  # of 32
        (BLOCKS_OF_128, 1 + 4 / 128),
    ],
)
def test_dummies_of_fp8_blocks_have_their_scales(quantised: dict[str, Any], num_bytes: float, tmp_path: Path) -> None:
    """A scale for as many inputs as a checkpoint's; a matrix that blocks do not divide is plain, as it is read."""
    folder = tmp_path / "model"
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 320, "moe_intermediate_size": 128}
    make_checkpoint(folder, "glm4_moe", **sizes)
    plain = memory_of(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(quantised)}))
    attention = 2 * ((128 + 2 * 64) * 128 + 128 * 128)
    behind = 2 * 320 * 128 + (5 + 1) * 3 * 128 * 128  # the first layer's MLP, without the half of 320 inputs; experts
    assert plain - memory_of(folder) == (attention + behind) * (4 - num_bytes)


def test_dummies_follow_what_a_checkpoint_leaves_out(tmp_path: Path) -> None:
    """Kimi-K2's experts alone are packed, as its `ignore` names all others; where a router is left out, all are."""
    folder, sizes = tmp_path / "model", {"moe_intermediate_size": 64, "hidden_size": 64, "intermediate_size": 96}
    make_checkpoint(folder, "deepseek_v3", **sizes)
    plain = memory_of(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    words = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": scheme}}}
    others = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    experts = 2 * 8 * 3 * 64 * 64 * (4 - 1 / 2 - 2 / 32)
    for left_out, is_alone in ((others, True), (["lm_head", r"re:.*mlp\.gate$"], False)):
        file.write_text(json.dumps(config | {"quantization_config": words | {"ignore": left_out}}))
        saved = plain - memory_of(folder)
        assert saved == experts if is_alone else saved > experts


def memory_of(folder: Path) -> int:
    """Return the bytes of weights that an engine of dummies holds, once it has planned with as many."""
    hf = read_config(folder)
    settings = EngineSettings(
        model_path=str(folder), dtype="float32", device="cpu", max_total_tokens=256, load_format="dummy"
    )
    made = make_plan(
        Registry.scan(), model=architecture(hf, folder), attention_backend="auto", device="cpu", quantization="auto",
        quant_method=quant_method(hf),
    )  # fmt: skip
    plugins = load(made, "engine")
    chosen, model = choose_quantization(plugins, hf), plugins.get("model", architecture(hf, folder))
    runner = ModelRunner(settings, plugins)
    factory = factory_of(chosen and chosen[1], hf, model.weight_map(runner.config), None)
    assert built_bytes(model, runner.config, torch.float32, factory, Parallel()) == runner.weight_bytes
    assert all(bool(param.float().isfinite().all()) for param in runner.model.parameters())
    return int(runner.weight_bytes)


def test_forms_without_a_product_work_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written out today multiplies packed as well, which is what kernels are compared with."""
    from dovetail.layers import packed_forms

    for number, way in enumerate(("fp8-blocks", "fp8-rows", "fp8-tensor", "mxfp8", "ct-mxfp4", "ct-float-blocks")):
        folder = make(tmp_path / str(number), way)
        monkeypatch.setattr(packed_forms, "KEPT", dict.fromkeys(packed_forms.KEPT, ("cpu",)))
        model, read = loaded(folder, METHODS[way].plugin)
        assert isinstance(model.layers[0].mlp.down, PackedLinear)
        assert not read.notes
        mine = logits(folder, METHODS[way].plugin)
        monkeypatch.undo()
        same(mine, logits(folder.with_name("plain")))


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


def test_a_weight_and_its_scale_in_two_files(tmp_path: Path) -> None:
    """Shards are cut between tensors, not between modules."""
    folder = make(tmp_path, "gptq-asymmetric")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-{index % 3 + 1:05}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    same(logits(folder, "gptq"), logits(folder.with_name("plain")))


def test_scales_of_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    """They are neither missing nor surplus, and the table says that the cache keeps its dtype."""
    folder = make(tmp_path, "fp8-tensor")
    file = folder / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{each}_scale": torch.tensor(0.5) for each in ("k", "v")}
    save_file({**load_file(file), **scales}, file)
    _, read = loaded(folder, "fp8")
    assert any("written out: no product for it on cpu" in note for note in read.notes)
    assert any("cache" in note for note in read.notes)
    same(logits(folder, "fp8"), logits(folder.with_name("plain")))


def test_the_plan_counts_what_will_be_kept(tmp_path: Path) -> None:
    """Packed int4 is counted as it is, numbers that are written out as the model's dtype."""
    for way in ("awq", "ct-int4", "gptq-8", "ct-nvfp4", "fp8-blocks"):
        folder = make(tmp_path / way, way)
        model, read = loaded(folder, METHODS[way].plugin)
        config = TinyEngine(plugin_of("model", "Qwen3ForCausalLM"), folder.with_name("plain")).config
        planned = weight_size(folder, config, "float32", "cpu", headers=read.headers).num_bytes
        plain = weight_size(folder.with_name("plain"), config, "float32", "cpu").num_bytes
        assert (planned < 0.6 * plain) == METHODS[way].kit.get("stays_packed", True), way
        del model


WRONG: dict[str, tuple[str, str, Any, str]] = {
    "no scale": (
        "fp8-blocks",
        "down_proj.weight_scale_inv",
        lambda t: None,
        "needs one scale, model.*down_proj.weight_",
    ),
    "a scale of other blocks": (
        "fp8-blocks",
        "down_proj.weight_scale_inv",
        lambda t: t[:1],
        r"is \[1, 3\]; for a weight",
    ),
    "awq without zeros": ("awq", ".qzeros", lambda t: None, r"\.qzeros is missing; it has \.qweight I32"),
    "awq scales of another group": (
        "awq",
        "down_proj.scales",
        lambda t: t[::2],
        r"is \[3, 64\] instead of \[6, 64\] \(gro",
    ),
    "gptq without scales": ("gptq", ".scales", lambda t: None, r"\.scales is missing"),
    "gptq words cut off": (
        "gptq",
        "down_proj.qweight",
        lambda t: t[:-1],
        r"\.qweight is \[11, 64\] instead of \[12, 64\]",
    ),
    "a group that is not there": ("gptq", "down_proj.g_idx", lambda t: t + 1, r"\.g_idx has groups 1 to 6 of 6"),
    "an order of its own": (
        "gptq",
        "down_proj.g_idx",
        lambda t: t.flip(0),
        "an order of its own, and .* desc_act false",
    ),
    "zeros in a symmetric one": (
        "gptq",
        "down_proj.qzeros",
        lambda t: t + 1,
        "says that it is symmetric, and has zeros beside 8",
    ),
    "scales alone": ("ct-int4", "down_proj.weight_packed", lambda t: None, r"unexpected: .*down_proj\.weight_s"),
    "another shape": (
        "ct-int4",
        "down_proj.weight_shape",
        lambda t: t + 8,
        r"\.weight_shape says \[72, 104\], and it is",
    ),
    "packed words cut off": (
        "ct-int4",
        "down_proj.weight_packed",
        lambda t: t[:, :-1],
        r"is \[64, 11\] instead of \[64, 12",
    ),
    "nvfp4 without its whole scale": (
        "modelopt-nvfp4",
        "weight_scale_2",
        lambda t: None,
        r"\.weight_scale_2 is missing",
    ),
    "nvfp4 groups cut off": (
        "ct-nvfp4",
        "down_proj.weight_scale",
        lambda t: t[:, 1:],
        r"is \[64, 5\] instead of \[64, 6\]",
    ),
    "mxfp4 bytes cut off": (
        "ct-mxfp4",
        "down_proj.weight_packed",
        lambda t: t[:, 1:],
        r"is \[64, 47\] instead of \[64, 48",
    ),
    "nf4 without its map": ("nf4", ".weight.quant_map", lambda t: None, r"\.weight\.quant_map is missing"),
    "nf4 with a broken state": ("nf4", "bitsandbytes__nf4", lambda t: t[:-3], "is not the JSON of a state"),
    "nf4 with blocks cut off": (
        "nf4",
        "down_proj.weight.absmax",
        lambda t: t[1:],
        "absmax has 95 scales for 96 blocks",
    ),
    "nf4 cut off": ("nf4", "down_proj.weight", lambda t: t[1:], "6142 numbers are no matrix of 96 inputs"),
    "awq words of another type": ("awq", "down_proj.qweight", lambda t: t.float(), r"\.qweight is F32; possible: I32"),
    "gptq words with one axis": (
        "gptq",
        "down_proj.qweight",
        lambda t: t.flatten(),
        r"\.qweight is \[768\] instead of a matrix",
    ),
    "gptq zeros of another type": ("gptq", "down_proj.qzeros", lambda t: t.half(), r"\.qzeros is F16; possible: I32"),
    "an order that is lost": ("gptq-desc-act", "down_proj.g_idx", lambda t: None, r"\.g_idx is missing"),
    "an order of words that is lost": (
        "ct-int4-act-order",
        "down_proj.weight_g_idx",
        lambda t: None,
        "g_idx is missing",
    ),
    "zeros that are lost": (
        "ct-int4-asymmetric",
        "down_proj.weight_zero_point",
        lambda t: None,
        r"\.weight_zero_point is missing",
    ),
    "int8 zeros that are lost": (
        "ct-int8-asymmetric",
        "down_proj.weight_zero_point",
        lambda t: None,
        r"\.weight_zero_point is missing",
    ),
    "int8 with three axes": ("ct-int8", "down_proj.weight", lambda t: t[None], "instead of a matrix"),
    "blocks that fit as one": (
        "fp8-blocks",
        "k_proj.weight_scale_inv",
        lambda t: t[:, :-1],
        r"is \[1, 1\]; for a weight .* possible: \[1, 2\] \(blocks of 32 x 32\); the configuration says so",
    ),
    "mxfp8 groups that divide": (
        "mxfp8",
        "down_proj.weight_scale_inv",
        lambda t: t[:, :-1],
        r"is \[64, 2\]; for a weight .* possible: \[64, 3\]",
    ),
    "one scale for rows": (
        "ct-float-rows",
        "down_proj.weight_scale",
        lambda t: t[:1, 0],
        r"possible: \[64, 1\] \(rows.*the configuration says so",
    ),
    "fp8 with one axis": ("fp8-tensor", "down_proj.weight", lambda t: t.flatten(), r"is \[6144\] instead of a matrix"),
    "nvfp4 with no axis": ("modelopt-nvfp4", "down_proj.weight", lambda t: t.flatten()[0], "instead of a matrix"),
    "nf4 levels of another type": ("nf4", "down_proj.weight.absmax", lambda t: t.int(), r"absmax is I32; possible: U8"),
    "int8 without its rows": ("bnb-int8", ".SCB", lambda t: None, r"\.SCB is missing"),
}
"""What is wrong: the way, the tensor that is changed, how, and what is said."""


@pytest.mark.parametrize(
    ("way", "scheme", "said"),
    [
        ("ct-int4", {"group_size": 32}, "a scale for 16 inputs, and config_groups says for 32 inputs"),
        (
            "ct-int4",
            {"strategy": "channel", "group_size": None},
            "a scale for 16 inputs, and config_groups says for a row",
        ),
        ("ct-int8-groups", {"group_size": 32}, "a scale for 16 inputs, and config_groups says for 32 inputs"),
        (
            "ct-int8",
            {"strategy": "group", "group_size": 16},
            r"a scale for \d+ inputs, and config_groups says for 16 inputs",
        ),
    ],
)
def test_a_group_size_that_the_file_does_not_have_is_named(
    way: str, scheme: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """What config.json says of compressed-tensors' integers is held against their scales."""
    folder = make(tmp_path, way, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= scheme
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said) as error:
        loaded(folder, "compressed-tensors")
    assert str(error.value).startswith("model.layers.0.")
    assert "\n" not in str(error.value)


STATES: dict[str, tuple[str, Any, str]] = {
    "no JSON": (".quant_state.bitsandbytes__nf4", lambda t: t[1:], "quant_state is not the JSON of a state"),
    "no blocks": (".quant_state.bitsandbytes__nf4", lambda t: said(t, blocksize=0), "has blocks of 0 and 256 numbers"),
    "blocks of one": (".quant_state.bitsandbytes__nf4", lambda t: said(t, nested_blocksize=0), "64 and 0 numbers"),
    "no inner blocks": (".quant_state.bitsandbytes__nf4", lambda t: said(t, nested_blocksize=None), "not the JSON"),
    "scales cut off": (".absmax", lambda t: t[:-1], r"absmax has \d+ scales for \d+ blocks of 64"),
    "scales of scales": (".nested_absmax", lambda t: torch.cat((t, t)), "nested_absmax has 2 scales for"),
    "levels cut off": (".nested_quant_map", lambda t: t[:200], "nested_quant_map 200 of 256 levels"),
    "numbers cut off": (".weight.quant_map", lambda t: t[:9], "quant_map has 9 numbers instead of 16"),
}


def said(state: Tensor, **changes: Any) -> Tensor:
    """Change keys of a state that bitsandbytes stores as text."""
    return torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("what", STATES)
def test_what_is_wrong_with_a_state_of_bitsandbytes_is_named(what: str, tmp_path: Path) -> None:
    """What no header tells is found where the matrix is made, in one line that has its name."""
    ending, how, match = STATES[what]
    folder = make(tmp_path, "nf4-nested", num_hidden_layers=1)
    name = change(folder, ending, how)
    with pytest.raises(ModelError, match=match) as error:
        loaded(folder, "bitsandbytes")
    assert str(error.value).startswith(name.partition(".weight")[0] + ".weight: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_file_is_named(what: str, tmp_path: Path) -> None:
    """In one line that has the module's name, and what would be right."""
    way, ending, how, said = WRONG[what]
    folder = make(tmp_path, way, num_hidden_layers=1)
    change(folder, ending, how)
    with pytest.raises(ModelError, match=said) as error:
        loaded(folder, METHODS[way].plugin)
    assert "model.layers.0." in str(error.value)
    assert "\n" not in str(error.value)


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


FAULTS: dict[str, tuple[str, str, Any]] = {
    "scales turned": ("fp8-blocks", "q_proj.weight_scale_inv", lambda t: t.T.reshape(t.shape)),
    "zeros off by one": ("gptq-asymmetric", "q_proj.qzeros", lambda t: t + 0x11111111),
    "nibbles in another order": ("awq", "q_proj.qweight", lambda t: (t << 4) | ((t >> 28) & 15)),
    "halves of bytes swapped": ("ct-nvfp4", "q_proj.weight_packed", lambda t: (t << 4) | (t >> 4)),
    "one exponent more": ("ct-mxfp4", "v_proj.weight_scale", lambda t: t + 1),
    "blocks one further": ("nf4", "q_proj.weight.absmax", lambda t: t.roll(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_each_fault(fault: str, tmp_path: Path) -> None:
    """A file with one of the usual faults gives other logits: the tests above would see a reader that has it."""
    way, ending, how = FAULTS[fault]
    folder = make(tmp_path, way, num_hidden_layers=1)
    change(folder, ending, how)
    with pytest.raises(AssertionError):
        same(logits(folder, METHODS[way].plugin), logits(folder.with_name("plain")))


@pytest.mark.parametrize("stays", [False, True])
def test_experts_in_one_tensor(stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts' fp8 with the scales of their blocks, written out and packed: as each expert by itself."""
    from dovetail.layers import packed_forms

    make_checkpoint(tmp_path / "plain", "granitemoe")
    file = tmp_path / "plain/model.safetensors"
    tensors, packed = load_file(file), {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() < 3:
            packed[name] = tensor
            continue
        pairs = [METHODS["fp8-blocks"].make(expert) for expert in tensor]
        base = name.removesuffix(".weight")
        suffix = name.removeprefix(base)
        packed[name] = torch.stack([pair[0][".weight"] for pair in pairs])
        packed[f"{base}{suffix}_scale_inv"] = torch.stack([pair[0][".weight_scale_inv"] for pair in pairs])
        tensors[name] = torch.stack([pair[1] for pair in pairs])
    assert len(packed) > len(tensors)
    save_file(tensors, file)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = dict(METHODS["fp8-blocks"].config)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    save_file(packed, tmp_path / "packed/model.safetensors")
    if stays:
        monkeypatch.setattr(packed_forms, "KEPT", dict.fromkeys(packed_forms.KEPT, ("cpu",)))
    same(logits(tmp_path / "packed", "fp8"), logits(tmp_path / "plain"))


@pytest.mark.parametrize("way", ["nf4", "nf4-nested", "bnb-int8", "fp8-rows", "ct-int4"])
def test_what_is_no_matrix_of_the_model_is_written_out(way: str, tmp_path: Path) -> None:
    """Tools pack latent attention's second matrix and the output head, too, which models use from other sides."""
    make_checkpoint(tmp_path / "plain", "deepseek_v3", vocab_size=136, moe_intermediate_size=64)
    method, file = METHODS[way], tmp_path / "plain/model.safetensors"
    tensors, packed = load_file(file), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("kv_b_proj.weight", "lm_head.weight")):
            packed[name] = tensor
            continue
        parts = method.pack(tensor)
        packed |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        tensors[name] = method.unpack(parts).contiguous()
    assert len(packed) > len(tensors)
    save_file(tensors, file)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = dict(method.config)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    save_file(packed, tmp_path / "packed/model.safetensors")
    same(logits(tmp_path / "packed", method.plugin), logits(tmp_path / "plain"))


def test_blocks_of_nothing_are_named(tmp_path: Path) -> None:
    """Under a name that is nothing of the model's they are not taken for a matrix of some width."""
    folder = make(tmp_path, "nf4", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = {name.replace("down_proj", "sideways"): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"sideways\.weight: in 4 bits, and the model has no matrix there"):
        loaded(folder, "bitsandbytes")
