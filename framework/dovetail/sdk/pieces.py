"""Tokenizers of SentencePiece's BPE, made of pieces and scores: for formats of checkpoints that hold these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

NORMAL, CONTROL, USER = 1, 3, 4
"""Types of pieces."""
MAX_CHARS, CHARS_EACH = 1 << 26, 1 << 9
"""Characters of parts that are looked up for all pieces together, and for each besides: a second's work, and several
times what Gemma 3's take. Of a thousand pieces of `a`, one longer than the other, each joins from all shorter ones."""


def pieces_backend(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], unknown: str, *, has_prefix: bool
) -> tokenizers.Tokenizer:
    """Return BPE over pieces with `▁` for spaces and `<0x0A>` for bytes that no piece has.

    Args:
        vocab: Ids by piece.
        merges: The best first.
        unknown: The piece of what there is none for.
        has_prefix: Text gets a space in front.
    """
    made = tokenizers.Tokenizer(
        models.BPE(dict(vocab), list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if has_prefix else back)
    return made


def add_pieces(made: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add control tokens and those that a user defined: text is cut at them first."""
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER)
    ]
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])


def around(bos: Sequence[str], eos: Sequence[str], tokens: Sequence[str]) -> Any:
    """Return what puts BOS and EOS around a text."""
    ids = [(token, tokens.index(token)) for token in dict.fromkeys((*bos, *eos))]
    single = [*bos, "$A", *eos]
    pair = [*single, *(f"{part}:1" for part in (*bos, "$B", *eos))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def merges_of(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that pieces imply, the best first: each pair of pieces that joins to a piece.

    Args:
        pieces: Ids by text.
        scores: By id; a pair counts as what it makes. Equal ones go by length and id of the parts.

    Raises:
        ValueError: There are more pairs to look at than a vocabulary has.
    """
    found, lengths = [], {len(piece) for piece in pieces} - {0}
    left_chars = MAX_CHARS + CHARS_EACH * len(pieces)
    for piece, index in pieces.items():
        score, size = -scores[index], len(piece)
        # Of a piece of a million characters few cuts leave two that are as long as pieces are.
        for cut in range(1, size) if size < 2 * len(lengths) else sorted(lengths):
            if cut not in lengths or size - cut not in lengths:
                continue
            if (left_chars := left_chars - size) < 0:
                raise ValueError(
                    f"its {len(pieces):,} pieces, of up to {max(lengths):,} characters, join in too many ways"
                )
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                found.append((score, cut, len(piece) - cut, index, left, right, piece))
    found.sort()
    return [(piece[:cut], piece[cut:]) for _, cut, _, _, _, _, piece in found]
