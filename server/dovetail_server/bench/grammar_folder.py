"""A model folder for `dovetail bench grammar`: a tokenizer, given or made up, and a tiny model of as many tokens."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.tables import table

SIZE = 131_072
END = "<|im_end|>"
CONFIG: dict[str, Any] = table(__file__, "tiny.json")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def make_folder(folder: Path, tokenizer: Path | None) -> Path:
    """Write a model folder for `load_format="dummy"`.

    Args:
        folder: Where to write; exists.
        tokenizer: A folder with a tokenizer; None for one of `SIZE` made-up tokens.

    Raises:
        ConfigError: The tokenizer has no `tokenizer.json`.
    """
    if tokenizer is None:
        backend = synthetic()
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), encoding="utf-8")
    else:
        if not (tokenizer / "tokenizer.json").is_file():
            raise ConfigError(f"--tokenizer-path {str(tokenizer)!r}: holds no tokenizer.json")
        for name in _FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = backend.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": size}), encoding="utf-8")
    return folder


def synthetic(size: int = SIZE) -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer of words and pieces of words; it writes each byte by itself."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    seen = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(seen) < size - 1:
        word = "".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(1, 9)))
        # About one token in thirty of real vocabularies holds a quote or a newline.
        lead = rng.choice(("", " ", " ", "_", ".")) if rng.random() < 0.97 else rng.choice(("\n", '"', "  "))
        tail = rng.choice(("", "", "", "é", "1")) if rng.random() < 0.98 else rng.choice(('"', '":', '",', "\n"))
        [(text, _)] = byte_level.pre_tokenize_str(lead + rng.choice((word, word.title())) + tail)
        seen[text] = None
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(seen)}, []))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return backend
