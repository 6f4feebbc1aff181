"""The conformance kit: logits against transformers on tiny random checkpoints."""

from dovetail_testing import ModelConformance


class TestOlmo(ModelConformance):
    name = "OlmoForCausalLM"
    configs = (*ModelConformance.configs, {"attention_bias": True}, {"clip_qkv": 0.5})
