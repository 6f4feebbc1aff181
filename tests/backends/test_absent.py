"""What stands for attention where all layers keep states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.base.settings import EngineSettings
from dovetail.contracts.attention import AttentionLayer
from dovetail.contracts.cache import CacheTensor, Recurrent
from dovetail.contracts.config import LayerSpec
from dovetail.contracts.errors import ModelError
from dovetail.runtime.attention.backends import AbsentAttention, choose_backends
from dovetail.sdk.config import dense_config

HF = {
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 64, "intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
}


def test_a_model_of_states_alone_needs_no_backend(caplog: pytest.LogCaptureFixture) -> None:
    """None is asked, and a layer that attends all the same is named."""
    plain = dense_config(HF)
    state = (CacheTensor("state", (2, 4, 4), "float32"),)
    config = replace(plain, layers=tuple(LayerSpec(index=i, reach=Recurrent(), state=state) for i in range(2)))
    nobody: Any = None
    for named, said in (
        ("auto", []),
        ("triton", ["LlamaForCausalLM has no layer that attends: triton has no effect."]),
    ):
        settings = EngineSettings(attention_backend=named)
        chosen = choose_backends(nobody, config, torch.device("cpu"), torch.float32, settings)
        assert (chosen.backends, chosen.label) == ([AbsentAttention], "none")
        assert [record.getMessage() for record in caplog.records] == said
    made = AbsentAttention(config, nobody, torch.device("cpu"))
    layer, x = AttentionLayer.of(plain.layers[1], 1), torch.zeros(1, 4, 16)
    for attend in (made.forward_extend, made.forward_decode):
        with pytest.raises(ModelError, match="layer 1 attends, and the specs declare no layer that does"):
            attend(x, x, x, layer, nobody, x)
