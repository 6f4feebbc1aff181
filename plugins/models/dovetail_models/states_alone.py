"""Mamba 2, Mamba and Falcon-Mamba: no layer attends, so nothing but states is kept of a request.

Weights: as `Mamba2ForCausalLM`, `MambaForCausalLM` and `FalconMambaForCausalLM` of transformers write them. Source:
arXiv:2405.21060, arXiv:2312.00752, arXiv:2410.05355. The residual stream is in the model's dtype, whatever
`residual_in_fp32` says.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import WeightRule
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import dense_config, either, with_missing, without_rope
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.pieces import Pieces
from dovetail_models.experts import needed
from dovetail_models.llama import DenseDecoder, Llama
from dovetail_models.mamba1 import ScanShape, SelectiveScan, scan_rules
from dovetail_models.mamba2 import Mamba2, MambaShape, mamba_rules

CONTEXT = 131072
"""Tokens of the longest request where the config does not say: a state has no last position."""
UNREAD = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme"),
    *("residual_in_fp32", "chunk_size", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"),
    *("time_step_rank", "rms_norm", "d_inner", "d_model", "ssm_cfg", "n_layer", "fused_add_norm"),
)
"""Keys that transformers reads only to make fresh weights, or not at all; of `residual_in_fp32` see above."""
LAYER, MIXER, HERE = r"backbone\.layers\.(\d+)\.", r"backbone\.layers\.(\d+)\.mixer\.", r"layers.\1.mixer."
RULES = (
    WeightRule(r"backbone\.embeddings?", "embed"),
    WeightRule(LAYER + "norm", r"layers.\1.norm"),
    WeightRule(r"backbone\.norm_f", "norm"),
)
SCAN_KEYS = ("state_size", "time_step_rank", "conv_kernel", "use_conv_bias", "use_bias")


class StateLayer(nn.Module):
    """A norm, and a mixer that adds to the stream what it makes of it."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(config.hidden_size, config.norm_eps, ctx), mixer

    def forward(self, stream: Stream, pieces: Pieces | None, batch: ForwardBatch) -> Stream:
        """Return the residual stream with this layer's part added."""
        added: Stream = self.mixer(stream, pieces, batch, norm=self.norm, add=stream)
        return added


class StateDecoder(DenseDecoder):
    """Such layers."""

    layers: nn.ModuleList

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        shape = config.extra["mixer"]
        mixer = Mamba2 if isinstance(shape, MambaShape) else SelectiveScan
        return StateLayer(config, ctx, mixer(config, index, ctx.at("mixer"), shape))

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        first: Any = self.layers[0]
        stream, pieces = Stream(self.embed(ids)), first.mixer.pieces(batch)
        for layer in self.layers:
            stream = layer(stream, pieces, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


def states_config(hf: Mapping[str, Any], shape: MambaShape | ScanShape, *, tied: bool = False) -> ModelConfig:
    """Translate the config of a model whose layers are such mixers; `tied` is what it means if it does not say.

    Raises:
        ModelError: A needed key is missing, or the activation is another one.
    """
    for key in UNREAD:
        hf.get(key)
    if (act := either(hf, "hidden_act", "hidden_activation", "silu")) != "silu":
        raise ModelError(f"config.json: hidden_act is {act!r}; possible: silu")
    num = needed(hf, "num_hidden_layers")
    inner = shape.inner if isinstance(shape, MambaShape) else shape.channels
    changed = {"num_attention_heads": 1, "head_dim": 1, "intermediate_size": inner, "layer_types": None}
    given: Any = ChainMap(changed, cast("MutableMapping[str, Any]", hf))
    given = with_missing(given, max_position_embeddings=CONTEXT, tie_word_embeddings=tied)
    config = dense_config(given, has_windows=False, norm_eps="layer_norm_epsilon", mixer=shape)
    config = replace(without_rope(config, [True] * num), layers=tuple(map(shape.spec, range(num))))
    # Of what a dense layer has, one norm is there.
    total = dense_numel(replace(config, num_layers=0)) + num * (shape.numel(config.hidden_size) + config.hidden_size)
    return replace(config, num_params=total)


class Mamba2Alone(Llama):
    """Serves `Mamba2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Mamba2ForCausalLM",)
    batch_invariant = True
    decoder = StateDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        names = {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups"}
        names |= {"mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
        names |= {"mamba_proj_bias": "use_bias", "time_step_limit": "time_step_limit"}
        given = {name: hf.get(theirs) for name, theirs in names.items()}
        given["mamba_n_groups"] = given["mamba_n_groups"] or 8
        inner = int((hf.get("expand") or 2) * needed(hf, "hidden_size"))
        return states_config(hf, MambaShape.of(given, inner=inner, dim=128))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*mamba_rules(MIXER, HERE), *RULES, *super().weight_map(config))


class Mamba1Alone(Llama):
    """Serves `MambaForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("MambaForCausalLM",)
    batch_invariant = True
    decoder = StateDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return states_config(hf, cls.shape(hf), tied=True)

    @classmethod
    def shape(cls, hf: Mapping[str, Any]) -> ScanShape:
        """Read the widths of its layers; what the config says of the channels holds, not what follows from others."""
        shape, inner = (
            ScanShape.of(hf, needed(hf, "hidden_size"), prefix="", names=SCAN_KEYS),
            hf.get("intermediate_size"),
        )
        return shape if inner is None else shape._replace(channels=int(inner))

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*scan_rules(MIXER, HERE), *RULES, *super().weight_map(config))


class FalconMamba(Mamba1Alone):
    """Serves `FalconMambaForCausalLM`: what a token selects is normed."""

    architectures: ClassVar[Sequence[str]] = ("FalconMambaForCausalLM",)
    batch_invariant = True

    @classmethod
    def shape(cls, hf: Mapping[str, Any]) -> ScanShape:
        eps = hf.get("mixer_rms_eps")
        return super().shape(hf)._replace(norm="plain", norm_eps=1e-6 if eps is None else float(eps))
