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
from dovetail.sdk.layers.tower import tower_context
from dovetail_models.llama import DenseDecoder
from dovetail_models.text_part import NOT_TEXT, TextPart, family_of


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
        sections: Of the rotary embedding, where the configuration says nothing.
        mixes_sections: See `RopeConfig`.
    """

    tower: ClassVar[type[nn.Module]]
    tower_rules: ClassVar[Sequence[WeightRule]]
    sections: ClassVar[tuple[int, ...]]
    mixes_sections: ClassVar[bool] = False

    @classmethod
    def tower_facts(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Translate `vision_config`.

        Raises:
            ModelError: A value that the tower cannot serve.
        """
        raise NotImplementedError

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config, (_, text) = super().config_from_hf(hf), family_of(hf)
        vision = hf.get("vision_config") or {}
        facts = cls.tower_facts(vision)
        for key in ("in_channels", "in_chans"):
            if vision.get(key, 3) != 3:
                raise ModelError(f"config.json: vision_config: {key} {vision[key]!r}: possible: 3")
        given = text.get("rope_scaling") or text.get("rope_parameters") or {}
        rope = replace(
            config.rope, sections=tuple(given.get("mrope_section") or cls.sections), mixes_sections=cls.mixes_sections
        )
        seen = VisionPart(
            embed_id=number(hf, "image_token_id", 151655),
            patches_per_token=facts["spatial_merge_size"] ** 2,
            width=facts["hidden_size"],
            tensors=NOT_TEXT,
            num_added=len(facts.get("added", ())),
        )
        return replace(config, vision=seen, rope=rope, not_loaded="", extra={**config.extra, "tower": facts})

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


def numbers(vision: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    """Return whole numbers of `vision_config`, with defaults, and what all towers of this kind have beside them.

    Raises:
        ModelError: One is none, or heads cannot be rotated by row and column.
    """
    found: dict[str, Any] = {key: number(vision, key, value) for key, value in defaults.items()}
    if found["hidden_size"] % (4 * found["num_heads"]):
        raise ModelError(
            f"config.json: vision_config: hidden_size {found['hidden_size']} of {found['num_heads']} heads: a head "
            "must have a multiple of four numbers"
        )
    rope = vision.get("rope_parameters") or {}
    if (kind := rope.get("rope_type") or "axial") != "axial":
        raise ModelError(f"config.json: vision_config: rope_type {kind!r} is not supported; possible: 'axial'")
    return {**found, "theta": float(rope.get("rope_theta") or 10000.0)}


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
