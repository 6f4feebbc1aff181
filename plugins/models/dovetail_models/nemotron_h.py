"""Nemotron-H and Nemotron 3: layers of one part each, Mamba 2, attention without rotation, an MLP, or experts.

Neither MLPs nor experts have a gate; experts may work on a narrower projection of a token.

Weights: as `NemotronHForCausalLM` of transformers writes them. Those that predict further tokens (`mtp.`) are not used.
Source: arXiv:2504.03624.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import LayerSpec, ModelConfig, RoutedExperts
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, either, without_rope
from dovetail.sdk.layers.moe import Router
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.transformer import MLP, SelfAttention
from dovetail_models.experts import check_routing, needed
from dovetail_models.glm4_moe import sigmoid_routing
from dovetail_models.llama import DenseDecoder, Llama
from dovetail_models.mamba2 import Mamba2, MambaShape, mamba_rules

TYPES = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"},
}
"""What a layer is, by letter of the pattern, and by name in either version of transformers."""
UNUSED = r"mtp\..*"
UNREAD = (
    *("expand", "chunk_size", "time_step_max", "time_step_floor", "time_step_limit", "residual_in_fp32"),
    *("mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "n_shared_experts"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "attention_bias"),
)
"""Keys that transformers does not read either, or only to make fresh weights."""
AT, TO = r"(?:backbone|model)\.layers\.(\d+)\.", r"layers.\1."
MIXER, HERE = AT + r"mixer\.", TO + "part."
EXPERTS = MIXER + r"experts\."
RULES = (
    WeightRule(UNUSED, ""),
    WeightRule(r"(?:backbone|model)\.embeddings", "embed"),
    WeightRule(r"(?:backbone|model)\.norm_f", "norm"),
    WeightRule(AT + "norm", TO + "norm"),
    WeightRule(MIXER + "([qkv])_proj", HERE + "qkv", r"\2"),
    WeightRule(MIXER + "o_proj", HERE + "out"),
    WeightRule(MIXER + "(up|down)_proj", HERE + r"\2"),
    WeightRule(MIXER + "gate", HERE + "router"),
    WeightRule(EXPERTS + r"(\d+)\.up_proj", HERE + "experts.gate_up", "up", r"\2"),
    WeightRule(EXPERTS + r"(\d+)\.down_proj", HERE + "experts.down", expert=r"\2"),
    WeightRule(EXPERTS + "up_proj", HERE + "experts.gate_up"),
    WeightRule(EXPERTS + "down_proj", HERE + "experts.down"),
    WeightRule(MIXER + r"shared_experts\.(up|down)_proj", HERE + r"shared.\2"),
    WeightRule(MIXER + r"fc([12])_latent_proj", HERE + r"fc\2"),
    *mamba_rules(MIXER, HERE),
)


class NemotronExperts(nn.Module):
    """A router, experts without gates, and a shared one."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        extra, hidden = config.extra, config.hidden_size
        routing, width, bias = extra["routing"], extra["latent"] or hidden, extra["mlp_bias"]
        self.router = Router(routing, hidden, ctx)
        self.fc1 = ctx.linear("fc1", hidden, width, bias=bias) if extra["latent"] else None
        self.fc2 = ctx.linear("fc2", width, hidden, bias=bias) if extra["latent"] else None
        self.experts = ctx.experts("experts", routing.num, routing.top_k, width, extra["inner"], act="relu2")
        self.shared = MLP(config, ctx.at("shared"), bias=bias, inner=extra["shared_inner"])

    def forward(self, x: Stream, *, norm: nn.Module, add: Stream) -> Stream:
        """Return the stream with what they make of its norm added."""
        normed = norm(x)
        ids, shares = self.router(normed)
        if self.fc1 is None or self.fc2 is None:
            stream = self.experts(normed, ids, shares, add=add)
        else:
            stream = self.fc2(self.experts(self.fc1(normed), ids, shares), add=add)
        added: Stream = self.shared(normed, add=stream)
        return added


class NemotronLayer(nn.Module):
    """A norm, and one part that adds to the stream what it makes of it."""

    def __init__(self, config: ModelConfig, index: int, ctx: BuildContext) -> None:
        super().__init__()
        extra, at = config.extra, ctx.at("part")
        self.norm, self.kind = RMSNorm(config.hidden_size, config.norm_eps, ctx), extra["types"][index]
        made: dict[str, Callable[[], nn.Module]] = {
            "mamba": lambda: Mamba2(config, index, at, extra["mamba"]),
            "attention": lambda: SelfAttention(config, index, at),
            "mlp": lambda: MLP(config, at, bias=extra["mlp_bias"]),
            "moe": lambda: NemotronExperts(config, at),
        }
        self.part: nn.Module = made[self.kind]()

    def forward(self, stream: Stream, given: Mapping[str, Any], batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added; `given` is what the kinds take beside it."""
        more = (given[self.kind], batch) if self.kind in given else ()
        added: Stream = self.part(stream, *more, norm=self.norm, add=stream)
        return added


class NemotronDecoder(DenseDecoder):
    """Such layers."""

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return NemotronLayer(config, index, ctx)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        stream, rope = Stream(self.embed(ids)), self.rotary(batch.positions)[0]  # nothing is rotated in any layer
        mixer = next((layer.part for layer in self.layers if isinstance(layer.part, Mamba2)), None)
        given = {"mamba": None if mixer is None else mixer.pieces(batch), "attention": rope}
        for layer in self.layers:
            stream = layer(stream, given, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class NemotronH(Llama):
    """Serves `NemotronHForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("NemotronHForCausalLM",)
    batch_invariant = True
    decoder = NemotronDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        types = layer_kinds(hf)
        for key in UNREAD:
            hf.get(key)
        if (act := hf.get("mamba_hidden_act", "silu")) != "silu":
            raise ModelError(f"config.json: mamba_hidden_act is {act!r}; possible: silu")
        changed = {
            "num_hidden_layers": len(types),
            "layer_types": None,
            "hidden_act": hf.get("mlp_hidden_act") or "relu2",
            "head_dim": hf.get("head_dim") or hf.get("attention_head_dim") or 128,
            "intermediate_size": hf.get("intermediate_size") or 21504,
        }
        given: Any = ChainMap(changed, cast("MutableMapping[str, Any]", hf))
        config = dense_config(
            given, has_windows=False, norm_eps="layer_norm_epsilon", types=types, mlp_bias=bool(hf.get("mlp_bias"))
        )
        # transformers never ties this family's head, whatever the file says.
        config = replace(config, tie_word_embeddings=False)
        return _with_parts(without_rope(config, [True] * len(types)), hf)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, WeightRule("lm_head", "lm_head"))


def layer_kinds(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what each layer is.

    Raises:
        ModelError: It is not said, or one is of another type.
    """
    names = either(hf, "layers_block_type", "layer_types", None)
    pattern, num = hf.get("hybrid_override_pattern"), hf.get("num_hidden_layers")
    given = list(names or pattern or ())
    if not given or not set(given) <= TYPES.keys():
        raise ModelError(
            f"config.json: layers_block_type is {names or pattern!r}; possible: a list of mamba, attention, mlp and moe"
        )
    if names is None and num is not None and int(num) != len(given):
        raise ModelError(f"config.json: hybrid_override_pattern has {len(given)} letters for {num} layers")
    return tuple(TYPES[one] for one in given)


def _shape(hf: Mapping[str, Any]) -> MambaShape:
    names = {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups"}
    names |= {"mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
    given = {name: hf.get(theirs) for name, theirs in names.items()} | {"mamba_proj_bias": hf.get("use_bias")}
    given["mamba_n_groups"] = given["mamba_n_groups"] or 8
    inner = int(given["mamba_n_heads"] or 128) * int(given["mamba_d_head"] or 64)
    low = hf.get("time_step_min")
    shape = MambaShape.of(given, inner=inner, dim=128)
    return shape._replace(low=0.001 if low is None else float(low), high=math.inf)


def _with_parts(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Add Mamba 2 and experts, leave out specs of layers that look at one token, and count the weights."""
    types, hidden, shape, extra = config.extra["types"], config.hidden_size, _shape(hf), dict(config.extra)
    by_type: dict[str, Callable[[int], LayerSpec]] = {
        "mamba": shape.spec,
        "attention": lambda index: config.layers[index],
    }
    specs = tuple(by_type[kind](index) for index, kind in enumerate(types) if kind in by_type)
    extra["mamba"] = shape
    total = dense_numel(replace(config, layers=specs, num_layers=0)) + len(types) * hidden
    total += types.count("mamba") * shape.numel(hidden) + types.count("mlp") * 2 * hidden * config.intermediate_size
    config = replace(config, layers=specs, num_params=total, not_loaded=UNUSED, extra=extra)
    return _with_experts(config, hf, types.count("moe"))


def _with_experts(config: ModelConfig, hf: Mapping[str, Any], num: int) -> ModelConfig:
    sizes = [int(hf.get(name) or 0) for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")]
    latent, hidden = int(hf.get("moe_latent_size") or 0), config.hidden_size
    if not num:
        for name in ("num_experts_per_tok", "n_routed_experts", "routed_scaling_factor", "norm_topk_prob"):
            hf.get(name)
        return config
    if config.hidden_act != "relu2":
        raise ModelError(f"config.json: mlp_hidden_act is {config.hidden_act!r}; possible with experts: relu2")
    inner, shared = (size or needed(hf, "moe_intermediate_size") for size in sizes)
    routing, width = sigmoid_routing(hf), latent or hidden
    check_routing(routing)
    routed = num * routing.num * 2 * width * inner
    others = num * (2 * hidden * shared + routing.num * hidden + 2 * hidden * latent)
    extra = {"routing": routing, "inner": inner, "shared_inner": shared, "latent": latent}
    return replace(
        config,
        num_params=dense_numel(config) + routed + others,
        experts=RoutedExperts(routing.num, routing.top_k, routed),
        extra={**config.extra, **extra},
    )
