import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from dovetail_npz import Npz
from torch import Tensor

from dovetail.contracts import Listing, ModelError
from dovetail_testing import CheckpointConformance

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


class TestNpz(CheckpointConformance):
    name = "npz"
    save = staticmethod(np.savez)

    def write(self, folder: Path) -> Mapping[str, Tensor]:
        tensors = {
            "model.embed_tokens.weight": torch.randn(32, 8, generator=torch.Generator().manual_seed(1)),
            "model.layers.0.mlp.up_proj.weight": torch.ones(16, 8, dtype=torch.float16),
        }
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.save(folder / "model.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
        return tensors


class TestCompressed(TestNpz):
    save = staticmethod(np.savez_compressed)


def test_what_is_compressed_is_unpacked_as_far_as_its_head_says(tmp_path: Path) -> None:
    """A gigabyte of zeros behind a head of 128 numbers costs 128 numbers."""
    np.savez_compressed(tmp_path / "model.npz", a=np.zeros(1 << 20, np.uint8))
    made = Npz([tmp_path / "model.npz"])
    (header,) = made.headers()
    assert header.stored_bytes < 1 << 12
    data = torch.frombuffer(bytearray(header.file.read_bytes()), dtype=torch.uint8)
    data = data[header.start : header.start + header.stored_bytes]
    assert made.tensor(header._replace(shape=(128,)), data).shape == (128,)
    with pytest.raises(ModelError, match="is cut short"):
        made.tensor(header._replace(shape=(1 << 21,)), data)


def test_one_of_several_has_to_be_chosen(tmp_path: Path) -> None:
    """Two archives in a folder are two models."""
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, a=np.zeros(1))
    with pytest.raises(ModelError, match=r"several \.npz"):
        Npz.claims(Listing(tmp_path, ("a.npz", "b.npz")))
