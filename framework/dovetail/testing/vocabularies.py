"""Tiny tokenizers of the two families that models use, made in memory."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dovetail.text.tokenizer import Tokenizer
from dovetail.text.tokenizer_files import TokenizerFiles

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_CORPUS = [
    "the quick brown fox thinks about the capital of France, and the answer is Paris",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n' * 3,
    "\n\n\n  \n élève élève naïve 中文 中文 中国 🎉🎉",
]


def byte_level(added: Sequence[str] = MARKERS) -> Tokenizer:
    """Return a byte-level BPE tokenizer of about 430 tokens.

    Args:
        added: Added tokens that are not special: a format's markers.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(list(added))
    return Tokenizer(backend, TokenizerFiles(tokenizer_config={"eos_token": "<|im_end|>"}))


def byte_fallback() -> Tokenizer:
    """Return a sentencepiece-like tokenizer of about 280 tokens: `▁` for a space, `<0x0A>` for bytes."""
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
    return Tokenizer(backend, TokenizerFiles(tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
