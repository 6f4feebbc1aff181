"""Embeddings of encoders equal sentence-transformers': pooling, matrices, prompts and lengths are as its files say."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_server import EncoderServer, write_encoder
from safetensors.torch import save_file

from dovetail.contracts.errors import RequestError
from dovetail_offline.llm import LLM

TEXTS = ["hello there", "A cat", "", "x y " * 60]
ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda x: x, "ReLU": torch.relu, "Sigmoid": torch.sigmoid}
WAYS: list[dict[str, Any]] = [
    {"mode": "mean_tokens", "dense": ["Tanh"], "norm": True},
    {"mode": "cls_token", "dense": [], "norm": True},
    {"mode": "lasttoken", "dense": ["ReLU", "Identity"], "norm": False},
    {"mode": "mean_tokens", "dense": ["Sigmoid"], "norm": False, "lower": True},
]
PROMPTS = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}


def write_folder(
    folder: Path, *, mode: str, dense: list[str], norm: bool, lower: bool = False, kind: str = "bert"
) -> Any:
    """Write an encoder as sentence-transformers does, texts at most 40 tokens long; returns model and matrices."""
    model = write_encoder(folder, kind)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    parts += [(f"{at}_Dense", "Dense") for at in range(2, 2 + len(dense))] + [("9_Normalize", "Normalize")] * norm
    made = [{"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(parts)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(made))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": lower}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    for path, _ in parts[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, f"pooling_mode_{mode}": True})
    )
    matrices, size = [], 32
    for at, name in enumerate(dense, 2):
        weight, bias = torch.randn(24 + at, size), torch.randn(24 + at)
        kept = torch.bfloat16 if at == 3 else torch.float32
        save_file(
            {"linear.weight": weight.to(kept), "linear.bias": bias.to(kept)}, folder / f"{at}_Dense/model.safetensors"
        )
        said = {"in_features": size, "out_features": 24 + at, "bias": True}
        said["activation_function"] = f"torch.nn.modules.activation.{name}"
        (folder / f"{at}_Dense/config.json").write_text(json.dumps(said))
        matrices.append((weight.to(kept).float(), bias.to(kept).float(), name))
        size = 24 + at
    return model, matrices


def vectors(server: EncoderServer, texts: list[str], **fields: Any) -> Any:
    found = server.ok("/v1/embeddings", input=texts, truncate_prompt_tokens=-1, **fields)
    return np.array([one["embedding"] for one in found["data"]])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['mode']}-{'-'.join(way['dense'])}")
def test_vectors_are_what_the_folder_says(way: dict[str, Any], tmp_path: Path) -> None:
    """Written out in torch: prompt, tokens, model, pooling, matrices, length."""
    model, matrices = write_folder(tmp_path, **way)

    def wanted(text: str) -> Any:
        ids = server.state.text.tokenizer.encode(text, add_special_tokens=False)[:38]
        hidden = model(torch.tensor([[2, *ids, 3]])).last_hidden_state[0]
        vector = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[way["mode"]]
        for weight, bias, name in matrices:
            vector = ACTIVATIONS[name](weight @ vector + bias)
        return (vector / vector.norm() if way["norm"] else vector).numpy()

    with EncoderServer(tmp_path) as server:
        assert server.state.text.limits.context_len == 40
        for name, before in ((None, "query: "), ("query", "query: "), ("document", ""), ("", "")):
            fields = {} if name is None else {"prompt_name": name}
            want = np.stack([wanted(before + text) for text in TEXTS])
            np.testing.assert_allclose(vectors(server, TEXTS, **fields), want, atol=1e-5 * np.abs(want).max())
        packed = server.ok("/v1/embeddings", input="A cat", encoding_format="base64")["data"][0]["embedding"]
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(packed), "<f4"), wanted("query: A cat"), atol=1e-5 * 32
        )
        refused = [
            ({"input": "x y " * 60}, "context_length_exceeded"),
            ({"input": "a", "prompt_name": "passage"}, "invalid_value"),
            ({"input": [1, 2], "prompt_name": "query"}, "invalid_value"),
            ({"input": "a", "dimensions": 8}, "unsupported_parameter"),
        ]
        for body, code in refused:
            assert server.post("/v1/embeddings", body).json()["error"]["code"] == code
        ids = server.ok("/v1/embeddings", input=[[2, 7, 8, 3]])["data"][0]["embedding"]
        assert len(ids) == len(want[0])  # ids are taken as they are


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "modernbert"])
def test_they_equal_sentence_transformers(kind: str, tmp_path: Path) -> None:
    """Its own `encode`, where it is installed, of every kind of encoder and in one batch of different lengths."""
    library = pytest.importorskip("sentence_transformers")
    write_folder(tmp_path, mode="mean_tokens", dense=["Tanh"], norm=True, kind=kind)
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    model.max_seq_length = 40
    with EncoderServer(tmp_path) as server:
        for fields in ({}, {"prompt_name": "document"}):
            np.testing.assert_allclose(vectors(server, TEXTS, **fields), model.encode(TEXTS, **fields), atol=1e-5)


@pytest.mark.full
def test_many_inputs_and_a_megabyte(tmp_path: Path) -> None:
    """2,048 of them with doubles, and one text of a megabyte that is cut."""
    write_encoder(tmp_path, "modernbert")
    with EncoderServer(tmp_path) as server:
        texts = [f"{at % 50} cats" for at in range(2048)]
        found = vectors(server, texts)
        assert found.shape == (2048, 32)
        np.testing.assert_allclose(found[:1000], found[1000:2000], atol=1e-5)
        large = "x y " * (1 << 18)
        np.testing.assert_allclose(vectors(server, [large]), vectors(server, [large[:4000]]), atol=1e-6)
        stats = server.http.get(server.base + "/v1/loads", timeout=60).json()["loads"][0]
        assert (stats["max_total_num_tokens"], stats["num_used_tokens"], stats["token_usage"]) == (0, 0, 0.0)


def test_offline(tmp_path: Path) -> None:
    """`LLM.embed` gives the same vectors, and `LLM.generate` says what the model is for."""
    write_folder(tmp_path, mode="mean_tokens", dense=["Tanh"], norm=True)
    with EncoderServer(tmp_path) as server:
        want = vectors(server, TEXTS[:3])
    with LLM(str(tmp_path), dtype="float32", device="cpu") as llm:
        found = [one.embedding for one in llm.embed(TEXTS[:3], use_tqdm=False)]
        np.testing.assert_allclose(found, want, atol=1e-6)
        with pytest.raises(RequestError, match="BertModel does not generate text here: it can give embeddings"):
            llm.generate("a", use_tqdm=False)
