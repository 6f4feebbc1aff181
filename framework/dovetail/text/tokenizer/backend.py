"""Loads a model folder's tokenizer: without transformers where there is a tokenizer.json."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import tokenizers

from dovetail.base.model_files import check_is_file, object_if_there
from dovetail.base.panics import is_panic
from dovetail.checkpoint.formats import StoredFormat
from dovetail.checkpoint.spm_model import FILE, FIX, spm_model
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.text.tokenizer.claims import check_claims, check_form, check_merges
from dovetail.text.tokenizer.spm import backend_of_model

CONVERTIBLE = ("vocab.json", "vocab.txt", "tekken.json")
"""What transformers converts without another library."""
FORMATS = ("tokenizer.json", FILE, *CONVERTIBLE)
OF_ITS_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that say nothing of how text is cut: their tokenizer.json does."""
OTHERS = ("*.tiktoken", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model")
"""What does not hold all that is needed: a class in code of the model's says how text is cut, or ids are moved."""


def load_backend(folder: Path, stored: StoredFormat | None = None) -> tokenizers.Tokenizer:
    """Load what a format has, or tokenizer.json, or convert an older file through transformers.

    Args:
        folder: Where the files are.
        stored: What a format of the plugin kind reads there.

    Raises:
        ModelError: There is no tokenizer, or it cannot be read or converted.
        PluginError: The format gives something else.
    """
    if stored is not None and (made := stored.ask("tokenizer")) is not None:
        if not isinstance(made, tokenizers.Tokenizer):
            raise PluginError(f"--load-format: tokenizer() of {stored.name} gives no tokenizers.Tokenizer")
        return made
    path = folder / "tokenizer.json"
    if not path.is_file():
        pieces = spm_model(folder)
        return _convert(folder) if pieces is None else backend_of_model(folder, pieces)
    check_claims(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises bare Exception, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = str(error).split("\n", 1)[0]
        raise ModelError(
            f"{path}: not a tokenizer.json that this version reads: {reason}; download it again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def check_source(folder: Path, stored: StoredFormat | None = None) -> None:
    """Refuse a folder without a tokenizer, by its files alone; arguments as of `load_backend`.

    Raises:
        ModelError: There is none, or none that can be read or converted here.
    """
    if stored is not None and stored.ask("tokenizer") is not None:
        return
    if (folder / "tokenizer.json").is_file():
        check_form(folder / "tokenizer.json")
    elif spm_model(folder) is None:
        _convertible(folder)


def _convertible(folder: Path) -> list[Path]:
    """Return the files of a tokenizer that transformers converts.

    Raises:
        ModelError: There are none, or something else is missing that it needs.
    """
    files = [folder / name for name in CONVERTIBLE if (folder / name).is_file()]
    if not files:
        others = sorted(path.name for pattern in OTHERS for path in folder.glob(pattern))
        what = (
            f"{others[0]} alone does not say how text is cut" if others else f"and no {', '.join(FORMATS[1:])} either"
        )
        raise ModelError(f"{folder}: no tokenizer: tokenizer.json is missing, {what}; copy it there, or {FIX}")
    if files[0].name == "tekken.json" and find_spec("mistral_common") is None:
        raise ModelError(f"{files[0]}: needs the package mistral-common; run: pip install mistral-common, or {FIX}")
    if files[0].name.startswith("vocab"):
        named = object_if_there(folder / "tokenizer_config.json").get("tokenizer_class")
        if named in OF_ITS_FILE:
            raise ModelError(
                f"{folder}: tokenizer.json is missing, and {files[0].name} alone does not say how text is cut: "
                f"tokenizer_class in tokenizer_config.json is {named!r}, which is any; copy tokenizer.json there, "
                f"or {FIX}"
            )
    if files[0].name == "vocab.json":
        files.append(folder / "merges.txt")  # without them, transformers would make up some
    return files


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers build a fast tokenizer from an older format. Costs seconds, and imports torch.

    Raises:
        ModelError: There is none that can be converted.
    """
    files = _convertible(folder)
    try:
        for path in files:
            check_is_file(path)
        if files[0].name == "vocab.json":
            check_merges(files[0], files[-1])
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except ModelError:
        raise
    except Exception as error:  # whatever transformers and its optional parts raise
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"{folder}: tokenizer.json is missing and converting failed: {reason}; {FIX}") from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: tokenizer.json is missing and the tokenizer has no fast form; {FIX}")
    backend.no_truncation()
    backend.no_padding()
    return backend
