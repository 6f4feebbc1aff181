"""Makes a tokenizer of SentencePiece's BPE from `tokenizer.model`.

Ids, pieces and what text becomes are SentencePiece's own. (transformers 5.23 converts the same file by the class that
`tokenizer_config.json` names: of Mistral's, and of a folder without that file, it loses the space in front of a text.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers

from dovetail.base.model_files import object_if_there
from dovetail.checkpoint.spm_model import BPE, FILE, FIX, SpmModel
from dovetail.contracts.errors import ModelError
from dovetail.sdk.pieces import NORMAL, USER, add_pieces, around, merges_of, pieces_backend


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
