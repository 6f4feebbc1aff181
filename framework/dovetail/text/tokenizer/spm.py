"""Makes a tokenizer of SentencePiece's BPE, from `tokenizer.model` or from what a GGUF file has of it.

Ids, pieces and what text becomes are SentencePiece's own. (transformers 5.23 converts the same file by the class that
`tokenizer_config.json` names: of Mistral's, and of a folder without that file, it loses the space in front of a text.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from dovetail.checkpoint.spm_model import BPE, FILE, FIX, SpmModel
from dovetail.contracts.errors import ModelError
from dovetail.model_files import object_if_there

NORMAL, CONTROL, USER = 1, 3, 4
"""Types of pieces."""
MAX_CHARS, CHARS_EACH = 1 << 26, 1 << 9
"""Characters of parts that are looked up for all pieces together, and for each besides: a second's work, and several
times what Gemma 3's take. Of a thousand pieces of `a`, one longer than the other, each joins from all shorter ones."""


def backend_of_model(folder: Path, model: SpmModel) -> tokenizers.Tokenizer:
    """Return the tokenizer of a folder's `tokenizer.model`, with BOS and EOS where tokenizer_config.json asks for them.

    Raises:
        ModelError: It is no BPE, its table of characters is broken, or its pieces join in too many ways.
    """
    if model.algorithm != BPE:
        raise ModelError(f"{folder / FILE}: is a Unigram model; without tokenizer.json only BPE is served; {FIX}")
    vocab = {token: index for index, token in enumerate(model.tokens)}
    spaced = {i for i, kind in enumerate(model.types) if kind == USER and "▁" in model.tokens[i]}
    pieces = {token: i for token, i in vocab.items() if model.types[i] == NORMAL or i in spaced}
    try:
        merges = merges_of(pieces, model.scores)
    except ValueError as error:
        raise ModelError(f"{folder / FILE}: {error}; {FIX}") from None
    made = pieces_backend(vocab, merges, model.tokens[model.unknown], has_prefix=model.has_prefix)
    before: list[Any] = [normalizers.Precompiled(_checked(folder, model.table))] if model.table else []
    if model.collapses:
        before += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    made.normalizer = normalizers.Sequence([*before, made.normalizer])
    add_pieces(made, model.tokens, model.types)
    config, named = object_if_there(folder / "tokenizer_config.json"), model.special_tokens()
    wanted = {"bos_token": config.get("add_bos_token", True), "eos_token": config.get("add_eos_token", False)}
    bos, eos = ([named[name]] if is_wanted and name in named else [] for name, is_wanted in wanted.items())
    made.post_processor = around(bos, eos, model.tokens)
    return made


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


def check_table(table: bytes) -> None:
    """Check a table of characters, about which the library would panic.

    Raises:
        ValueError: It is broken.
    """
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 + size or size % 4:
        raise ValueError(f"a trie of {size} bytes in a table of {len(table)}")
    table[4 + size :].decode()


def _checked(folder: Path, table: bytes) -> bytes:
    try:
        check_table(table)
    except ValueError as error:
        raise ModelError(f"{folder / FILE}: its table of characters is broken ({error}); download it again") from error
    return table
