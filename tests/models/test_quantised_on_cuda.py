"""What a checkpoint's headers become on CUDA: which matrices stay packed, and which are written out, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from packers import METHODS
from quantised_models import pack_model, plugin_of

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kernels import Ask, Claim, KernelSet
from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import converted
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.runtime.hf_config import CONFIG_KEYS
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.quantization.forms import Int4, Mxfp4, Scaled
from dovetail_backends.kernels.triton import TritonKernels
from dovetail_backends.quantization.fp8 import Fp8
from dovetail_testing.targets import target_for

CPU, CUDA = target_for("bfloat16"), target_for("bfloat16", "cuda")


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
    """On CPU what torch has products for, on CUDA more; without any set to ask, everything."""
    int8, fp8 = Scaled(torch.int8), Scaled(torch.float8_e4m3fn)
    assert [CPU.keeps(form, (256, 512)) for form in (int8, Int4(), fp8, Mxfp4())] == [True, True, False, False]
    assert all(CUDA.keeps(form, (8, 256, 512)) for form in (int8, Int4(), fp8, Mxfp4(), replace(int8, group=24)))
    assert [CUDA.keeps(replace(fp8, group=group), (256, 512)) for group in (None, 32, 128, 256)] == [
        True,
        False,
        True,
        True,
    ]
    groups = (None, 16, 32, 40, 96)
    assert [CUDA.keeps(Int4(group), (256, 480)) for group in groups] == [True, False, True, False, True]
    assert KernelBinder([], DeviceView("cpu")).keeps("bfloat16", fp8, (256, 512))


@pytest.mark.parametrize(("capability", "kept"), [((8, 0), [True, True, False, False]), ((9, 0), [True] * 4)])
def test_older_devices_keep_integers(capability: tuple[int, int], kept: list[bool]) -> None:
    """To save memory; each product writes them out there."""
    binder = KernelBinder([LoadedSet("triton", "triton", TritonKernels(), False)], DeviceView("cuda", "", capability))
    forms = Scaled(torch.int8), Int4(), Scaled(torch.float8_e4m3fn), Mxfp4()
    assert [binder.keeps("bfloat16", form, (256, 512)) for form in forms] == kept


def test_a_set_keeps_what_it_serves() -> None:
    """Also a form of its own author; what it raises names it."""

    class Own(KernelSet):
        devices = frozenset({"cpu"})

        def serves(self, ask: Ask) -> Claim | str:
            if ask.dim("K") == 8:
                raise ValueError("eight")
            return Claim(ask.rows) if ask.option("form") == Mxfp4() else "no"

        def make(self, ask: Ask) -> Any:
            raise NotImplementedError

    binder = KernelBinder([LoadedSet("own", "own of acme 1.0", Own(), False)], DeviceView("cpu"))
    assert [binder.keeps("bfloat16", form, (16, 32)) for form in (Mxfp4(), Int4())] == [True, False]
    with pytest.raises(PluginError, match=r"own of acme 1.0: keeps_packed\(packed_linear .*\) raised ValueError"):
        binder.keeps("bfloat16", Int4(), (16, 8))


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
    planned = weight_size(read.headers, config, "bfloat16").num_bytes
    plain = weight_size(ModelFolder(folder.with_name("plain")).headers, config, "bfloat16", head_row_bytes=0).num_bytes
    assert planned < 0.8 * plain
    assert not read.notes
