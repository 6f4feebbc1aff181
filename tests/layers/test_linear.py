"""Matrices that a layer asks for: whole expressions, whatever is fused, and what each rank has of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.cache.pool import KVCache
from dovetail.contracts.config import cache_groups
from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import ModelError
from dovetail.contracts.kernels import Ask, Claim, KernelSet
from dovetail.contracts.layers import BuildContext, Parallel, Part, Stream
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.runtime.hf_config import read_config
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.base import Slot
from dovetail.sdk.layers.decoder import DecoderLayer
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.transformer import GatedMLP
from dovetail_backends.kernels.cpu import CpuKernels
from dovetail_models.llama import Llama
from dovetail_models.qwen2 import Qwen2
from dovetail_models.qwen3 import Qwen3
from dovetail_testing.conformance.model_runtime import ReferenceAttention, TinyEngine
from dovetail_testing.models import make_model

CPU = torch.device("cpu")
REPACKS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
GATE = (Part("gate", 12), Part("up", 12))


def context(dtype: torch.dtype = torch.float32, parallel: Parallel | None = None) -> BuildContext:
    sets = [LoadedSet("cpu", "cpu", CpuKernels(), False)]
    kernels = KernelBinder(sets, DeviceView("cpu"))
    return BuildContext(device=CPU, dtype=dtype, factory=PLAIN, parallel=parallel or Parallel(), kernels=kernels)


def filled(module: Any, seed: int = 0) -> Any:
    """Give every parameter random numbers and repack."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.data.normal_(0.5 if param.dim() == 1 else 0.0, 0.5, generator=generator)
    for layer in module.modules():
        if hasattr(layer, "finalize"):
            layer.finalize()
    return module


class UnitOffsetNorm(RMSNorm):
    """Gemma's: multiplies by one plus the weight. It only overrides `forward`."""

    def forward(self, x: Tensor | Stream) -> Tensor:
        value = x.total() if isinstance(x, Stream) else x
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rms": lambda size: RMSNorm(size, 1e-5, context()),
    "offset": lambda size: UnitOffsetNorm(size, 1e-5, context()),
    "layer": lambda size: nn.LayerNorm(size),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_decoder_layer_computes_the_norm_that_it_has(name: str) -> None:
    """A norm that is not the plain RMS norm is called, not replaced by the kernel's: the MLP's half of a layer."""
    hf = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1}
    hf |= {"num_attention_heads": 2, "max_position_embeddings": 8, "architectures": ["LlamaForCausalLM"]}
    config = dense_config(hf)
    with torch.no_grad():
        layer = DecoderLayer(config, context(), NoAttention(), GatedMLP(config, context()))
        layer.mlp_norm = NORMS[name](16)
        filled(layer)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
        gate, up = F.linear(layer.mlp_norm(x), layer.mlp.gate_up.weight).chunk(2, dim=-1)
        want = x + F.linear(F.silu(gate) * up, layer.mlp.down.weight)
        unused: Any = None
        got = layer(Stream(x.clone()), unused, unused).total()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class NoAttention(nn.Module):
    """A part that has no kernels of its own and leaves the stream as it is."""

    def forward(self, x: Stream, rope: Any, batch: Any, *, norm: Any, add: Stream) -> Stream:
        return add.plus(0 * norm(x.total()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", [None, "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_every_expression_is_what_it_says(act: Any, dtype: torch.dtype) -> None:
    """Norm, bias, activation, factor and addition in every combination, with weights repacked and not."""
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for bias, normed, added, scale, streamed in product(
        [False, True], [False, True], [False, True], [1.0, 0.25], [0, 1]
    ):
        ctx = context(dtype)
        with torch.no_grad():
            linear: Any = ctx.linear("m", 16, GATE, bias=bias, act=act)
            weights = {name: torch.randn(p.shape, dtype=dtype) for name, p in linear.named_parameters()}
            for name, param in linear.named_parameters():
                param.copy_(weights[name])
            linear.finalize()
            assert (linear.weight is None) == (dtype == torch.bfloat16 and REPACKS)
            norm = filled(RMSNorm(16, 1e-5, ctx), 2)
            x = torch.randn(5, 16, dtype=dtype)
            add = torch.randn(5, 12 if act else 24, dtype=dtype) if added else None
            given = Stream(x.clone()) if streamed else x.clone()
            stream = None if add is None else Stream(add.clone())
            got = linear(given, norm=norm if normed else None, add=stream, scale=scale)
            assert (got is stream) == added
            got = got.total() if isinstance(got, Stream) else got
            want = expression(x, weights, norm if normed else None, act, scale, add)
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * 8)


@pytest.mark.parametrize(("op", "wins"), [("linear", True), ("rms_norm", False)])
def test_a_set_that_claims_the_product_wins_over_repacking(op: str, wins: bool) -> None:
    """In bfloat16 on CPU, where the weight is repacked otherwise; a set of other operations changes nothing."""
    called: list[int] = []

    class Own(KernelSet):
        devices = frozenset({"cpu"})

        def serves(self, ask: Ask) -> Claim | str:
            return Claim(ask.rows) if ask.op == op else "no"

        def make(self, ask: Ask) -> Any:
            def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                called.append(len(x))
                return F.linear(x, weight, bias)

            return product

    sets = [LoadedSet("own", "own", Own(), True), LoadedSet("cpu", "cpu", CpuKernels(), False)]
    kernels = KernelBinder(sets, DeviceView("cpu"))
    ctx = replace(context(torch.bfloat16), kernels=kernels)
    with torch.no_grad():
        linear: Any = filled(ctx.linear("m", 16, GATE))
        linear(torch.randn(5, 16, dtype=torch.bfloat16))
    assert called == ([5] if wins else [])
    assert (linear.weight is None) == (not wins and REPACKS)


def expression(
    x: Tensor, weights: dict[str, Tensor], norm: Any, act: str | None, scale: float, add: Tensor | None
) -> Tensor:
    """The same in float32."""
    x = norm(x) if norm is not None else x
    bias = weights.get("bias")
    y = F.linear(x.float(), weights["weight"].float(), None if bias is None else bias.float())
    if act is not None:
        gate, up = y.chunk(2, dim=-1)
        kind = "tanh" if "tanh" in act else "none"
        y = (F.silu(gate) if act.startswith("silu") else F.gelu(gate, approximate=kind)) * up
    return y * scale + (0 if add is None else add.float())


def ranks(size: int) -> list[Parallel]:
    """As many ranks, which cannot add up."""
    return [Parallel(rank=rank, size=size, all_reduce=lambda x: x) for rank in range(size)]


def loaded(parallel: Parallel, parts: Any, full: Tensor, shard: Any) -> Tensor:
    """A rank's matrix after loading."""
    linear: Any = context(parallel=parallel).linear("m", full.shape[1], parts, shard=shard)
    start = 0
    with torch.no_grad():
        for part in parts:
            linear.place(Slot("weight", part.name), full[start : start + part.width])
            start += part.width
    return linear.weight.clone()  # type: ignore[no-any-return]


def test_ranks_have_slices_of_every_part() -> None:
    """By outputs, each part is divided by units; by inputs, columns are; without a cut every rank has all."""
    full = torch.arange(28.0 * 6).view(28, 6)
    parts = (Part("q", 16, 4), Part("k", 8, 4), Part("v", 4, 1))
    for rank, parallel in enumerate(ranks(2)):
        q, k, v = (
            full[8 * rank : 8 * rank + 8],
            full[16 + 4 * rank : 20 + 4 * rank],
            full[24 + 2 * rank : 26 + 2 * rank],
        )
        assert torch.equal(loaded(parallel, parts, full, "out"), torch.cat((q, k, v)))
        assert torch.equal(loaded(parallel, parts, full, "in"), full[:, 3 * rank : 3 * rank + 3])
        assert torch.equal(loaded(parallel, parts, full, None), full)


def test_ranks_share_units_of_which_there_are_too_few() -> None:
    """Two KV heads on four ranks: neighbours keep the same one."""
    full = torch.arange(8.0 * 3).view(8, 3)
    parts = (Part("k", 8, 4, 2),)
    got = [loaded(parallel, parts, full, "out") for parallel in ranks(4)]
    assert all(torch.equal(got[rank], full[4 * (rank // 2) : 4 * (rank // 2) + 4]) for rank in range(4))


@pytest.mark.parametrize(
    ("parts", "shard", "message"),
    [
        ((Part("k", 8, 4),), "out", r"m: 2 units of 4 rows of part 'k' cannot be divided among 3 ranks"),
        ((Part("k", 10, 4),), "out", r"part 'k' of 10 rows is not made of units of 4"),
        ((Part("k", 24, 4, 2),), "out", r"would have the same units of 4 rows"),
        ((Part("k", 8),), "in", r"m: 4 inputs cannot be divided among 3 ranks"),
        ((Part("gate", 3), Part("up", 6)), None, r"silu_and_mul takes two parts of one width, not \[3, 6\]"),
    ],
)
def test_a_cut_that_is_not_even_is_refused(parts: Any, shard: Any, message: str) -> None:
    """The error names the matrix, the part and the number of ranks."""
    act: Any = "silu_and_mul" if shard is None else None
    with pytest.raises(ModelError, match=message):
        context(parallel=ranks(3)[1]).linear("m", 4, parts, shard=shard, act=act)


def test_ranks_count_from_zero_and_can_add_up() -> None:
    """A rank that is none, and several without a way to add up, are refused."""
    for wrong in ({"rank": 2, "size": 2}, {"rank": -1}, {"size": 2}):
        with pytest.raises(ValueError, match="rank"):
            Parallel(**wrong)  # type: ignore[arg-type]


class Together:
    """Ranks that are threads of this process and add up tensors through a barrier."""

    def __init__(self, size: int) -> None:
        self.size, self.num = size, [0] * size
        self._barrier, self._shares = Barrier(size, timeout=60), [torch.empty(0)] * size

    def parallel(self, rank: int) -> Parallel:
        def all_reduce(share: Tensor) -> Tensor:
            self.num[rank] += 1
            self._shares[rank] = share
            self._barrier.wait()
            total = torch.stack(self._shares).sum(0)
            self._barrier.wait()
            return total

        return Parallel(rank=rank, size=self.size, all_reduce=all_reduce)


class RankEngine(TinyEngine):
    """A tiny engine over one rank's part of the model."""

    def __init__(self, plugin: Any, folder: Path, parallel: Parallel) -> None:
        super().__init__(plugin, folder)
        with torch.inference_mode():
            model = plugin.build(self.config, context(parallel=parallel))
            load_weights(model, plugin.weight_map(self.config), folder)
        self.model = model


@pytest.mark.parametrize(
    ("plugin", "size", "changes"),
    [
        (Llama, 2, {"attention_bias": True, "mlp_bias": True}),
        (Qwen2, 4, {}),
        (Qwen3, 4, {"tie_word_embeddings": True}),
    ],
)
def test_ranks_together_are_the_model(plugin: Any, size: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Logits of ranks equal those of one, with two sums for each layer, one for the embedding and one for the head."""
    folder = make_model(tmp_path, plugin.architectures[0], **changes)
    prompts = [[5, 7, 11, 13], [3, 4]]
    want = TinyEngine(plugin, folder).prefill_logits(prompts)
    together, got = Together(size), [[torch.empty(0)]] * size

    def run(rank: int) -> None:
        engine = RankEngine(plugin, folder, together.parallel(rank))
        engine.pool = local_pool(engine, size)
        engine.attention = ReferenceAttention(engine.config, engine.pool, CPU)
        got[rank] = engine.prefill_logits(prompts)

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for found in got:
        for mine, right in zip(found, want, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert together.num == [2 * read_config(folder)["num_hidden_layers"] + 2] * size


def local_pool(engine: TinyEngine, size: int) -> Any:
    """A KV pool for one rank's heads."""
    layers = [replace(spec, num_kv_heads=max(1, spec.num_kv_heads // size)) for spec in engine.config.layers]
    return KVCache(cache_groups(layers), engine.pool.sizes, engine.pool.page_size, torch.float32, CPU)


def test_shares_join_until_somebody_reads() -> None:
    """Two layers' shares of one stream are one sum; a norm that takes the stream adds it up."""
    sums: list[Tensor] = []

    def all_reduce(share: Tensor) -> Tensor:
        sums.append(share.clone())
        return share * 2

    parallel = Parallel(rank=0, size=2, all_reduce=all_reduce)
    stream = Stream(torch.ones(2, 4))
    summed = context(parallel=parallel).rank_sums(4)
    stream.plus_share(torch.full((2, 4), 3.0), summed).plus_share(torch.full((2, 4), 5.0), summed)
    assert not sums
    norm = filled(RMSNorm(4, 1e-6, context()))
    normed = norm(stream)
    assert len(sums) == 1
    assert torch.equal(stream.total(), torch.full((2, 4), 17.0))
    torch.testing.assert_close(normed, norm(torch.full((2, 4), 17.0)))
    stream.plus(torch.ones(2, 4))
    assert torch.equal(stream.total(), torch.full((2, 4), 18.0))
    assert len(sums) == 1
