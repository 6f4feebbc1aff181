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
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from dovetail.gguf.reader import Gguf
from dovetail.gguf.texts import START, special_tokens, texts, wrong_tokenizer
from dovetail.text.tokenizer.gguf_cuts import ADDS_BOS, COMPOSED, CUTS, IGNORES_MERGES

NORMAL, CONTROL, USER = 1, 3, 4


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
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER)
    ]
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])
    made.post_processor = _around(gguf, str(kind), tokens)
    return made


def _byte_level(gguf: Gguf, vocab: Mapping[str, int]) -> tokenizers.Tokenizer:
    pre = gguf.metadata.get(START + "pre")
    if pre not in CUTS:
        raise wrong_tokenizer(gguf, f"cuts text as tokenizer.ggml.pre = {pre!r} says; possible: {', '.join(CUTS)}")
    merges = _merges(gguf)
    broken = next((merge for merge in merges if not all(part in vocab for part in merge)), None)
    if broken is not None:
        raise wrong_tokenizer(gguf, f"has the merge {' '.join(broken)!r}, and not both of its parts as tokens")
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
        merges = _merges(gguf)
    else:
        scores = gguf.numbers(START + "scores")
        if scores is None or len(scores) != len(tokens):
            raise wrong_tokenizer(gguf, f"has {len(scores or ()):,} scores for {len(tokens):,} tokens")
        is_gemma = str(gguf.metadata.get("general.architecture")).startswith("gemma")
        merges = merges_of(pieces, [-index for index in range(len(tokens))] if is_gemma else scores)
    made = tokenizers.Tokenizer(
        models.BPE(dict(vocab), merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    has_prefix = gguf.metadata.get(START + "add_space_prefix", True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if has_prefix else back)
    return made


def merges_of(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that pieces imply, the best first: each pair of pieces that joins to a piece.

    Args:
        pieces: Ids by text.
        scores: By id; a pair counts as what it makes. Equal ones go by length and id of the parts.
    """
    found, lengths = [], {len(piece) for piece in pieces} - {0}
    for piece, index in pieces.items():
        score, size = -scores[index], len(piece)
        # Of a piece of a million characters few cuts leave two that are as long as pieces are.
        for cut in range(1, size) if size < 2 * len(lengths) else sorted(lengths):
            if cut not in lengths or size - cut not in lengths:
                continue
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                found.append((score, cut, len(piece) - cut, index, left, right, piece))
    found.sort()
    return [(piece[:cut], piece[cut:]) for _, cut, _, _, _, _, piece in found]


def _merges(gguf: Gguf) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in texts(gguf, "merges"))]


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
    ids = [(token, tokens.index(token)) for token in dict.fromkeys((*bos, *eos))]
    single = [*bos, "$A", *eos]
    pair = [*single, *(f"{part}:1" for part in (*bos, "$B", *eos))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
