"""Two toy vocabularies: byte-level BPE, and sentencepiece-like BPE with byte fallback."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.text.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox thinks about the capital of France, and the answer is Paris",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n' * 3,
    "\n\n\n  \n élève élève naïve 中文 中文 中国 🎉🎉",
]


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<｜end｜>"])
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    words = ["▁", "t", "h", "e", "a", "P", "r", "i", "s", "th", "▁th", "▁the", "Pa", "ris", "▁Paris", "▁a"]
    vocab = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocab.update({word: 259 + n for n, word in enumerate(words)})
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("P", "a"), ("r", "i"), ("▁", "a")]
    vocab["ri"] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    files = TokenizerFiles(tokenizer_config={"eos_token": "<|im_end|>"})
    return Tokenizer(byte_level_backend(), files)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    files = TokenizerFiles(tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return Tokenizer(byte_fallback_backend(), files)
