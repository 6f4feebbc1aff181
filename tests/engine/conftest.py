"""Tiny models of each architecture, and prompts of mixed lengths."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file

from dovetail_testing.models import make_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    return make_model(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM", head_dim=32)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in several shards."""
    return make_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", shard_size="100KB")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 with tied embeddings."""
    return make_model(tmp_path_factory.mktemp("qwen2"), "Qwen2ForCausalLM", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of mixed lengths, some sharing long prefixes."""
    rng = random.Random(0)
    mixed = [[rng.randrange(190) for _ in range(rng.randrange(1, 130))] for _ in range(10)]
    shared = [rng.randrange(190) for _ in range(45)]
    return [*mixed, *(shared + [rng.randrange(190) for _ in range(i)] for i in (1, 2, 20)), shared[:33]]
