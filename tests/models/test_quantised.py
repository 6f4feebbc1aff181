"""A quantisation as a third party would write it: int8 weights with one scale a row, behind `LayerFactory`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.contracts.layers import BuildContext, LayerFactory, Linear, Norm, Parallel, Part, Stream
from dovetail.errors import ConfigError
from dovetail.layers import ops
from dovetail.layers.matrix import Matrix
from dovetail.layers.plain import PLAIN
from dovetail.runtime.weights import load_weights
from dovetail.testing.conformance.model_runtime import TinyEngine
from dovetail.testing.models import make_model
from dovetail_models.llama import Llama

CPU = torch.device("cpu")


class Int8Linear(Matrix):
    """Rows of int8 times a scale each; `group` inputs share a scale if it is given."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        ctx: BuildContext,
        path: str,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        shard: Any,
        act: Any,
        group: int | None = None,
    ) -> None:
        super().__init__(ctx, path, in_features, parts, shard)
        self._act, self._group = act, group or in_features
        self.store("weight", torch.int8)
        self.store("weight_scale", torch.float32, granule=self._group)
        self.bias = None
        if bias:
            self.store("bias", ctx.dtype, granule=None)

    def finalize(self) -> None:
        if self.is_share and self.parallel.rank > 0:
            self.bias = None

    def forward(
        self, x: Tensor | Stream, *, norm: Norm | None = None, add: Stream | None = None, scale: float = 1.0
    ) -> Tensor | Stream:
        x = x.total() if isinstance(x, Stream) else x
        x = x if norm is None else norm(x)
        scales = self.weight_scale.repeat_interleave(self._group, dim=1)[:, : self.local_in]
        y = F.linear(x, (self.weight.float() * scales).to(x.dtype), self.bias)
        return self.finish(y if self._act is None else ops.act_and_mul(self._act, y), add, scale)


class Int8Factory:
    """Answers for the matrices whose path matches; the others are plain."""

    def __init__(self, covered: str, group: int | None = None) -> None:
        self.covered, self.group = re.compile(covered), group

    def linear(self, ctx: BuildContext, name: str, in_features: int, parts: Any, **options: Any) -> Linear:
        if not self.covered.fullmatch(name):
            return PLAIN.linear(ctx, name, in_features, parts, **options)
        return Int8Linear(ctx, name, in_features, parts, **options, group=self.group)

    def experts(self, *args: Any, **options: Any) -> Any:
        return PLAIN.experts(*args, **options)


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
    (quantised / "config.json").write_text((plain / "config.json").read_text())
    return plain, quantised


COVERED = r"layers\.\d+\.(mlp\.\w+|attention\.qkv)"
PROMPTS = [[5, 7, 11, 13, 17, 19], [3, 4]]


def build(config: Any, folder: Path, factory: LayerFactory, parallel: Parallel | None = None) -> Any:
    """Build and load a Llama with matrices of the factory."""
    ctx = BuildContext(device=CPU, dtype=torch.float32, factory=factory, parallel=parallel or Parallel())
    with torch.inference_mode():
        model: Any = Llama.build(config, ctx)
        load_weights(model, Llama.weight_map(config), folder)
    return model


@pytest.mark.parametrize("group", [None, 16])
def test_an_int8_model_is_the_model_with_its_weights_written_out(group: int | None, tmp_path: Path) -> None:
    """Logits agree, the matrices are int8, and scales of fused matrices stay those of their parts."""
    plain, quantised = make_checkpoints(tmp_path, group)
    engine = TinyEngine(Llama, plain)
    want = engine.prefill_logits(PROMPTS)
    engine = TinyEngine(Llama, plain)
    engine.model = build(engine.config, quantised, Int8Factory(COVERED, group))
    assert engine.model.layers[0].mlp.down.weight.dtype == torch.int8
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
            model = build(config, quantised, Int8Factory(COVERED, group), parallel)
            down, half = "model.layers.0.mlp.down_proj.weight", slice(48 * rank, 48 * rank + 48)
            assert torch.equal(model.layers[0].mlp.down.weight, tensors[down][:, half])
            scales = tensors[down + "_scale"]
            mine = scales if group is None else scales[:, 3 * rank : 3 * rank + 3]
            assert torch.equal(model.layers[0].mlp.down.weight_scale, mine)
            gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.weight_scale"][half] for part in ("gate", "up"))
            assert torch.equal(model.layers[0].mlp.gate_up.weight_scale, torch.cat((gate, up)))


def test_a_cut_through_a_group_is_refused(tmp_path: Path) -> None:
    """Ranks that would divide the inputs which share a scale are told so before a weight is read."""
    config = TinyEngine(Llama, make_model(tmp_path, "LlamaForCausalLM", intermediate_size=96)).config
    ctx = BuildContext(
        device=CPU,
        dtype=torch.float32,
        factory=Int8Factory(COVERED, 32),
        parallel=Parallel(rank=1, size=2, all_reduce=lambda x: x),
    )
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down: weight_scale has one number for 32 inputs"):
        Llama.build(replace(config, num_layers=1), ctx)


def test_scales_that_lack_are_named(tmp_path: Path) -> None:
    """A checkpoint without one of the scales, and a plain checkpoint where a quantised one is expected."""
    plain, quantised = make_checkpoints(tmp_path)
    config = TinyEngine(Llama, plain).config
    tensors = load_file(quantised / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: layers\.1\.attention\.qkv\.weight_scale\[k\]"):
        build(config, quantised, Int8Factory(COVERED))
    with pytest.raises(ConfigError, match=r"_proj\.weight I8 instead of float32"):
        build(config, quantised, PLAIN)
