"""The built-in quantisation from a checkpoint to tokens: what is chosen, what is int8, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail import LLM
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.layers import BuildContext, LayerFactory, Parallel
from dovetail.messages import SamplerParams, Submit
from dovetail.runtime.checkpoint.files import open_checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import convert, factory_of, widths_of
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.sdk.layers.packed import PackedLinear
from dovetail.sdk.layers.plain import PLAIN
from dovetail_backends.quantization.compressed_tensors import CompressedTensors
from dovetail_models.llama import Llama
from dovetail_testing.conformance.model_runtime import TinyEngine
from dovetail_testing.engine import collect, make_client
from dovetail_testing.models import make_model
from dovetail_testing.targets import target_for

CPU = torch.device("cpu")
PROMPTS = [[5, 7, 11, 13, 17, 19], [3, 4]]


def quant_config(group: int | None = None, **weights: Any) -> dict[str, Any]:
    """As `compressed-tensors` writes it."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    scheme |= {"group_size": group, "dynamic": False, "observer": "minmax"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Int8 numbers and their scales, one for every `group` inputs of a row."""
    grouped = weight.view(weight.shape[0], -1, group)
    scales = grouped.abs().amax(-1, keepdim=True) / 127
    return (grouped / scales).round().to(torch.int8).view_as(weight), scales[..., 0]


def make_checkpoints(root: Path, group: int | None = None, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint with int8 MLPs and query, key and value projections, and one with the same weights written out."""
    plain = make_model(root / "plain", "LlamaForCausalLM", attention_bias=True, mlp_bias=True, **changes)
    tensors = load_file(plain / "model.safetensors")
    packed, unpacked = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and re.search(r"mlp|[qkv]_proj", name):
            size = group or tensor.shape[1]
            packed[name], scales = quantise(tensor, size)
            packed[name + "_scale"] = scales
            unpacked[name] = packed[name].float() * scales.repeat_interleave(size, dim=1)
        else:
            packed[name] = unpacked[name] = tensor
    quantised = root / "int8"
    quantised.mkdir()
    save_file(packed, quantised / "model.safetensors")
    save_file(unpacked, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": quant_config(group)}
    (quantised / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (plain / name).exists():
            (quantised / name).write_bytes((plain / name).read_bytes())
    return plain, quantised


def build(config: Any, folder: Path, factory: LayerFactory | None = None, parallel: Parallel | None = None) -> Any:
    """Build and load a Llama as the runner does."""
    rules = Llama.weight_map(config)
    hf = json.loads((folder / "config.json").read_text())
    read = open_checkpoint(folder)
    if factory is None:
        at = target_for("float32")
        read = convert(read, CompressedTensors, hf["quantization_config"], rules, widths_of(Llama, config), at)
        factory = factory_of(CompressedTensors, hf, rules, read.headers)
    ctx = BuildContext(device=CPU, dtype=torch.float32, factory=factory, parallel=parallel or Parallel())
    with torch.inference_mode():
        model: Any = Llama.build(config, ctx)
        load_weights(model, rules, read)
    return model


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    """What an engine generates."""

    async def run() -> list[list[int]]:
        client = make_client(folder, **settings)
        await client.start()
        try:
            params = SamplerParams(max_tokens=12, temperature=0, ignore_eos=True)
            asked = [collect(client, Submit(rid="", prompt_ids=prompt, params=params)) for prompt in PROMPTS]
            return [[token for delta in deltas for token in delta.ids] for deltas in await asyncio.gather(*asked)]
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("group", [None, 16])
def test_an_int8_checkpoint_is_served_as_its_weights_written_out(group: int | None, tmp_path: Path) -> None:
    """`auto` finds the plugin from config.json; tokens are those of the plain checkpoint; the memory plan knows."""
    plain, quantised = make_checkpoints(tmp_path, group)
    assert tokens(quantised) == tokens(plain) == tokens(quantised, quantization="int8")
    assert all(len(row) == 12 for row in tokens(quantised, load_format="dummy"))
    config = TinyEngine(Llama, plain).config
    sizes = [weight_size(ModelFolder(folder).headers, config, "float32").num_bytes for folder in (quantised, plain)]
    stored = sum(t.numel() * t.element_size() for t in load_file(quantised / "model.safetensors").values())
    assert sizes[0] == stored < sizes[1]


def test_only_what_the_checkpoint_stores_so_is_int8(tmp_path: Path) -> None:
    """Logits agree, the covered matrices are int8, the others plain."""
    plain, quantised = make_checkpoints(tmp_path)
    engine = TinyEngine(Llama, plain)
    want = engine.prefill_logits(PROMPTS)
    engine = TinyEngine(Llama, plain)
    engine.model = build(engine.config, quantised)
    assert engine.model.layers[0].mlp.down.weight.dtype == torch.int8
    assert isinstance(engine.model.layers[0].attention.qkv, PackedLinear)
    assert engine.model.layers[0].attention.out.weight.dtype == torch.float32
    for mine, right in zip(engine.prefill_logits(PROMPTS), want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_ranks_have_their_share_of_numbers_and_scales(tmp_path: Path) -> None:
    """A matrix cut by outputs has its rows' scales; one cut by inputs has all rows', or its groups'."""
    for group in (None, 16):
        _, quantised = make_checkpoints(tmp_path / str(group), group, intermediate_size=96)
        tensors = load_file(quantised / "model.safetensors")
        config = TinyEngine(Llama, tmp_path / str(group) / "plain").config
        for rank in range(2):
            parallel = Parallel(rank=rank, size=2, all_reduce=lambda x: x)
            model = build(config, quantised, parallel=parallel)
            down, half = "model.layers.0.mlp.down_proj.weight", slice(48 * rank, 48 * rank + 48)
            assert torch.equal(model.layers[0].mlp.down.weight, tensors[down][:, half])
            scales = tensors[down + "_scale"]
            mine = scales if group is None else scales[:, 3 * rank : 3 * rank + 3]
            assert torch.equal(model.layers[0].mlp.down.weight_scale, mine)
            gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.weight_scale"][half] for part in ("gate", "up"))
            assert torch.equal(model.layers[0].mlp.gate_up.weight_scale, torch.cat((gate, up)))


def test_a_cut_through_a_group_is_refused(tmp_path: Path) -> None:
    """Ranks that would divide the inputs which share a scale are told so before a weight is read."""
    plain, quantised = make_checkpoints(tmp_path, 32, intermediate_size=96)
    config = replace(TinyEngine(Llama, plain).config, num_layers=1)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down: weight_scale has one number for 32 inputs"):
        build(config, quantised, parallel=Parallel(rank=1, size=2, all_reduce=lambda x: x))


def test_tensors_that_lack_or_do_not_go_together_are_named(tmp_path: Path) -> None:
    """A scale is missing; one projection of a fused matrix is plain, so all are; a plain factory meets int8."""
    plain, quantised = make_checkpoints(tmp_path)
    config = TinyEngine(Llama, plain).config
    file, whole = quantised / "model.safetensors", load_file(quantised / "model.safetensors")
    key = "model.layers.1.self_attn.k_proj.weight"
    save_file({name: tensor for name, tensor in whole.items() if name != f"{key}_scale"}, file)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.self_attn\.k_proj\.weight: \.weight_scale is missing; it has \.weight I8"
    ):
        build(config, quantised)
    save_file({**{n: t for n, t in whole.items() if n != f"{key}_scale"}, key: whole[key].float()}, file)
    mixed = build(config, quantised).layers
    assert isinstance(mixed[0].attention.qkv, PackedLinear)
    weight = load_file(plain / "model.safetensors")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qv"]
    rows = torch.cat((weight[names[0]], whole[key].float(), weight[names[1]]))
    torch.testing.assert_close(mixed[1].attention.qkv.weight, rows)
    save_file(whole, file)
    with pytest.raises(ConfigError, match=r"_proj\.weight I8 instead of float32"):
        build(config, quantised, PLAIN)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_method": "hqq"}, r"--quantization 'auto': the model's quantization is 'hqq', and no installed plugin"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is given; possible: weights that are neither"),
        (quant_config(type="bits"), r"config_groups.group_0.weights.type is 'bits'; possible: 'int' and 'float'"),
        (quant_config(num_bits=3), r"config_groups.group_0.weights.num_bits is 3; possible: 4 and 8"),
        (quant_config(strategy="token"), r"weights.strategy is 'token'; possible: tensor, channel, group"),
        ({"config_groups": {}}, "config_groups is {}: expected the schemes of the weights"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_in_one_line(
    change: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    """Whatever its `quantization_config` asks for beyond what is read: before a weight is read, with the key."""
    folder = make_model(tmp_path, "LlamaForCausalLM", quantization_config={**quant_config(), **change})
    with pytest.raises(ConfigError, match=said) as error:
        tokens(folder)
    assert "\n" not in str(error.value)


def test_a_plain_checkpoint_and_a_named_quantisation(tmp_path: Path) -> None:
    """Asked for by name where there is nothing to read it is an error; `none` refuses a quantised checkpoint."""
    folder = make_model(tmp_path / "plain", "LlamaForCausalLM")
    wanted = "it reads awq, and this checkpoint is plain"
    with pytest.raises(ConfigError, match=wanted):
        tokens(folder, quantization="awq")
    quantised = make_model(tmp_path / "int8", "LlamaForCausalLM", quantization_config=quant_config())
    with pytest.raises(ConfigError, match=r"quantization_config = .* this changes what the model computes"):
        tokens(quantised, quantization="none")


def test_the_offline_class_and_the_server_choose_alike(tmp_path: Path) -> None:
    """`LLM` names a method that nobody reads before it loads anything."""
    folder = make_model(tmp_path, "LlamaForCausalLM", quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(ConfigError, match=r"the model's quantization is 'hqq'.*installed: awq"):
        LLM(str(folder), reasoning_parser=None, tool_call_parser=None)
