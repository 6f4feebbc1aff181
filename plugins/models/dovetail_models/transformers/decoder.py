"""Runs transformers' modules over a step's tokens, which stand one after the other in a single row.

What looks at one token at a time does not notice. What looks back, the attention layers, end in `attend`, which hands
queries, keys and values to the step's backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.layers import BuildContext
from dovetail.sdk.layers.attention import attend
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.layers.linear import is_repacked
from dovetail.sdk.layers.ops.reference import LinearKernel
from dovetail_models.transformers.loading import load
from dovetail_models.transformers.mixers import bound_steps, cache_parameter, fold_requests
from dovetail_models.transformers.plugin import config_of, refusal
from dovetail_models.transformers.probe import first_place

# Rotary embeddings of transformers that depend on the length of what is computed: one choice holds for all.


def freeze_ropes(model: Any, hf: Mapping[str, Any], context_len: int) -> None:
    """Choose by the longest request that is served.

    Transformers chooses by each call's longest row, and computes a request anew when it grows past the limit. Here rows
    of many requests are one call, and keys stay in the cache.

    Raises:
        ModelError: A kind that grows with every token.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else [(None, kinds)]:
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            if layer_type is not None:
                raise refusal(hf, f"its rope kind is {kind!r} for layers of one type")
            _freeze(module, kind, hf, context_len)


def _freeze(module: Any, kind: str, hf: Mapping[str, Any], context_len: int) -> None:
    config = module.config
    if kind == "longrope":
        freqs, factor = ROPE_INIT_FUNCTIONS[kind](config, module.inv_freq.device, seq_len=context_len)
        module.register_buffer("inv_freq", freqs, persistent=False)
        module.attention_scaling = factor
    elif context_len > config.max_position_embeddings:
        raise refusal(hf, f"its rope kind {kind!r} changes with the length of a request")
    module.rope_type = "default"  # or it would choose anew in every call


NAME = "dovetail"
PLACE = "dovetail_place"
"""The attribute under which an attention module finds its `LayerBinding`."""


class DecoderStep:
    """What the layers of a model that look back share: the batch of the step that runs."""

    batch: ForwardBatch | None = None

    def running(self) -> ForwardBatch:
        """Return the batch.

        Raises:
            RuntimeError: No step runs.
        """
        if self.batch is None:
            raise RuntimeError("a layer that looks back was called outside a step")
        return self.batch


class LayerBinding:
    """One attention layer: its facts, and the step's batch."""

    def __init__(self, layer: AttentionLayer, step: DecoderStep) -> None:
        self.layer, self.step = layer, step


class LayerRows(Layer):
    """`nn.Linear` through a kernel set, which may repack its weight."""

    def __init__(self, linear: nn.Linear, ctx: BuildContext) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        place = {"N": self.out_features, "K": self.in_features}
        self._linear: LinearKernel = ctx.operation("linear", **place)
        self._repacked: Any = None
        if is_repacked(ctx, *place.values()):
            self._repacked = ctx.operation("packed_linear", **place, form=None)
        self._packed: Tensor | None = None

    def finalize(self) -> None:
        if self._repacked is not None and not self._repacked.keeps():
            packed = self._repacked.pack({"weight": self.weight.detach()})
            if isinstance(packed, Tensor):  # what can be unpacked again
                self._packed = packed
                del self.weight

    def __getattr__(self, name: str) -> Any:
        """Unpack the weight for code that looks at it."""
        packed = self.__dict__.get("_packed")
        return packed.to_dense() if name == "weight" and packed is not None else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._packed is not None:
            out = self._repacked(rows, self._packed, self.bias)
        else:
            out = self._linear(rows, self.weight, self.bias)
        found: Tensor = out.view(*x.shape[:-1], self.out_features)
        return found


class HiddenStates:
    """The output of a model's body; all else that some outputs have is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        """Return the first and only entry."""
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Of anything else there is nothing."""


class EmbeddingPassthrough(nn.Module):
    """Stands for all but the head of a model, or a part of it: hands on hidden states that are given as embeddings."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = [body]  # in a list: not a sub-module of this one

    def __getattr__(self, name: str) -> Any:
        """Answer for the body where the head asks for a factor of its, or calls a part of it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_body"][0], name)
            return EmbeddingPassthrough(found) if isinstance(found, nn.Module) else found

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return HiddenStates(inputs_embeds)


class TransformersDecoder(nn.Module):
    """See `CausalLM`. The head is the causal model around `EmbeddingPassthrough`: it scales and caps logits."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self._hf, self._specs, self._names = config.extra["hf"], config.layers, config.extra["modules"]
        self._ctx, self._step = ctx, DecoderStep()
        self._context_len = config.context_len or config.max_position_embeddings
        with torch.device(ctx.device), no_init_weights():
            made = AutoModelForCausalLM.from_config(config_of(self._hf), dtype=ctx.dtype, attn_implementation=NAME)
        self._adopt(made)

    def _adopt(self, made: Any) -> None:
        """Take a model of transformers over."""
        if made._can_set_experts_implementation() and (
            implementation := experts_implementation(made, self._ctx.device.type)
        ):
            made.set_experts_implementation(implementation)
        freeze_ropes(made, self._hf, self._context_len)
        for spec, name in zip(self._specs, self._names, strict=True):
            module = made.get_submodule(name)
            if spec.state:
                fold_requests(module, str(cache_parameter(module)), spec.index, self._step.running)
            else:
                setattr(module, PLACE, LayerBinding(AttentionLayer.of(spec), self._step))
        tied = made.get_input_embeddings().weight
        for name, module in list(made.named_modules()):
            if type(module) is nn.Linear and module.weight is not tied:
                parent, _, own = name.rpartition(".")
                setattr(made.get_submodule(parent), own, LayerRows(module, self._ctx))
        for module in made.modules():
            bound_steps(module)
        self._first_place = first_place(made)
        made.eval().requires_grad_(False)
        # Of a part of a larger model the prefix is its place in that: Llama 4's.
        prefix = made.base_model_prefix if hasattr(made, made.base_model_prefix) else "model"
        self.body = getattr(made, prefix)
        setattr(made, prefix, EmbeddingPassthrough(self.body))
        self.head = made

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to final hidden states `[T, H]`."""
        self._step.batch = batch
        try:
            out = self.body(
                input_ids=ids[None], position_ids=batch.positions[None] + self._first_place, use_cache=False
            )
        finally:
            self._step.batch = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Map hidden states `[R, H]` to logits `[R, V]`."""
        logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def load_checkpoint(self, folder: Path, headers: Sequence[TensorHeader]) -> None:
        """Read the weights as transformers does, and see that every one is there, used and finite."""
        del self.body, self.head  # their memory is needed
        self._adopt(load(folder, headers, config_of(self._hf), self._ctx, NAME))
        for module in self.modules():
            if isinstance(module, Layer):
                module.finalize()


def experts_implementation(model: nn.Module, device: str) -> str | None:
    """Choose how experts are computed; None: as transformers does, in a product of all at once.

    On a CPU only what was chosen is computed. On a GPU that product wants rows of whole 16 bytes.
    """
    if device == "cpu":
        return "eager"
    stacks = [param for param in model.parameters() if param.dim() == 3]
    is_odd = any(size * param.element_size() % 16 for param in stacks for size in param.shape[1:])
    return "batched_mm" if is_odd else None


def attend_paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attend over the cache: `[1, Hq, T, D]` to `[1, T, Hq, Dv]`."""
    place: LayerBinding = getattr(module, PLACE)
    layer, batch = place.layer, place.step.running()
    if (sinks := given.get("s_aux")) is not None:
        layer = AttentionLayer(**{name: getattr(layer, name) for name in layer.__slots__} | {"sinks": sinks.float()})
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return attend(layer, q, k, v, batch)[None], None


AttentionInterface.register(NAME, attend_paged)
