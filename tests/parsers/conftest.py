"""A byte-level vocabulary in which the formats' markers are tokens, as in the models that write them."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from tokenizers import decoders, models, pre_tokenizers

from dovetail.text.tokenizer import Tokenizer
from dovetail.text.tokenizer_files import TokenizerFiles

# Reproducible, and without deadlines: tests make claims about results, not about this machine's load.
settings.register_profile("dovetail", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dovetail")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return Tokenizer(backend, TokenizerFiles(tokenizer_config={"eos_token": "<|im_end|>"}))
