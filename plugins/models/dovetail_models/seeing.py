"""What models that see share: a decoder whose embeddings at images come from a tower, and their configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.contracts.attention import ForwardBatch
from dovetail.contracts.config import ModelConfig, VisionPart
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, Stream
from dovetail.contracts.model import CausalLM, WeightRule
from dovetail.sdk.layers.tower import PIECE, tower_context
from dovetail.sdk.layers.transformer import ACTIVATIONS
from dovetail_models.llama import DenseDecoder
from dovetail_models.text_part import NOT_TEXT, TextPart, family_of

PLACES = 64
"""Numbers of rows, columns and windows of a patch: sixteen of eight bytes."""
USUAL = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}


class SeeingDecoder(DenseDecoder):
    """A family's decoder with a tower; made by `seeing`."""

    tower: nn.Module

    def encode(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """See `VisionTower`."""
        found: Tensor = self.tower(arrays["patches"], arrays["grid"].tolist())
        return found

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        embedded, images = self.embed(ids), batch.images
        num_added = 0
        if images is not None:
            embedded, num_added = embedded.index_copy(0, images.at, images.rows[0]), len(images.rows) - 1
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        stream = Stream(embedded)
        each = self.given(self.rotary(positions), batch)
        for index, (layer, given) in enumerate(zip(self.layers, each, strict=True)):
            stream = layer(stream, given, batch)
            if images is not None and index < num_added:
                stream = Stream(stream.total().index_add(0, images.at, images.rows[index + 1]))
        hidden: Tensor = self.norm(stream)
        return hidden


def seeing(decoder: type[DenseDecoder]) -> type[SeeingDecoder]:
    """Return a family's decoder as one that sees."""
    return type(f"Seeing{decoder.__name__}", (SeeingDecoder, decoder), {})


class SeeingModel(TextPart):
    """Serves a family with its vision tower; without an image processor its text part alone.

    Attributes:
        tower: Made of the configuration, whose `extra["tower"]` has what `tower_facts` returned, and a context.
        tower_rules: Where the tower's weights go.
        layer_widths: Numbers that a layer holds of a patch while it attends, as a multiple of the tower's width: the
            hidden state, its norm, queries, keys, values, what attention finds, and copies of these.
        inner_key: What in the tower's facts is the inner width of a layer's MLP.
        sections: Of the rotary embedding, where the configuration says nothing; empty: it has none.
        mixes_sections: See `RopeConfig`.
    """

    tower: ClassVar[type[nn.Module]]
    tower_rules: ClassVar[Sequence[WeightRule]]
    layer_widths: ClassVar[int] = 10
    inner_key: ClassVar[str] = "intermediate_size"
    sections: ClassVar[tuple[int, ...]] = ()
    mixes_sections: ClassVar[bool] = False

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Translate `vision_config`.

        Raises:
            ModelError: A value that the tower cannot serve.
        """
        raise NotImplementedError

    @classmethod
    def seen_facts(cls, hf: Mapping[str, Any]) -> dict[str, Any] | None:
        """Translate what a configuration says of the tower; None: it has another one, and its text part is served.

        Raises:
            ModelError: A value that the tower cannot serve.
        """
        return cls.tower_facts(hf.get("vision_config") or {})

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config, (_, text) = super().config_from_hf(hf), family_of(hf)
        vision = hf.get("vision_config") or {}
        facts = cls.seen_facts(hf)
        if facts is None:
            return config
        for key in ("in_channels", "in_chans", "num_channels"):
            if vision.get(key, 3) != 3:
                raise ModelError(f"config.json: vision_config: {key} {vision[key]!r}: possible: 3")
        rope = config.rope
        if cls.sections:
            given = text.get("rope_scaling") or text.get("rope_parameters") or {}
            sections = tuple(given.get("mrope_section") or cls.sections)
            rope = replace(rope, sections=sections, mixes_sections=cls.mixes_sections)
        seen = VisionPart(
            embed_id=facts["embed_id"] if "embed_id" in facts else number(hf, "image_token_id", 151655),
            patches_per_token=facts["spatial_merge_size"] ** 2,
            width=facts["hidden_size"],
            tensors=NOT_TEXT,
            num_added=len(facts.get("added", ())),
            **cls.tower_numbers(facts, config.hidden_size, facts["spatial_merge_size"] ** 2),
        )
        return replace(config, vision=seen, rope=rope, not_loaded="", extra={**config.extra, "tower": facts})

    @classmethod
    def tower_numbers(cls, facts: Mapping[str, Any], hidden: int, merged: int) -> dict[str, int]:
        """Return what the tower holds, as `VisionPart` has it, for a decoder of that width and blocks of patches.

        Of a patch the most of three: pixels in float32, a layer with tables of rotation and places, merger and
        projector.
        """
        width, pixels = facts["hidden_size"], 3 * facts["patch_size"] ** 2
        heads = facts.get("num_heads") or facts["num_attention_heads"]
        output = -(-hidden * (1 + len(facts.get("added", ()))) // merged)
        layers = cls.layer_widths * width + 4 * width // heads + PLACES + output
        own = max(8 * pixels + 2 * width, layers, 5 * width + 4 * output) + pixels
        piece = max(6 * width, 4 * facts[cls.inner_key] - 5 * width)  # rotation in float32, or the MLP
        return {"patch_numbers": own, "piece_numbers": piece, "piece_patches": PIECE}

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        if config.vision is None:
            return super().build(config, ctx)
        made = seeing(config.extra["family"].decoder)(config, ctx)
        made.tower = cls.tower(config, tower_context(ctx, "tower"))
        return made

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        rules = super().weight_map(config)
        return rules if config.vision is None else (*cls.tower_rules, *rules)


class Projector(nn.Module):
    """Makes embeddings of the decoder out of hidden states of the tower."""

    def __init__(self, width: int, hidden: int, act: str, ctx: BuildContext, *, bias: bool = True) -> None:
        super().__init__()
        if act not in ACTIVATIONS:
            raise ModelError(f"config.json: projector_hidden_act {act!r}: possible: {', '.join(ACTIVATIONS)}")
        self._act = ACTIVATIONS[act]
        self.up = ctx.linear("up", width, hidden, bias=bias)
        self.down = ctx.linear("down", hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, width]` to `[N, hidden]`."""
        return self.down(self._act(self.up(x)))


def check_value(given: Mapping[str, Any], key: str, default: Any, value: Any) -> None:
    """Refuse another value of a key than the one that is served.

    Raises:
        ModelError: It has another one, or it has none and `default` is another one.
    """
    if (found := given.get(key, default)) != value:
        raise ModelError(f"config.json: {key} {found!r} of a model that sees is not supported; possible: {value!r}")


def numbers(vision: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    """Return whole numbers of `vision_config`, with defaults, and what all towers of this kind have beside them.

    Layers and heads go by their usual names (`num_hidden_layers`, `num_attention_heads`) or those of Qwen's models.

    Raises:
        ModelError: One is none, or heads cannot be rotated by row and column.
    """
    named = {key: USUAL[key] if USUAL.get(key) in vision else key for key in defaults}
    found: dict[str, Any] = {key: number(vision, named[key], value) for key, value in defaults.items()}
    if found["hidden_size"] % (4 * found["num_heads"]):
        raise ModelError(
            f"config.json: vision_config: hidden_size {found['hidden_size']} of {found['num_heads']} heads: a head "
            "must have a multiple of four numbers"
        )
    rope = axial_parameters(vision)
    return {**found, "theta": float(rope.get("rope_theta") or vision.get("rope_theta") or 10000.0)}


def axial_parameters(vision: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_parameters` of `vision_config`; published files call a tower's rotation `default`, too.

    Raises:
        ModelError: It rotates otherwise than by row and column.
    """
    rope: Mapping[str, Any] = vision.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    if kind not in ("axial", "default"):
        raise ModelError(
            f"config.json: vision_config: rope_type {kind!r} is not supported; possible: 'axial', and 'default' for it"
        )
    return rope


def number(given: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of a configuration.

    Raises:
        ModelError: It is none from 1 on.
    """
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} {value!r} of a model that sees: expected a whole number from 1 on")
    return value


def checked_grid(patches: Tensor, grid: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of an image's patches.

    Raises:
        ValueError: It has another number of patches, or frames.
    """
    frames, high, wide = grid
    if frames != 1 or len(patches) != high * wide:
        raise ValueError(f"an image has {len(patches)} patches, and its grid is {list(grid)}")
    return high, wide
