"""Model plugins with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from dovetail.contracts.cache import Window
from dovetail.contracts.config import ModelConfig, RopeConfig
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import ModelPlugin, WeightRule
from dovetail.sdk.config import dense_config
from dovetail.sdk.layers.attention import attend
from dovetail.sdk.layers.base import Slot
from dovetail.sdk.layers.linear import PlainLinear
from dovetail.sdk.layers.plain import PLAIN
from dovetail_models.gemma2 import Gemma2
from dovetail_models.gpt_oss import GptOss
from dovetail_models.llama import RULES, Llama
from dovetail_models.phi3 import Phi3

ARCHITECTURE = "LlamaForCausalLM"


def built(change: Callable[[Any], None]) -> type[Llama]:
    """Return a Llama whose module is changed after it was built."""

    def build(config: ModelConfig, ctx: BuildContext) -> Any:
        model = Llama.build(config, ctx)
        change(model)
        return model

    return type("Broken", (Llama,), {"build": staticmethod(build), "__module__": __name__})


def configured(change: Callable[[ModelConfig], ModelConfig]) -> type[Llama]:
    """Return a Llama that builds from another configuration."""

    def build(config: ModelConfig, ctx: BuildContext) -> Any:
        return Llama.build(change(config), ctx)

    return type("Broken", (Llama,), {"build": staticmethod(build), "__module__": __name__})


def ruled(change: Callable[[Sequence[WeightRule]], Sequence[WeightRule]]) -> type[Llama]:
    """Return a Llama with another weight map."""

    def weight_map(config: ModelConfig) -> Sequence[WeightRule]:
        return change(Llama.weight_map(config))

    return type("Broken", (Llama,), {"weight_map": staticmethod(weight_map), "__module__": __name__})


class TransposedLinear(PlainLinear):
    def place(self, slot: Slot, tensor: torch.Tensor) -> torch.Tensor | None:
        return super().place(slot, tensor.t() if tensor.dim() == 2 else tensor)


def transpose_out(model: Any) -> None:
    for layer in model.layers:
        layer.attention.out.__class__ = TransposedLinear


def swap_gate_and_up(rules: Sequence[WeightRule]) -> Sequence[WeightRule]:
    gate_up = next(rule for rule in RULES if "(gate|up)" in rule.module_pattern)
    swapped = [
        replace(gate_up, module_pattern=gate_up.module_pattern.replace("(gate|up)", f"({part})"), part=other)
        for part, other in (("gate", "up"), ("up", "gate"))
    ]
    return [*swapped, *(rule for rule in rules if rule is not gate_up)]


class ForgetsABias(Llama):
    """Says that the output projection's bias is not needed, and builds without it."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense_config(hf, qkv_bias=bool(hf["attention_bias"]), out_bias=False)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return [WeightRule(r".*o_proj\.bias", ""), *super().weight_map(config)]


def without_norm(rules: Sequence[WeightRule]) -> Sequence[WeightRule]:
    """Leave out the rule for a weight."""
    return [rule for rule in rules if "post_attention" not in rule.module_pattern]


def add_stray_parameter(model: Any) -> None:
    model.gain = nn.Parameter(torch.full((3,), float("nan")), requires_grad=False)


def plain_norm(model: Any) -> None:
    """Keep the last norm's weight in a module that is no layer: nothing loads it."""
    weight = model.norm.weight
    model.norm.slots = dict
    model.norm.weight = weight


def leaky_forward(model: Any) -> None:
    """Keep cosine and sine by the number of tokens."""
    rotary, seen = model.rotary.forward, {}

    def forward(positions: torch.Tensor) -> Any:
        return rotary(seen.setdefault(len(positions), positions))

    model.rotary.forward = forward


def syncing_forward(model: Any) -> None:
    """Look at the positions on the host."""
    rotary = model.rotary.forward

    def forward(positions: torch.Tensor) -> Any:
        assert int(positions.max()) >= 0
        return rotary(positions)

    model.rotary.forward = forward


class NoWindows(Llama):
    """Reads the size of the window, and does nothing with it."""

    architectures: ClassVar[Sequence[str]] = ("MistralForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        return dense_config(hf, has_windows=False)


class WholeHeads(Phi3):
    """Rotates whole heads, whatever the config says."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        return replace(config, rope=replace(config.rope, partial=1.0))


class NoCap(Gemma2):
    """Reads the cap of the scores, and does nothing with it."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        return replace(config, layers=tuple(replace(spec, soft_cap=None) for spec in config.layers))


class NoSinks(GptOss):
    """Loads the sinks, and attends without them."""

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        model: Any = super().build(config, ctx)
        for layer in model.layers:
            layer.attention.layer = replace(layer.attention.layer, sinks=None)
        return model


class Unheard(Llama):
    """Of an architecture that transformers does not have."""

    architectures: ClassVar[Sequence[str]] = ("UnheardForCausalLM",)


class Hangs(Llama):
    """Never comes back."""

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        Event().wait()
        return super().weight_map(config)


class Untyped(Llama):
    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        hf["hidden_size"]
        return super().config_from_hf(hf)


class WrongHeads(Llama):
    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        return replace(config, layers=tuple(replace(s, num_kv_heads=s.num_qo_heads) for s in config.layers))


class OptionalNorm(Llama):
    """Takes the last norm for not needed."""

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return [WeightRule(r"model\.norm\.weight", ""), *super().weight_map(config)]

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        model: Any = Llama.build(config, ctx)
        plain_norm(model)
        return model


class WrongDtype(Llama):
    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        return Llama.build(config, BuildContext(device=ctx.device, dtype=torch.float32, factory=PLAIN))


class CountsItsTokens(Llama):
    """Claims batch invariance, and looks at how many tokens there are."""

    batch_invariant = True

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        model: Any = Llama.build(config, ctx)
        norm = model.norm.forward
        model.norm.forward = lambda stream: norm(stream) * (1 + 1e-6 * len(stream.total()))
        return model


class SeesBeyondItsWindow(Llama):
    """Declares windows, so that its pages are given back, and attends to everything."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        return replace(config, layers=tuple(replace(s, reach=Window(8)) for s in config.layers))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        model: Any = Llama.build(config, ctx)
        for layer in model.layers:
            layer.attention.layer = replace(layer.attention.layer, sliding_window=None)
        return model


class WritesWhereItReads(Llama):
    """Declares that its second layer reads the cache of the first, and writes it."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        first, second, *others = config.layers
        return replace(config, layers=(first, replace(second, cache_layer=0), *others))

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        own = tuple(replace(spec, cache_layer=None) for spec in config.layers)
        return Llama.build(replace(config, layers=own), ctx)


class AttendsToNothing(Llama):
    """Hands over no keys, in a layer that has a cache of its own."""

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> Any:
        model: Any = Llama.build(config, ctx)
        attention = model.layers[1].attention
        attention.attend = lambda qkv, rope, batch: attend(
            attention.layer, qkv.view(len(qkv), -1, attention.d)[:, : attention.hq], None, None, batch
        ).view(len(qkv), -1)
        return model


class ReadsAhead(WritesWhereItReads):
    """Declares that its first layer reads the cache of the second."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = Llama.config_from_hf(hf)
        first, *others = config.layers
        return replace(config, layers=(replace(first, cache_layer=1), *others))


class Misnamed(Llama):
    architectures: ClassVar[Sequence[str]] = ("LlamaModel",)


OF_THEIR_OWN = (NoWindows, Unheard, WholeHeads, NoCap, NoSinks)
"""Plugins of another architecture than Llama's."""

FAULTS: dict[str, tuple[type[ModelPlugin], str, str]] = {
    "forgets a weight": (
        ForgetsABias,
        "test_all_weights_are_consumed",
        "it forgets the weight 'model.layers.0.self_attn.o_proj.bias': weight_map drops it, and the output depends on",
    ),
    "depends on the batch": (CountsItsTokens, "test_batch_invariance", "not batch invariant: a prompt of 1 tokens"),
    "has no rule for a weight": (
        ruled(without_norm),
        "test_all_weights_are_consumed",
        "missing: layers.0.mlp_norm.weight, layers.1.mlp_norm.weight",
    ),
    "weight in no layer": (
        built(plain_norm),
        "test_all_weights_are_consumed",
        "unexpected: model.norm.weight",
    ),
    "translates a size wrongly": (
        WrongHeads,
        "test_config_is_translated",
        "num_kv_heads is 4, and config.json says num_key_value_heads 2",
    ),
    "does not miss a weight": (
        OptionalNorm,
        "test_missing_weights_are_named",
        "a checkpoint without weight 'model.norm.weight' loads",
    ),
    "parameter that nothing fills": (
        built(add_stray_parameter),
        "test_all_weights_are_consumed",
        "parameters that no weight fills: gain",
    ),
    "swallows unknown weights": (
        ruled(lambda rules: [*rules, WeightRule(".*", "")]),
        "test_unexpected_weights_are_named",
        "is swallowed: a rule of weight_map is too wide",
    ),
    "transposed weight": (
        built(transpose_out),
        "test_logits_equal_transformers",
        "weights are loaded transposed: model.layers.0.self_attn.o_proj.weight",
    ),
    "gate and up swapped": (ruled(swap_gate_and_up), "test_logits_equal_transformers", "wrong from the first token on"),
    "wrong rope theta": (
        configured(lambda config: replace(config, rope=replace(config.rope, theta=10000.0))),
        "test_logits_equal_transformers",
        "wrong rope: it ignores rope_theta and uses 10000",
    ),
    "ignores rope scaling": (
        configured(lambda config: replace(config, rope=RopeConfig(theta=config.rope.theta))),
        "test_logits_equal_transformers",
        "wrong rope: it ignores the scaling",
    ),
    "wrong attention facts": (
        configured(lambda config: replace(config, layers=tuple(replace(s, reach=Window(4)) for s in config.layers))),
        "test_logits_equal_transformers",
        "the first token of each prompt agrees and later ones do not",
    ),
    "sees beyond its window": (
        SeesBeyondItsWindow,
        "test_greedy_in_a_mixed_batch",
        "greedy tokens differ in a mixed batch with chunked prefill",
    ),
    "writes another layer's cache": (
        WritesWhereItReads,
        "test_logits_equal_transformers",
        "layer 1 writes keys and values, and its LayerSpec says that it reads those of layer 0",
    ),
    "hands over no keys": (
        AttendsToNothing,
        "test_logits_equal_transformers",
        "layer 1 attends without keys, and its LayerSpec names no layer whose cache it reads",
    ),
    "reads the cache of a later layer": (
        ReadsAhead,
        "test_logits_equal_transformers",
        "layer 0 reads the cache of layer 1, which is none before it with one",
    ),
    "positions of an earlier step": (
        built(leaky_forward),
        "test_greedy_in_a_mixed_batch",
        "greedy tokens differ in a mixed batch with chunked prefill",
    ),
    "host sync in decode": (
        built(syncing_forward),
        "test_no_host_sync_in_decode",
        "host sync in a decode step, which no graph can record: __int__() at test_broken_models.py",
    ),
    "drops the window": (
        NoWindows,
        "test_logits_equal_transformers",
        "logits differ from transformers with {'sliding_window': 8}",
    ),
    "rotates whole heads": (
        WholeHeads,
        "test_logits_equal_transformers",
        "'partial_rotary_factor': 0.5}}: ",
    ),
    "drops the soft cap": (
        NoCap,
        "test_logits_equal_transformers",
        "wrong facts of the attention layer (heads, scale, window, cap, sinks)",
    ),
    "drops the sinks": (
        NoSinks,
        "test_logits_equal_transformers",
        "logits differ from transformers with ",
    ),
    "without a reference": (
        Unheard,
        "test_logits_equal_transformers",
        "transformers has no UnheardForCausalLM to compare with: override make_checkpoint and reference_logits",
    ),
    "hangs": (Hangs, "test_all_weights_are_consumed", "test_all_weights_are_consumed did not end within 4 s"),
    "untyped config error": (
        Untyped,
        "test_config_errors_are_typed",
        "config.json without 'hidden_size': a bare KeyError: 'hidden_size' instead of a ModelError",
    ),
    "wrong dtype": (WrongDtype, "test_builds_in_the_dtype_asked_for", "asked for torch.bfloat16 on cpu"),
    "registered under another name": (
        Misnamed,
        "test_architectures_hold_the_name",
        "architectures = ['LlamaModel'] does not hold 'LlamaForCausalLM'",
    ),
}


@pytest.mark.first(10)
# That one without any passes is in test_builtins.py.
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_fault(fault: str, caught: Callable[..., None]) -> None:
    """A model with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    attrs: dict[str, Any] = {"configs": [{"attention_bias": True}]} if plugin is ForgetsABias else {}
    if plugin is Hangs:
        attrs["time_limit_s"] = 4.0
    own = plugin.architectures[0] if plugin in OF_THEIR_OWN else ARCHITECTURE
    caught("model", plugin, test, message, select=test, architecture=own, **attrs)
