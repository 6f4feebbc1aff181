"""The plugin: which of transformers' classes serves a `config.json`, and the facts that the engine asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.config import ModelConfig, RopeConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.contracts.model import CausalLM, ModelPlugin, WeightRule
from dovetail.sdk.config import checkpoint_dtype
from dovetail.sdk.layers.plain import PLAIN

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OUTPUTS = frozenset(
    {"return_dict", "use_return_dict", "torchscript", "output_attentions", "output_hidden_states"}
    | {"output_router_logits"}
)
"""Keys that say what a call of the model returns: what is read here is always there."""


class TransformersModel(ModelPlugin):
    """Serves what `AutoModelForCausalLM` has, as far as its layers attend through transformers' attention interface."""

    architectures: ClassVar[Sequence[str]] = ("*",)
    compares_schedules: ClassVar[bool] = True

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        from dovetail_models.transformers.probe import probe

        values = plain(hf)
        config = config_of(values)
        text = config.get_text_config(decoder=True)
        found = probe(config)
        most = getattr(text, "max_position_embeddings", None)
        if not most:
            raise refusal(values, "its config.json has no max_position_embeddings")
        inner = getattr(text, "intermediate_size", None)
        return ModelConfig(
            architecture=str(values["architectures"][0]),
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            intermediate_size=inner if isinstance(inner, int) else 4 * int(text.hidden_size),
            num_layers=found.num_layers,
            layers=found.layers,
            norm_eps=0.0,
            hidden_act="",
            max_position_embeddings=int(most) - found.first_place,
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            rope=RopeConfig(),
            dtype=checkpoint_dtype(values if "dtype" in values or "torch_dtype" in values else plain(text.to_dict())),
            num_params=found.num_params,
            extra={"hf": values, "modules": found.modules},
        )

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        from dovetail_models.transformers.decoder import TransformersDecoder

        if ctx.factory is not PLAIN:
            raise refusal(config.extra["hf"], "quantised weights are read by models of Dovetail's own only")
        if ctx.parallel.size > 1:
            raise refusal(config.extra["hf"], "it cannot be divided among several ranks")
        return TransformersDecoder(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        return ()


def plain(value: Any) -> Any:
    """Return a config as JSON has it; numbers that JSON has not are written as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def config_of(hf: Mapping[str, Any]) -> Any:
    """Return transformers' config.

    Raises:
        ModelError: It has no such model, or refuses the values.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    kind = hf.get("model_type")
    if kind not in CONFIG_MAPPING:
        what = "code that comes with a checkpoint is never run" if hf.get("auto_map") else "a newer one may"
        raise refusal(hf, f"version {__version__} has no model of the type {kind!r}, and {what}")
    cls = CONFIG_MAPPING[kind]
    if not cls.sub_configs and (missing := missing_key(cls, hf)) is not None:
        raise ModelError(f"config.json: the key {missing!r} is missing")  # or a default would stand for it
    try:
        config = cls.from_dict(_without_outputs(hf))
    except Exception as error:  # each config class has its own checks and errors
        raise refusal(hf, f"it refuses config.json: {' '.join(str(error).split())}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(hf, f"it has no causal language model of the type {kind!r}")
    return config


def _without_outputs(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what a call is to return beside hidden states, of the model and of its text part."""
    parts = {
        key: _without_outputs(value) for key, value in hf.items() if key == "text_config" and isinstance(value, dict)
    }
    return {key: value for key, value in hf.items() if key not in OUTPUTS} | parts


def missing_key(cls: Any, hf: Mapping[str, Any]) -> str | None:
    """Return a needed key that a config class has as a value of its own, not made of others, and the file has not."""
    for key in NEEDED:
        other = cls.attribute_map.get(key, key)
        is_own = hasattr(cls, other) and not isinstance(getattr(cls, other), property)
        if is_own and not {key, other} & hf.keys():
            return key
    return None


def refusal(hf: Mapping[str, Any], why: str) -> ModelError:
    """Word why a model is not served."""
    name = (hf.get("architectures") or ["a model without a name"])[0]
    return ModelError(f"{name} cannot be served through transformers: {why}")
