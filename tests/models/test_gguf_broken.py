"""GGUF files that are cut, forged or of another kind: named, at once, and without taking memory for what they claim."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make_checkpoint
from quantised_models import TARGET, plugin_of

from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import converted
from dovetail.runtime.hf_config import CONFIG_KEYS, read_config
from dovetail.text.tokenizer.backend import load_backend
from dovetail_backends.gguf.reader import read_files

pytest.importorskip("gguf", reason="it writes the files")
import gguf
from gguf_files import write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a file that is as it should be."""
    folder = tmp_path_factory.mktemp("gguf")
    make_checkpoint(folder / "plain", "llama")
    write_gguf(folder / "plain", folder / "tiny.gguf")
    return (folder / "tiny.gguf").read_bytes()


def read_all(file: Path) -> None:
    """Do what a start does before weights are read."""
    folder = ModelFolder.read(file)
    hf = folder.config
    load_backend(file, folder.stored)
    assert folder.texts.folder == file.parent
    model, blocks = plugin_of("model", str(hf["architectures"][0])), plugin_of("quantization", "gguf")
    if (reason := blocks.why_not(hf["quantization_config"])) is not None:
        raise ModelError(reason)
    config = folder.model_config(model.config_from_hf, served=CONFIG_KEYS)
    converted(blocks, folder, model, config, TARGET)


def refused(tmp_path: Path, data: bytes, match: str) -> None:
    """See that a file is refused, soon, and that little memory is taken for it."""
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    started = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=match):
            read_all(file)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack("<I", 99), "version 99"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 10**9), "1,000,000,000 tensors, which .* bytes cannot hold"),
        (8, struct.pack("<Q", 2**64 - 1), "tensors, which .* bytes cannot hold"),
        (16, struct.pack("<Q", 10**9), "1,000,000,000 keys, which .* bytes cannot hold"),
        (24, struct.pack("<Q", 2**63), "a text of 9,223,372,036,854,775,808 bytes"),
        (24, struct.pack("<Q", 60_000_000), "a text of 60,000,000 bytes"),
    ],
)
def test_what_a_head_claims_is_held_against_the_file(
    at: int, value: bytes, match: str, whole: bytes, tmp_path: Path
) -> None:
    """Counts and lengths that cannot be are refused before anything is made for them."""
    refused(tmp_path, whole[:at] + value + whole[at + len(value) :], match)


def test_a_file_cut_anywhere_is_named(whole: bytes, tmp_path: Path) -> None:
    """Every length of the head, and of the data: nothing but `ModelError` comes out."""
    lengths = [*range(0, 4000, 7), *range(4000, len(whole), 1009), len(whole) - 1]
    file = tmp_path / "cut.gguf"
    for length in lengths:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_files((file,))


def test_a_file_cut_within_its_last_matrix_is_named(tmp_path: Path) -> None:
    """A download that ends one byte early is no file of fewer rows."""
    file = tmp_path / "matrix.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("last", np.ones((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data, end = file.read_bytes(), read_files((file,)).tensors["last"].offset + 3 * 32 * 4
    file.write_bytes(data[: end - 1])
    with pytest.raises(ModelError, match=f"cut short: last ends at byte {end:,} of {end - 1:,}"):
        read_files((file,))


def test_a_file_of_wrong_bytes_is_read_or_refused(whole: bytes, tmp_path: Path) -> None:
    """Bytes changed at random in the head: a `ModelError`, or a model whose facts can be refused elsewhere."""
    rng, file = random.Random(0), tmp_path / "wrong.gguf"
    num_refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(8, 6000)] = rng.randrange(256)
        file.write_bytes(data)
        try:
            read_all(file)
        except ConfigError:
            num_refused += 1
    assert num_refused > 50


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.add_string("general.architecture", "mamba"), "general.architecture is 'mamba'; .* llama, mistral"),
        (lambda w: w.add_tokenizer_model("rwkv"), "of the kind 'rwkv'; possible: gpt2"),
        (lambda w: w.add_rope_scaling_type(_longrope()), "rope.scaling.type is 'longrope'; possible: none, linear"),
        (lambda w: w.add_bos_token_id(10_000), "bos_token is token 10000 of 131"),
        (lambda w: w.add_token_scores([0.0]), "1 scores for 131 tokens"),
        (lambda w: w.add_token_types([1, 1]), "131 tokens and 2 types"),
        (lambda w: w.add_token_list(["a"] * 131), "the token 'a' twice"),
        (lambda w: w.add_head_count_kv([1, 2]), "attention.head_count_kv differs between layers"),
        (lambda w: w.add_uint32("general.alignment", 20), "general.alignment is 20; a multiple of 8"),
        (lambda w: w.add_string("llama.block_count", "two"), "two"),
        (lambda w: w.add_string("llama.attention.head_count", "two"), "two"),
        (lambda w: w.add_string("tokenizer.ggml.eos_token_id", "x"), "eos_token_id is 'x' instead of a whole number"),
        (lambda w: w.add_array("tokenizer.ggml.scores", ["x"] * 131), "scores is an array of 131 texts instead of"),
        (lambda w: w.add_array("tokenizer.ggml.tokens", [1, 2]), "tokens is an array of 2 numbers instead of"),
        (lambda w: w.add_string("tokenizer.ggml.tokens", "x"), "tokens is 'x' instead of an array of texts"),
        (lambda w: w.add_string("split.count", "x"), "split.count is 'x' and split.no 0 instead of whole numbers"),
        (lambda w: w.add_array("split.no", [1, 2]), "split.no an array of 2 numbers instead of whole numbers"),
        (lambda w: w.add_float32("llama.attention.head_count", 2.5), "head_count is 2.5 instead of a whole number"),
        (lambda w: w.add_bool("llama.block_count", True), "block_count is True instead of a whole number"),
        (lambda w: w.add_array("llama.feed_forward_length", [96.5] * 2), "96.5 instead of a whole number"),
        (lambda w: w.kv_data[0].pop("llama.feed_forward_length"), "the key llama.feed_forward_length is missing"),
        (lambda w: w.kv_data[0].pop("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count is 8; possible: 16"),
        (lambda w: w.add_rope_dimension_count(0), "rope.dimension_count is 0; possible: 16"),
        (lambda w: w.add_attention_scale(0.5), "attention.scale is 0.5; possible: 0.25"),
        (lambda w: w.add_causal_attention(False), "attention.causal is False; possible: True"),
        (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 2.0), "attn_factor is 2.0; possible: 1.0"),
        (lambda w: w.add_uint32("llama.attention.key_length", 1 << 31), "head_dim = 2147483648, and the longest axis"),
        (lambda w: w.add_block_count(10**9), "num_hidden_layers = 1000000000; a model has from 1 to 10,000 layers"),
        (lambda w: w.add_block_count(3), "num_hidden_layers = 3, and the weights are of 2 layers"),
        (lambda w: w.add_uint64("llama.context_length", 1 << 62), "max_position_embeddings = 4611686018427387904; at"),
        (lambda w: w.add_uint32("llama.expert_count", 1 << 31), "expert_used_count is missing"),
        (
            lambda w: w.add_string("llama.note", "x" * (17 << 20)),
            "a text of 17,825,792 bytes at byte .*; at most",
        ),
        (lambda w: w.add_token_list(["x" * 5000] * 131), "a text of 5,000 bytes at byte .*; at most 4,096 are read"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(9, dtype=np.float32)),
            r"rope_freqs.weight has \[9\] for heads of 16 numbers",
        ),
    ],
)
def test_what_a_file_says_is_refused_by_name(change: Any, match: str, tmp_path: Path) -> None:
    """The key, what it says, and what is possible."""
    make_checkpoint(tmp_path / "plain", "llama")
    file = tmp_path / "bad.gguf"

    def apply(writer: Any) -> None:
        writer.kv_data[0] = _Overwritten(writer.kv_data[0])
        change(writer)

    write_gguf(tmp_path / "plain", file, extra=apply)
    with pytest.raises(ModelError, match=match):
        read_all(file)


class _Overwritten(dict[str, Any]):
    """Keys that may be set twice."""

    def __contains__(self, key: object) -> bool:
        return False


def _longrope() -> Any:
    import gguf

    return gguf.RopeScalingType.LONGROPE


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"blk.0.attn_q.weight", b"blk.0.attn_x.weight", "blk.0.attn_x.weight"),
        (b"token_embd.weight", b"token_embq.weight", "token_embd.weight is missing"),
        (b"output_norm.weight", b"output_morn.weight", "output_morn.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(old: bytes, new: bytes, match: str, whole: bytes, tmp_path: Path) -> None:
    """Of two names one is unknown and the other one missing."""
    from quantised_models import loaded

    file = tmp_path / "bad.gguf"
    file.write_bytes(whole.replace(old, new))
    with pytest.raises(ModelError, match=match):
        loaded(file, "gguf")


def test_types_that_nobody_reads_are_named(whole: bytes, tmp_path: Path) -> None:
    """A type that llama.cpp has and this has not, and one that nobody has."""
    at = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    for number, match in ((16, "IQ2_XXS"), (21, "IQ3_S"), (77, "of the unknown type 77")):
        refused(tmp_path, whole[:at] + struct.pack("<I", number) + whole[at + 4 :], match)


def test_tensors_that_lie_on_each_other_are_named(tmp_path: Path) -> None:
    """A file of a few bytes that claims them again and again."""
    entries = b"".join(struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 64, 0, 0) for name in (b"a", b"b"))
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entries
    refused(tmp_path, head + bytes(-len(head) % 32) + bytes(256), "its tensors take more bytes than it has: b lies on")


def test_an_array_of_too_many_values_is_named(tmp_path: Path) -> None:
    """They are there, and would take 40 bytes each."""
    array = struct.pack("<Q1sIIQ", 1, b"n", 9, 0, 5_000_000) + bytes(5_000_000)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array
    refused(tmp_path, head, "says 5,000,000 values of n; at most 4,194,304 are read")


def test_parts_and_choices_are_named(whole: bytes, tmp_path: Path) -> None:
    """A divided model's missing part, a part under another name, several models in a folder, none in one."""
    part = tmp_path / "m-00001-of-00003.gguf"
    part.write_bytes(whole)
    with pytest.raises(ModelError, match=r"of the 3 files of this model m-00002-of-00003.gguf, m-00003-of-00003.gguf"):
        read_config(tmp_path)
    for number in (2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"says that it is file 1 of 1, and stands as 1 of 3"):
        read_config(tmp_path)
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"several GGUF files; .* m-00001-of-00003.gguf, other.gguf"):
        read_config(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match="is a file that no installed format reads"):
        read_config(text)
