"""The conformance kit: logits against transformers on tiny random checkpoints."""

from dovetail.testing import ModelConformance


class TestOlmo2(ModelConformance):
    name = "Olmo2ForCausalLM"
    configs = (*ModelConformance.configs, {"attention_bias": True})
