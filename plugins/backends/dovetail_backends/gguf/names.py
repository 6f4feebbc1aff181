"""What a GGUF file's tensors are called in checkpoints of transformers, and what has to be undone to have them so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from dovetail_backends.gguf.config import ARCHITECTURES, Architecture, architecture_of
from dovetail_backends.gguf.reader import Gguf, TensorPlace

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
ALL_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
DROPPED = ("rope_freqs.weight",)
"""Tensors that are read for the config."""


class GgufTensorName(NamedTuple):
    """A tensor under transformers' name.

    Attributes:
        name: `model.layers.0.self_attn.q_proj.weight`.
        place: In the file; of an expert's the place of all experts.
        expert: Which one of them; None: all of the tensor.
        heads: Rows stand as pairs of neighbours in so many heads; 0: they stand as they should.
        offset: What is to be taken off.
    """

    name: str
    place: TensorPlace
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return self.place.shape if self.expert is None else self.place.shape[1:]


def named_tensors(gguf: Gguf) -> Iterator[GgufTensorName]:
    """Yield all tensors of a file; one that is not known keeps its name, and the loader says so."""
    name = architecture_of(gguf)
    kind = ARCHITECTURES[name]
    heads = int(_one(gguf, f"{name}.attention.head_count"))
    kv_heads = int(_one(gguf, f"{name}.attention.head_count_kv") or heads)
    for place in gguf.tensors.values():
        if place.name not in DROPPED:
            yield from _named(place, kind, heads, kv_heads)


def _one(gguf: Gguf, key: str) -> int:
    value = gguf.metadata.get(key) or 0
    return int(value if isinstance(value, int) else value.decode()[0])  # `model_config` saw that all are the same


def _named(place: TensorPlace, kind: Architecture, heads: int, kv_heads: int) -> Iterator[GgufTensorName]:
    module, _, suffix = place.name.rpartition(".")
    found = IN_LAYER.fullmatch(place.name)
    if found is None:
        top = TOP.get(module)
        yield GgufTensorName(place.name if top is None else f"{top}.{suffix}", place, offset=_offset(place.name, kind))
        return
    layer, inner, suffix = found.groups()
    start = f"model.layers.{layer}."
    if (experts := ALL_EXPERTS.fullmatch(inner)) is not None and len(place.shape) == 3:
        for index in range(place.shape[0]):
            yield GgufTensorName(f"{start}mlp.experts.{index}.{experts[1]}_proj.{suffix}", place, index)
        return
    if (one := ONE_EXPERT.fullmatch(inner)) is not None:
        yield GgufTensorName(f"{start}mlp.experts.{one[2]}.{one[1]}_proj.{suffix}", place)
        return
    known = (LAYER | SANDWICH if kind.is_sandwich else LAYER).get(inner)
    turned = {"attn_q": heads, "attn_k": kv_heads}.get(inner, 0) if kind.is_turned else 0
    name = place.name if known is None else f"{start}{known}.{suffix}"
    yield GgufTensorName(name, place, heads=turned, offset=_offset(place.name, kind))


def _offset(name: str, kind: Architecture) -> float:
    return kind.norm_offset if name.endswith("norm.weight") else 0.0
