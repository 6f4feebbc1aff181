"""The network that is trained: Qwen3 over a flat stream of tokens, with the names that `transformers` uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON: Final = 1e-6

Group = tuple[int, int]
"""A count of rows and their common length, in tokens."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the network; the defaults are the bundled model's 7.6 million parameters."""

    vocab: int = 4096
    width: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 640
    theta: float = 10_000.0


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Scales the last dimension to unit mean square, in float32, as `transformers` does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight.to(x.dtype) * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions; `x` is [tokens, heads, head_dim], `cos` and `sin` are [tokens, 1, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _project(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [tokens, heads, head_dim] and keys and values [tokens, kv_heads, head_dim]."""
    tokens, head_dim = x.shape[0], q_norm.shape[0]
    normed = _rms_norm(x, norm)
    queries = F.linear(normed, q.to(x.dtype)).view(tokens, -1, head_dim)
    keys = F.linear(normed, k.to(x.dtype)).view(tokens, -1, head_dim)
    values = F.linear(normed, v.to(x.dtype)).view(tokens, -1, head_dim)
    queries = _rotate(_rms_norm(queries, q_norm), cos, sin)
    keys = _rotate(_rms_norm(keys, k_norm), cos, sin)
    return queries, keys, values


def _finish(x: Tensor, mixed: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Adds the attention's output and the feed-forward part to the stream [tokens, width]."""
    x = x + F.linear(mixed, o.to(x.dtype))
    normed = _rms_norm(x, norm)
    inner = F.silu(F.linear(normed, gate.to(x.dtype))) * F.linear(normed, up.to(x.dtype))
    return x + F.linear(inner, down.to(x.dtype))


def _loss(x: Tensor, norm: Tensor, table: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean cross-entropy of `targets` [tokens], in nats."""
    logits = F.linear(_rms_norm(x, norm), table.to(x.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, groups: list[Group]) -> Tensor:
    """Runs causal attention within each row of each group; returns [tokens, heads * head_dim]."""
    outputs, start = [], 0
    for rows, length in groups:
        stop = start + rows * length
        q, k, v = (t[start:stop].view(rows, length, -1, t.shape[-1]).transpose(1, 2) for t in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(mixed.transpose(1, 2).reshape(rows * length, -1))
        start = stop
    return torch.cat(outputs)


def _weight(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """Returns a matrix drawn with the usual fan-in scale."""
    return nn.Parameter(torch.randn(rows, columns) * scale / math.sqrt(columns))


class DemoModel(nn.Module):
    """Qwen3 with tied embeddings; its parameters carry checkpoint names with dots turned into slashes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weights = nn.ParameterDict()
        self._project: Callable[..., Any] = _project
        self._finish: Callable[..., Any] = _finish
        self._loss: Callable[..., Any] = _loss
        self._add("model.embed_tokens.weight", nn.Parameter(torch.randn(shape.vocab, shape.width) * 0.02))
        self._add("model.norm.weight", nn.Parameter(torch.ones(shape.width)))
        for layer in range(shape.layers):
            self._add_layer(f"model.layers.{layer}.")

    def _add(self, name: str, value: nn.Parameter) -> None:
        self.weights[name.replace(".", "/")] = value

    def _add_layer(self, prefix: str) -> None:
        s = self.shape
        deep = 1 / math.sqrt(2 * s.layers)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self._add(f"{prefix}{name}.weight", nn.Parameter(torch.ones(s.width)))
        for name in ("q_norm", "k_norm"):
            self._add(f"{prefix}self_attn.{name}.weight", nn.Parameter(torch.ones(s.head_dim)))
        self._add(f"{prefix}self_attn.q_proj.weight", _weight(s.heads * s.head_dim, s.width))
        self._add(f"{prefix}self_attn.k_proj.weight", _weight(s.kv_heads * s.head_dim, s.width))
        self._add(f"{prefix}self_attn.v_proj.weight", _weight(s.kv_heads * s.head_dim, s.width))
        self._add(f"{prefix}self_attn.o_proj.weight", _weight(s.width, s.heads * s.head_dim, deep))
        self._add(f"{prefix}mlp.gate_proj.weight", _weight(s.hidden, s.width))
        self._add(f"{prefix}mlp.up_proj.weight", _weight(s.hidden, s.width))
        self._add(f"{prefix}mlp.down_proj.weight", _weight(s.width, s.hidden, deep))

    def compile_parts(self) -> None:
        """Compiles the parts between attention calls; each is compiled once and shared by all layers."""
        self._project = torch.compile(_project, dynamic=False)
        self._finish = torch.compile(_finish, dynamic=False)
        self._loss = torch.compile(_loss, dynamic=False)

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the weights under their checkpoint names, rounded to bfloat16, on the CPU."""
        return {
            name.replace("/", "."): value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in self.weights.items()
        }

    def matrices(self) -> list[nn.Parameter]:
        """Returns the matrices inside the layers."""
        return [value for name, value in self.weights.items() if value.ndim == 2 and "embed" not in name]

    def others(self) -> list[nn.Parameter]:
        """Returns the embedding and the norms."""
        return [value for name, value in self.weights.items() if value.ndim != 2 or "embed" in name]

    def _positions(self, groups: list[Group], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of every token's position in its row, each [tokens, 1, head_dim]."""
        half = torch.arange(0, self.shape.head_dim, 2, device=device, dtype=torch.float32)
        rates = self.shape.theta ** (-half / self.shape.head_dim)
        at = torch.cat([torch.arange(length, device=device).repeat(rows) for rows, length in groups])
        angles = at.float()[:, None] * rates
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def hidden(self, tokens: Tensor, groups: list[Group], dtype: torch.dtype) -> Tensor:
        """Returns the stream [tokens, width] before the last norm; `tokens` holds the rows of `groups` end to end."""
        w = self.weights
        x = F.embedding(tokens, w["model/embed_tokens/weight"]).to(dtype)
        cos, sin = self._positions(groups, tokens.device, dtype)
        for layer in range(self.shape.layers):
            p = f"model/layers/{layer}/"
            attention = (
                w[f"{p}self_attn/{name}/weight"] for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
            )
            q, k, v = self._project(x, w[f"{p}input_layernorm/weight"], *attention, cos, sin)
            mlp = (w[f"{p}mlp/{name}/weight"] for name in ("gate_proj", "up_proj", "down_proj"))
            mixed = _attend(q, k, v, groups)
            x = self._finish(x, mixed, w[f"{p}self_attn/o_proj/weight"], w[f"{p}post_attention_layernorm/weight"], *mlp)
        return x

    def loss(self, tokens: Tensor, targets: Tensor, weights: Tensor, groups: list[Group], dtype: torch.dtype) -> Tensor:
        """Returns the weighted mean cross-entropy of `targets`, in nats."""
        x = self.hidden(tokens, groups, dtype)
        w = self.weights
        loss: Tensor = self._loss(x, w["model/norm/weight"], w["model/embed_tokens/weight"], targets, weights)
        return loss
