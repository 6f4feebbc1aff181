"""Makes a tokenizer of the vocabulary in a GGUF file.

Two kinds of `tokenizer.ggml.model` are read. `gpt2` is byte-level BPE with its merges, and `tokenizer.ggml.pre` names
the expressions that cut text first. `llama` is BPE as SentencePiece has it: spaces are `▁`, bytes that no piece has are
`<0x0A>`, and the merges follow from the scores.

`tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 defined by the user, 5 unused, 6 a byte.

Sources: llama.cpp's `llama-vocab.cpp` and transformers' `convert_slow_tokenizer.py`, read November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from dovetail.sdk.pieces import NORMAL, add_pieces, around, merges_of, pieces_backend
from dovetail_backends.gguf.cuts import ADDS_BOS, COMPOSED, CUTS, IGNORES_MERGES
from dovetail_backends.gguf.reader import Gguf
from dovetail_backends.gguf.texts import START, special_tokens, texts, wrong_tokenizer


def backend_of(gguf: Gguf) -> tokenizers.Tokenizer:
    """Return the tokenizer, with BOS and EOS where the file asks for them.

    Raises:
        ModelError: It is of another kind, its lists do not go together, or how it cuts text is not known.
    """
    kind = gguf.metadata.get(START + "model")
    tokens = texts(gguf, "tokens")
    types = gguf.numbers(START + "token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise wrong_tokenizer(gguf, f"has {len(tokens):,} tokens and {len(types):,} types")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise wrong_tokenizer(gguf, f"has the token {twice!r} twice")
    if kind == "gpt2":
        made = _byte_level(gguf, vocab)
    elif kind == "llama":
        made = _sentencepiece(gguf, vocab, types)
    else:
        raise wrong_tokenizer(
            gguf, f"is of the kind {kind!r}; possible: gpt2 (byte-level BPE), llama (SentencePiece's BPE)"
        )
    add_pieces(made, tokens, types)
    made.post_processor = _around(gguf, str(kind), tokens)
    return made


def _byte_level(gguf: Gguf, vocab: Mapping[str, int]) -> tokenizers.Tokenizer:
    pre = gguf.metadata.get(START + "pre")
    if pre not in CUTS:
        raise wrong_tokenizer(gguf, f"cuts text as tokenizer.ggml.pre = {pre!r} says; possible: {', '.join(CUTS)}")
    merges = _merges(gguf, vocab)
    model = models.BPE(dict(vocab), merges, ignore_merges=pre in IGNORES_MERGES)
    made = tokenizers.Tokenizer(model)
    if pre in COMPOSED:
        made.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in CUTS[pre]]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(gguf: Gguf, vocab: Mapping[str, int], types: Sequence[int]) -> tokenizers.Tokenizer:
    tokens = list(vocab)
    unknown = gguf.token_id("unknown") or 0
    if not 0 <= unknown < len(tokens):
        raise wrong_tokenizer(gguf, f"says that the unknown token is {unknown} of {len(tokens):,}")
    pieces = {token: index for token, index in vocab.items() if types[index] == NORMAL}
    if gguf.metadata.get(START + "merges") is not None:
        merges = _merges(gguf, vocab)
    else:
        scores = gguf.numbers(START + "scores")
        if scores is None or len(scores) != len(tokens):
            raise wrong_tokenizer(gguf, f"has {len(scores or ()):,} scores for {len(tokens):,} tokens")
        is_gemma = str(gguf.metadata.get("general.architecture")).startswith("gemma")
        try:
            merges = merges_of(pieces, [-index for index in range(len(tokens))] if is_gemma else scores)
        except ValueError as error:
            raise wrong_tokenizer(gguf, f"cannot be used: {error}") from None
    has_prefix = bool(gguf.metadata.get(START + "add_space_prefix", True))
    return pieces_backend(vocab, merges, tokens[unknown], has_prefix=has_prefix)


def _merges(gguf: Gguf, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in texts(gguf, "merges"))]
    broken = next((merge for merge in merges if not all(part in vocab for part in (*merge, "".join(merge)))), None)
    if broken is not None:  # the library panics where it joins to more than its longest token
        what = "what they make" if all(part in vocab for part in broken) else "both of its parts"
        raise wrong_tokenizer(gguf, f"has the merge {' '.join(broken)!r}, and not {what} as tokens")
    return merges


def _around(gguf: Gguf, kind: str, tokens: Sequence[str]) -> Any:
    """Return what puts BOS and EOS around a text."""
    adds_bos = kind == "llama" or gguf.metadata.get(START + "pre") in ADDS_BOS
    begins = gguf.metadata.get(START + "add_bos_token", adds_bos)
    ends = gguf.metadata.get(START + "add_eos_token", False)
    named = special_tokens(gguf)
    wanted = {"bos_token": begins, "eos_token": ends}
    for name, is_wanted in wanted.items():
        if is_wanted and name not in named:
            raise wrong_tokenizer(gguf, f"is to add {name}, and does not say which token it is")
    bos, eos = ([named[name]] if is_wanted else [] for name, is_wanted in wanted.items())
    return around(bos, eos, tokens)
