"""The network that is trained: transformers' Qwen3-VL, whose tower takes a batch of images of one size at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from demo_training.digits.dialogue import IGNORED, Batch, settings_of
from demo_training.digits.strokes import LABELS

NEIGHBOURS: Final = (((0, -1), (0, 1), (-1, 0), (1, 0)), ((-1, -1), (-1, 1), (1, -1), (1, 1)))
"""Rows and columns from a patch to what the heads of a layer look at first."""
PEAKS: Final = (6.0, 12.0)
"""Of the scores of that patch, for the two fastest rotations."""
PATCH: Final = 14
MERGE: Final = 2
POSITIONS: Final = 1024
SIDE: Final = 6
"""Of the learned grid of places, in patches."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the network; the defaults are the bundled model's."""

    width: int = 96
    tower_layers: int = 4
    tower_inner: int = 256
    layers: int = 2
    inner: int = 192
    heads: int = 4
    head_dim: int = 32


def config_of(shape: Shape, tokenizer: Tokenizer) -> Any:
    """Return the configuration of a network of this shape."""
    end = tokenizer.token_to_id("<|im_end|>")
    dim = shape.head_dim
    column = row = dim // 6
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
    text = {
        **{"vocab_size": tokenizer.get_vocab_size(), "hidden_size": shape.width, "intermediate_size": shape.inner},
        **{"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": 2},
        **{"head_dim": dim, "max_position_embeddings": POSITIONS, "attention_bias": False, "tie_word_embeddings": True},
        "rope_parameters": {**rope, "mrope_section": [dim // 2 - row - column, row, column]},
        **{"eos_token_id": end, "pad_token_id": 0},
    }
    vision = {
        **{"depth": shape.tower_layers, "hidden_size": shape.width, "intermediate_size": shape.tower_inner},
        **{"num_heads": shape.heads, "out_hidden_size": shape.width, "patch_size": PATCH, "temporal_patch_size": 2},
        **{"spatial_merge_size": MERGE, "num_position_embeddings": SIDE**2, "deepstack_visual_indexes": []},
    }
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **settings_of(tokenizer), dtype="float32"
    )


class Reader(nn.Module):
    """The model, and a head for training alone that names the digit at each patch, and its place in the number."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer) -> None:
        super().__init__()
        config = config_of(shape, tokenizer)
        self.model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").float()
        self.namer = nn.Linear(shape.width, sum(LABELS))
        self._begin(shape)

    @torch.no_grad()
    def _begin(self, shape: Shape) -> None:
        """Start patches as a cosine transform of luminance and colour, low frequencies first, and heads near."""
        at = torch.arange(PATCH) + 0.5
        waves = torch.cos(math.pi / PATCH * torch.arange(PATCH)[:, None] * at)
        waves[0] /= math.sqrt(2)
        order = sorted((y + x, y, x) for y in range(PATCH) for x in range(PATCH))
        light = torch.tensor((0.3, 0.59, 0.11)) * math.sqrt(2)
        weight = self.model.model.visual.patch_embed.proj.weight
        for index in range(shape.width):
            _, y, x = order[index % (shape.width * 3 // 4)]
            colour = light if index < shape.width * 3 // 4 else torch.randn(3) / 2
            plane = waves[y][:, None] * waves[x] * (2 / PATCH) / math.sqrt(PATCH) * 2
            weight[index] = colour[:, None, None, None] * plane / 2
        self.model.model.visual.patch_embed.proj.bias.zero_()
        for layer, block in enumerate(self.model.model.visual.blocks[:-1]):
            self._look_near(block.attn, NEIGHBOURS[layer % 2])

    def _look_near(self, attention: nn.Module, offsets: Sequence[tuple[int, int]]) -> None:
        """Let each head begin by looking at one neighbour: biases of queries and keys, which positions rotate apart."""
        heads, dim = attention.num_heads, attention.head_dim
        bias = attention.qkv.bias.view(3, heads, dim)
        rates = self.model.model.visual.rotary_pos_emb.inv_freq
        for head, offset in zip(range(heads), offsets, strict=False):
            for axis, steps in enumerate(offset):
                for index, peak in enumerate(PEAKS):
                    first = axis * len(rates) + index
                    size, angle = math.sqrt(peak * math.sqrt(dim)), -steps * float(rates[index])
                    bias[0, head, first] = size
                    bias[1, head, first] = size * math.cos(angle)
                    bias[1, head, first + dim // 2] = size * math.sin(angle)

    def tower(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Encode images of one size.

        Args:
            patches: `[B, N, 3 * 14 * 14]`, bytes in the order of the image processor.
            grid: Rows and columns of patches.

        Returns:
            Embeddings `[B, N / 4, H]`, and the states of the patches `[B, N, H]`.
        """
        visual = self.model.model.visual
        rows, columns = merged_order(grid)
        x = patches.float() / 127.5 - 1
        weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
        x = F.linear(x, weight, visual.patch_embed.proj.bias) + self._places(rows, columns, grid)
        cos, sin = visual.rotary_pos_emb(x, torch.stack((rows, columns), -1))
        for block in visual.blocks:
            attention = block.attn
            q, k, v = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
            q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            x = x + attention.proj(mixed.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        merged: Tensor = visual.merger(x)
        return merged.view(len(x), -1, merged.shape[-1]), x

    def _places(self, rows: Tensor, columns: Tensor, grid: tuple[int, int]) -> Tensor:
        """Interpolate the learned grid of places for patches; `[N, H]`."""
        table = self.model.model.visual.pos_embed.weight.view(SIDE, SIDE, -1)

        def between(places: Tensor, num: int) -> Tensor:
            where = torch.linspace(0, SIDE - 1, num)[places]
            low = where.floor().long()
            high = (low + 1).clamp(max=SIDE - 1)
            share = F.one_hot(low, SIDE) * (1 - where + low)[:, None] + F.one_hot(high, SIDE) * (where - low)[:, None]
            return share.to(table.dtype)

        return torch.einsum("ni,nj,ijh->nh", between(rows, grid[0]), between(columns, grid[1]), table)

    def forward(self, batch: Batch, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Return the logits where an answer is learned, `[A, V]`, and the states of the patches, if there are any."""
        inner = self.model.model
        embedded = inner.language_model.embed_tokens(batch.ids)
        states = None
        if len(patches):
            seen, states = self.tower(patches, grid)
            embedded = embedded.masked_scatter(
                (batch.ids == inner.config.image_token_id)[..., None], seen.to(embedded.dtype)
            )
        hidden = inner.language_model(inputs_embeds=embedded, position_ids=batch.places, use_cache=False)[0]
        return self.model.lm_head(hidden[batch.targets != IGNORED]), states

    def naming_loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the patches' labels; that there is no digit counts less."""
        total = torch.zeros(())
        for found, wanted in zip(self.namer(states).split(LABELS, -1), labels.unbind(1), strict=True):
            weights = torch.ones(found.shape[-1])
            weights[-1] = 0.2
            total = total + F.cross_entropy(found.flatten(0, 1), wanted.flatten(), weights)
        return total / len(LABELS)

    def loss(self, batch: Batch, patches: Tensor, labels: Tensor, grid: tuple[int, int], share: float) -> Tensor:
        """Return the weighted mean cross-entropy of answers, and `share` of that of the patches' labels; `[2]`."""
        logits, states = self(batch, patches, grid)
        learned = batch.targets != IGNORED
        found = F.cross_entropy(logits.float(), batch.targets[learned], reduction="none")
        own = (found * batch.weights[learned]).sum() / batch.weights.sum()
        if states is None:
            return torch.stack((own, torch.zeros(())))
        return torch.stack((own, share * self.naming_loss(states, labels)))

    @torch.no_grad()
    def exact(self, batch: Batch, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return which rows greedy decoding answers to the letter, `[R]`."""
        logits, _ = self(batch, patches, grid)
        right = torch.ones_like(batch.targets, dtype=torch.bool)
        learned = batch.targets != IGNORED
        right[learned] = logits.argmax(-1) == batch.targets[learned]
        return right.all(1)

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Return the matrices inside layers, the weights of patches, and all other parameters."""
        inside = ("blocks", "merger", "layers")
        found: tuple[list[nn.Parameter], ...] = ([], [], [])
        for name, value in self.named_parameters():
            matrix = value.ndim == 2 and any(part in name for part in inside)
            found[0 if matrix else 1 if "patch_embed" in name else 2].append(value)
        return found[0], found[1], found[2]


def merged_order(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of patches, in the order of blocks of 2 x 2, each `[N]`."""
    places = torch.stack(torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij"))
    blocks = places.view(2, grid[0] // MERGE, MERGE, grid[1] // MERGE, MERGE)
    rows, columns = blocks.transpose(2, 3).reshape(2, -1)
    return rows, columns
