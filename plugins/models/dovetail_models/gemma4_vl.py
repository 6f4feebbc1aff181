"""Gemma 4 with its vision tower: 2-D rotation, norms around attention and MLP, patches pooled to a varying number.

Where the configuration says so, tokens of an image see the whole image in the decoder's layers with a window. Weights:
as `Gemma4ForConditionalGeneration` of transformers writes them. Source: the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig, VisionPart
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import CausalLM, WeightRule
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.tower import halves_rope, in_pieces, tower_context
from dovetail.sdk.layers.transformer import ACTIVATIONS
from dovetail_models.gemma4 import Gemma4Decoder, unit_rms
from dovetail_models.gemma4_images import SOFT_TOKENS
from dovetail_models.seeing import SeeingDecoder, SeeingModel, axial_parameters, checked_grid, number
from dovetail_models.text_part import NOT_TEXT, family_of

TOWER = r"(?:model\.)?vision_tower\."
BLOCK = TOWER + r"encoder\.layers\.(\d+)\."
OWN = r"tower.layers.\1."
TOWER_RULES = (
    WeightRule(TOWER + r"patch_embedder\.input_proj", "tower.patches"),
    WeightRule(TOWER + "patch_embedder", "tower.places"),
    WeightRule(BLOCK + r"self_attn\.([qk])_norm", OWN + r"\2_norm"),
    WeightRule(BLOCK + r"self_attn\.([qkv])_proj", OWN + r"\2_proj", steps=("flatten",)),  # bounds have no axes
    WeightRule(BLOCK + r"self_attn\.o_proj", OWN + "out", steps=("flatten",)),
    WeightRule(BLOCK + r"mlp\.(gate|up|down)_proj", OWN + r"\2", steps=("flatten",)),
    WeightRule(BLOCK + "input_layernorm", OWN + "attention_norm"),
    WeightRule(BLOCK + "post_attention_layernorm", OWN + "attention_out_norm"),
    WeightRule(BLOCK + "pre_feedforward_layernorm", OWN + "mlp_norm"),
    WeightRule(BLOCK + "post_feedforward_layernorm", OWN + "mlp_out_norm"),
    WeightRule(TOWER + "std", "tower.standard"),
    WeightRule(r"(?:model\.)?embed_vision\.embedding_projection", "tower.projection"),
    WeightRule(r"(?:model\.)?(?:audio_tower|embed_audio)\..*", ""),
)
UNUSED = r"(?:model\.)?(?:audio_tower|embed_audio)\..*"
NUMBERS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12},
    **{"num_key_value_heads": 12, "head_dim": 64, "pooling_kernel_size": 3, "patch_size": 16},
    "position_embedding_size": 10240,
}
"""What transformers takes where `vision_config` says nothing."""
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(Layer):
    """A product whose input and output are kept within bounds, if it has some."""

    suffixes: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": (".linear.weight",)}

    def __init__(self, width: int, out: int, ctx: BuildContext, *, is_clipped: bool) -> None:
        super().__init__()
        self.weight = self.empty(out, width, device=ctx.device, dtype=ctx.dtype)
        self._is_clipped = is_clipped
        for name in BOUNDS if is_clipped else ():
            self.register_parameter(name, self.empty(1, device=ctx.device, dtype=ctx.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, width]` to `[N, out]`."""
        if not self._is_clipped:
            return F.linear(x, self.weight)
        low, high, least, most = (getattr(self, name) for name in BOUNDS)
        return F.linear(x.clamp(low, high), self.weight).clamp(least, most)


class TwoPlaces(Layer):
    """Learned positions of columns and of rows `[2, P, H]`."""

    suffixes: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": (".position_embedding_table",)}

    def __init__(self, num: int, width: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = self.empty(2, num, width, device=ctx.device, dtype=ctx.dtype)

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return what is added to the patches at `rows`, `columns` `[N]`, `[N, H]`."""
        return self.weight[0, columns] + self.weight[1, rows]


class Standard(Layer):
    """Subtracts and multiplies, in float32."""

    suffixes: ClassVar[Mapping[str, tuple[str, ...]]] = {"bias": ("_bias",), "scale": ("_scale",)}

    def __init__(self, width: int, ctx: BuildContext) -> None:
        super().__init__()
        self.bias, self.scale = (self.empty(width, device=ctx.device, dtype=ctx.dtype) for _ in "bs")

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, width]` to the same."""
        return (x - self.bias.float()) * self.scale.float()


class Gemma4TowerLayer(nn.Module):
    """Attention and MLP between two norms each, added to what they read."""

    def __init__(self, facts: Mapping[str, Any], ctx: BuildContext) -> None:
        super().__init__()
        width, dim, inner, eps = (facts[key] for key in ("hidden_size", "head_dim", "intermediate_size", "eps"))
        heads, groups = facts["num_attention_heads"] * dim, facts["num_key_value_heads"] * dim
        self._dim, self._eps, self._act = dim, eps, ACTIVATIONS[facts["hidden_act"]]
        self._rotate = ctx.operation("norm_rotate", D=dim // 2)

        def linear(out_of: int, to: int) -> ClippedLinear:
            return ClippedLinear(out_of, to, ctx, is_clipped=facts["is_clipped"])

        self.q_proj, self.k_proj, self.v_proj = linear(width, heads), linear(width, groups), linear(width, groups)
        self.q_norm, self.k_norm = RMSNorm(dim, eps, ctx), RMSNorm(dim, eps, ctx)
        self.out = linear(heads, width)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)
        self.attention_norm, self.attention_out_norm = RMSNorm(width, eps, ctx), RMSNorm(width, eps, ctx)
        self.mlp_norm, self.mlp_out_norm = RMSNorm(width, eps, ctx), RMSNorm(width, eps, ctx)

    def forward(self, x: Tensor, ropes: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Map `[N, H]` to `[N, H]`; `ropes` are cosine and sine `[N, 1, D / 2]` of each half of a head."""
        x = x + self.attention_out_norm(self._attend(self.attention_norm(x), ropes))
        return in_pieces(self._fed, x)

    def _fed(self, x: Tensor) -> Tensor:
        y = self.mlp_norm(x)
        found: Tensor = x + self.mlp_out_norm(self.down(self._act(self.gate(y)) * self.up(y)))
        return found

    def _attend(self, x: Tensor, ropes: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        turned = []
        for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)):
            heads = norm(project(x).view(-1, self._dim)).view(len(x), -1, self._dim)
            halves = zip(heads.chunk(2, -1), ropes, strict=True)
            turned.append(torch.cat([self._rotate(half, None, 0.0, *rope) for half, rope in halves], -1))
        values = unit_rms(self.v_proj(x).view(len(x), -1, self._dim), self._eps)
        q, k, v = (each.transpose(0, 1)[None] for each in (*turned, values))
        found = F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)
        attended: Tensor = self.out(found[0].transpose(0, 1).flatten(1))
        return attended


class Gemma4Tower(nn.Module):
    """The vision tower, with pooling and projection to the decoder's width."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        facts: Mapping[str, Any] = config.extra["tower"]
        width, dim = facts["hidden_size"], facts["head_dim"]
        self._pool, self._eps, self._most = facts["pooling_kernel_size"], facts["eps"], facts["position_embedding_size"]
        self._root, self._theta, self._dim = width**0.5, facts["theta"], dim
        self.patches = ctx.linear("patches", 3 * facts["patch_size"] ** 2, width)
        self.places = TwoPlaces(self._most, width, ctx)
        self.layers = nn.ModuleList(
            Gemma4TowerLayer(facts, ctx.at(f"layers.{index}")) for index in range(facts["num_hidden_layers"])
        )
        self.standard = Standard(width, ctx) if facts["standardizes"] else None
        self.projection = ctx.linear("projection", width, config.hidden_size)
        self._dtype = ctx.dtype

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Map an image's patches `[N, 3 * patch * patch]`, row by row, to embeddings `[1, N / pool², hidden]`."""
        high, wide = checked_grid(patches, grid)
        if max(high, wide) > self._most or high % self._pool or wide % self._pool:
            raise ValueError(f"an image has {high} x {wide} patches; the tower has {self._most} positions")
        rows = torch.arange(high, device=patches.device)[:, None].expand(high, wide).flatten()
        columns = torch.arange(wide, device=patches.device).expand(high, wide).flatten()
        x = self.patches((2 * (patches.float() / 255 - 0.5)).to(self._dtype)) + self.places(rows, columns)
        ropes = [self._rope(columns), self._rope(rows)]
        for layer in self.layers:
            x = layer(x, ropes)
        shape = (high // self._pool, self._pool, wide // self._pool, self._pool, -1)
        pooled = x.float().view(shape).mean((1, 3)).to(x.dtype).float().flatten(0, 1) * self._root
        if self.standard is not None:
            pooled = self.standard(pooled)
        found: Tensor = self.projection(unit_rms(pooled.to(x.dtype), self._eps))
        return found[None]

    def _rope(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[N, 1, D / 2]` of half a head, by places `[N]`."""
        half = self._dim // 2
        freqs = 1.0 / (self._theta ** (torch.arange(0, half, 2, device=places.device).float() / half))
        return halves_rope(places[:, None] * freqs)


class SeeingGemma4(Gemma4Decoder, SeeingDecoder):
    """The decoder. An image's tokens are the padding token for its tables."""

    def __init__(self, config: ModelConfig, vision: VisionPart, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self._image, self._padding = vision.embed_id, int(config.extra["padding"])

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        ids = ids.masked_fill(ids == self._image, self._padding)  # also of one that was sampled, as transformers has it
        embedded = self.embed(ids)
        if (images := batch.images) is not None:
            embedded = embedded.index_copy(0, images.at, images.rows[0])
        return self.run(embedded, self.inputs(ids, embedded), batch)


class Gemma4_VL(SeeingModel):
    """Serves `Gemma4ForConditionalGeneration`."""

    architectures: ClassVar[Sequence[str]] = ("Gemma4ForConditionalGeneration",)
    batch_invariant = True
    tower = Gemma4Tower
    tower_rules = TOWER_RULES

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config, (_, text) = super(SeeingModel, cls).config_from_hf(hf), family_of(hf)
        facts = cls.tower_facts(hf.get("vision_config") or {})
        padding = int(text.get("pad_token_id") or 0)
        if not 0 <= padding < config.vocab_size:
            raise ModelError(f"config.json: pad_token_id {padding}: possible: 0 to {config.vocab_size - 1}")
        windows = [spec.sliding_window for spec in config.layers if spec.sliding_window is not None]
        has_spans = text.get("use_bidirectional_attention") == "vision" and bool(windows)
        seen = VisionPart(
            embed_id=number(hf, "image_token_id", 258880),
            patches_per_token=facts["pooling_kernel_size"] ** 2,
            width=facts["hidden_size"],
            tensors=NOT_TEXT,
            **cls.tower_numbers(facts, config.hidden_size, facts["pooling_kernel_size"] ** 2),
            span_tokens=min(*windows, SOFT_TOKENS[-1]) if has_spans else 0,
        )
        layers = tuple(replace(s, spans=has_spans and s.sliding_window is not None) for s in config.layers)
        extra = {**config.extra, "tower": facts, "padding": padding}
        unused = "|".join(filter(None, (UNUSED, _of_text(config.not_loaded))))
        return replace(config, vision=seen, layers=layers, not_loaded=unused, extra=extra)

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        if config.vision is None:
            return super().build(config, ctx)
        made = SeeingGemma4(config, config.vision, ctx)
        made.tower = cls.tower(config, tower_context(ctx, "tower"))
        return made

    @classmethod
    def tower_numbers(cls, facts: Mapping[str, Any], hidden: int, merged: int) -> dict[str, int]:
        """See `SeeingModel`: heads may be wider than the tower, and the MLP has gate and up by themselves."""
        heads = facts["num_attention_heads"] * facts["head_dim"]
        found = super().tower_numbers(facts, hidden, merged)
        own = max(found["patch_numbers"], 4 * facts["hidden_size"] + 14 * heads)
        return {**found, "patch_numbers": own}

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """See `SeeingModel`."""
        facts: dict[str, Any] = {key: number(vision, key, default) for key, default in NUMBERS.items()}
        if facts["head_dim"] % 4 or facts["num_attention_heads"] % facts["num_key_value_heads"]:
            raise ModelError(
                f"config.json: vision_config: head_dim {facts['head_dim']} must be a multiple of 4, and "
                f"num_attention_heads {facts['num_attention_heads']} one of num_key_value_heads"
            )
        if vision.get("attention_bias"):
            raise ModelError("config.json: vision_config: attention_bias True is not supported; possible: False")
        act = str(vision.get("hidden_activation") or "gelu_pytorch_tanh")
        if act not in ACTIVATIONS:
            raise ModelError(
                f"config.json: vision_config: hidden_activation {act!r}: possible: {', '.join(ACTIVATIONS)}"
            )
        return {
            **facts,
            "eps": float(vision.get("rms_norm_eps") or 1e-6),
            "theta": float(axial_parameters(vision).get("rope_theta") or 100.0),
            "hidden_act": act,
            "is_clipped": bool(vision.get("use_clipped_linears")),
            "standardizes": bool(vision.get("standardize")),
        }


def _of_text(not_loaded: str) -> str:
    """Return what a text part's pattern has beside the tensors of other inputs, which a tower wants."""
    return not_loaded.removeprefix(NOT_TEXT).removeprefix("|")
