"""Mamba 2 by itself: no layer attends, so nothing but states is kept of a request.

Weights: as `Mamba2ForCausalLM` of transformers writes them. Source: arXiv:2405.21060. The residual stream is in the
model's dtype, whatever `residual_in_fp32` says.
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
from dovetail_models.experts import needed
from dovetail_models.llama import DenseDecoder, Llama
from dovetail_models.mamba2 import MambaShape, mamba_rules
from dovetail_models.nemotron_h import NemotronLayer

CONTEXT = 131072
"""Tokens of the longest request where the config does not say: a state has no last position."""
UNREAD = (
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "residual_in_fp32", "chunk_size"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm", "layer_types"),
)
"""Keys that transformers does not read, or only to make fresh weights; of `residual_in_fp32` see above."""
LAYER = r"backbone\.layers\.(\d+)\."
RULES = (
    *mamba_rules(LAYER + r"mixer\.", r"layers.\1.part."),
    WeightRule(r"backbone\.embeddings?", "embed"),
    WeightRule(LAYER + "norm", r"layers.\1.norm"),
    WeightRule(r"backbone\.norm_f", "norm"),
)


class StateDecoder(DenseDecoder):
    """Layers of one norm and one mixer."""

    layers: nn.ModuleList

    def layer(self, config: ModelConfig, index: int, ctx: BuildContext) -> nn.Module:
        return NemotronLayer(config, index, ctx)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        first: Any = self.layers[0]
        stream, given = Stream(self.embed(ids)), {"mamba": first.part.pieces(batch)}
        for layer in self.layers:
            stream = layer(stream, given, batch)
        hidden: Tensor = self.norm(stream)
        return hidden


class Mamba2Alone(Llama):
    """Serves `Mamba2ForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("Mamba2ForCausalLM",)
    batch_invariant = True
    decoder = StateDecoder

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        for key in UNREAD:
            hf.get(key)
        if (act := either(hf, "hidden_act", "hidden_activation", "silu")) != "silu":
            raise ModelError(f"config.json: hidden_act is {act!r}; possible: silu")
        num, hidden = needed(hf, "num_hidden_layers"), needed(hf, "hidden_size")
        changed = {"num_attention_heads": 1, "head_dim": 1, "intermediate_size": 0, "layer_types": None}
        given: Any = ChainMap(changed, cast("MutableMapping[str, Any]", hf))
        given = with_missing(given, max_position_embeddings=CONTEXT)
        config = dense_config(given, has_windows=False, norm_eps="layer_norm_epsilon", types=("mamba",) * num)
        shape = cls._shape(hf, hidden)
        config = replace(without_rope(config, [True] * num), layers=tuple(map(shape.spec, range(num))))
        # Of what a dense layer has, one norm is there.
        total = dense_numel(replace(config, num_layers=0)) + num * (shape.numel(hidden) + hidden)
        return replace(config, num_params=total, extra={**config.extra, "mamba": shape})

    @staticmethod
    def _shape(hf: Mapping[str, Any], hidden: int) -> MambaShape:
        names = {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups"}
        names |= {"mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
        names |= {"mamba_proj_bias": "use_bias", "time_step_limit": "time_step_limit"}
        given = {name: hf.get(theirs) for name, theirs in names.items()}
        given["mamba_n_groups"] = given["mamba_n_groups"] or 8
        return MambaShape.of(given, inner=int((hf.get("expand") or 2) * hidden), dim=128)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return (*RULES, *super().weight_map(config))
