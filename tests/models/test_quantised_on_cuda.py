"""What a checkpoint's headers become on CUDA: which matrices stay packed, and which are written out, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import make_checkpoint
from packers import METHODS
from quantised_models import pack_model, plugin_of

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import converted
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.runtime.hf_config import CONFIG_KEYS
from dovetail.sdk.quantization.forms import stays_packed
from dovetail_backends.quantization.fp8 import Fp8

CUDA = Target("bfloat16", "cuda")


def conversion(path: str, scale: tuple[int, ...], block: list[int] | None) -> Conversion:
    """Of one fp8 weight `[256, 512]`."""
    tensors = {
        "m.weight": FileTensor("m.weight", "F8_E4M3", (256, 512), path, 512),
        "m.weight_scale_inv": FileTensor("m.weight_scale_inv", "F32", scale, path, 512),
    }
    (found,) = Fp8.conversions({"quant_method": "fp8", "weight_block_size": block}, tensors, CUDA)
    return found


@pytest.mark.parametrize(("scale", "block"), [((2, 4), [128, 128]), ((256, 1), None), ((), None)])
def test_fp8_stays_packed_on_cuda(scale: tuple[int, ...], block: list[int] | None) -> None:
    """With scales for blocks of 128 inputs, rows, or all of it: only the scales are converted."""
    found = conversion("layers.0.mlp.down", scale, block)
    assert [tensor.dtype for tensor in found.results] == ["F32"]
    assert not found.note


def test_other_blocks_are_written_out() -> None:
    """The kernels for float8 know no scales of fewer inputs."""
    found = conversion("layers.0.mlp.down", (8, 16), [32, 32])
    assert [tensor.dtype for tensor in found.results] == ["BF16"]
    assert "no product for it on cuda" in found.note


def test_experts_of_fp8_stay_packed() -> None:
    """As matrices of layers do."""
    found = conversion("layers.0.mlp.experts.down", (2, 4), [128, 128])
    assert [tensor.dtype for tensor in found.results] == ["F32"]


def test_what_stays_packed_where() -> None:
    """On CPU what torch has products for, on CUDA more."""
    numbers = ("int8", "int4", "float8_e4m3fn", "mxfp4")
    assert [stays_packed(each, "cpu") for each in numbers] == [True, True, False, False]
    assert all(stays_packed(each, "cuda", 128) for each in numbers)
    assert stays_packed("float8_e4m3fn", "cuda", None)
    assert not stays_packed("float8_e4m3fn", "cuda", 32)
    assert [stays_packed("int4", "cuda", group) for group in (None, 16, 32, 40, 96)] == [True, False, True, False, True]
    assert stays_packed("int8", "cuda", 24)


@pytest.mark.parametrize(("way", "stays"), [("awq", False), ("ct-int4-rows", True), ("ct-int8-groups", True)])
def test_groups_that_kernels_have_no_scales_for_are_written_out(way: str, stays: bool, tmp_path: Path) -> None:
    """Int4 with a scale for 16 inputs is a plain matrix on CUDA, and the memory table says so."""
    make_checkpoint(tmp_path / "plain", "qwen3")
    pack_model(tmp_path / "plain", tmp_path / "packed", METHODS[way])
    method, packed, model = METHODS[way], ModelFolder(tmp_path / "packed"), plugin_of("model", "Qwen3ForCausalLM")
    config = packed.model_config(model.config_from_hf, served=CONFIG_KEYS)
    read = converted(plugin_of("quantization", method.plugin), packed, model, config, CUDA)
    assert any("written out: no product for it on cuda" in note for note in read.notes) != stays


@pytest.mark.parametrize("way", ["fp8-rows", "ct-int4-rows", "ct-mxfp4"])
def test_the_plan_for_cuda_counts_packed_weights(way: str, tmp_path: Path) -> None:
    """Before anything is loaded, by the headers of what the conversions make."""
    make_checkpoint(tmp_path / "plain", "qwen3")
    folder = tmp_path / "packed"
    pack_model(tmp_path / "plain", folder, METHODS[way])
    method, packed, model = METHODS[way], ModelFolder(folder), plugin_of("model", "Qwen3ForCausalLM")
    config = packed.model_config(model.config_from_hf, served=CONFIG_KEYS)
    read = converted(plugin_of("quantization", method.plugin), packed, model, config, CUDA)
    planned = weight_size(read.headers, config, "bfloat16", "cuda").num_bytes
    plain = weight_size(ModelFolder(folder.with_name("plain")).headers, config, "bfloat16", "cuda").num_bytes
    assert planned < 0.8 * plain
    assert not read.notes
