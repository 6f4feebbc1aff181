"""Tokenizers: expressions that go back, normalizers that grow, models of every sort, and files that lie."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dovetail_backends.gguf.cuts import CUTS
from hostile_files.texts import folder, tokenizer_json, tokenizer_state
from hostile_files.texts import read as read

ATOMS = [
    "a",
    "b",
    ".",
    r"\s",
    r"\S",
    r"\p{L}",
    r"\p{N}",
    "[ab]",
    "[^a]",
    r"[^\s\p{L}]",
    " ",
    r"\w",
    "[a-z&&[^b]]",
    "é",
    r"\n",
]
SIGNS = ["", "", "*", "+", "?", "{1,3}", "{20}", "{2,}", "{1,5000}", "*?", "++", "*+"]
AROUND = ["(", "(?:", "(?i:", "(?=", "(?!", "(?<=", "(?>", "(?<!"]
VALUES: list[Any] = [None, 0, -1, 2**31, 2**64, 1e300, "", "a", "a" * 9999, [], {}, True, [[]], {"a": 1}, "\ud7ff", 0.5]


def expression(rng: random.Random, depth: int = 0) -> str:
    """Grow an expression."""
    made = ""
    for _ in range(rng.randrange(1, 5)):
        roll = rng.random()
        if roll < 0.25 and depth < 4:
            made += rng.choice(AROUND) + expression(rng, depth + 1) + ")" + rng.choice(SIGNS)
        elif roll < 0.4:
            made += "|"
        else:
            made += rng.choice(ATOMS) + rng.choice(SIGNS)
    return made + rng.choice(["", "", "$", "x"])


def some_expression(rng: random.Random) -> str:
    """Return an expression: grown, or one of a published model with changes."""
    if rng.random() < 0.6:
        return expression(rng)
    source = rng.choice(rng.choice([*CUTS.values()]))
    at = rng.randrange(len(source))
    return source[:at] + rng.choice(["", *SIGNS, *ATOMS, "|"]) + source[at + rng.choice((0, 1)) :]


def cutting(rng: random.Random) -> str:
    """Change how text is split."""
    state = tokenizer_state()
    pick = rng.choice

    def split(pattern: dict[str, str]) -> dict[str, Any]:
        behavior = pick(["Isolated", "Removed", "MergedWithNext"])
        return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": pick((False, False, True))}

    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: split({"Regex": some_expression(rng)}),
        lambda: split({"String": pick(["a", "", " "])}),
        lambda: {"type": pick(["Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts"])},
        lambda: {"type": "Digits", "individual_digits": True},
        lambda: {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": pick((False, True))},
        lambda: {"type": "ByteLevel", "add_prefix_space": pick((False, True)), "trim_offsets": True, "use_regex": True},
    ]
    parts = [rng.choices(kinds, [8, 1, 1, 1, 1, 1])[0]() for _ in range(rng.choice((1, 1, 3, 100)))]
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*parts, state["pre_tokenizer"]]}
    return json.dumps(state)


def normalizing(rng: random.Random) -> str:
    """Change what becomes of a text before, or of tokens behind."""
    state = tokenizer_state()
    content = rng.choice(["", "a", "aa", "a" * 999, "a" * 300_000, " "])

    def replace() -> dict[str, Any]:
        regex = {"Regex": some_expression(rng)}
        return {
            "type": "Replace",
            "pattern": rng.choice([regex, {"String": rng.choice(["a", "", "▁"])}]),
            "content": content,
        }

    blob = rng.randbytes(rng.choice((0, 4, 40, 4000)))
    kinds: list[Callable[[], dict[str, Any]]] = [
        replace,
        lambda: {"type": rng.choice(["NFC", "NFKD", "Lowercase", "StripAccents", "Nmt"])},
        lambda: {"type": "Prepend", "prepend": content},
        lambda: {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()},
    ]
    parts = [rng.choices(kinds, [6, 1, 1, 1])[0]() for _ in range(rng.choice((1, 2, 30, 200)))]
    if rng.random() < 0.7:
        state["normalizer"] = {"type": "Sequence", "normalizers": parts}
    else:
        state["decoder"] = {"type": "Sequence", "decoders": [replace(), state["decoder"]]}
    return json.dumps(state)


def modelling(rng: random.Random) -> str:
    """Change the model."""
    state = tokenizer_state()
    letters = {char: at for at, char in enumerate(state["model"]["vocab"])}
    long = {"a" * size: len(letters) + size for size in range(1, rng.choice((3, 30, 600)))}
    vocab = letters | long
    pick, model = rng.choice, state["model"]
    merges = [["a", "a"], ["aa", "a"]][: rng.randrange(3)] + pick([[], [["x", "missing"]]])
    most = pick((1, 100, 10**9))
    pieces = [[token, -float(at % 9)] for at, token in enumerate(vocab)]
    prefix, is_bytes = pick(["", "##"]), pick((False, True))
    state["model"] = pick([
        {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": prefix, "max_input_chars_per_word": most,
         "vocab": vocab},
        {"type": "Unigram", "unk_id": pick((0, 5, 10**6)), "vocab": pieces, "byte_fallback": is_bytes},
        {"type": "WordLevel", "vocab": vocab, "unk_token": pick(["a", "missing"])},
        {**model, "dropout": pick((None, 0.5, 7)), "unk_token": pick((None, "missing")), "byte_fallback": is_bytes},
        {**model, "vocab": vocab, "merges": merges},
    ])  # fmt: skip
    return json.dumps(state)


def changed(rng: random.Random) -> str:
    """Change values of the file, wherever they are."""
    state = tokenizer_state()
    for _ in range(rng.choice((1, 2, 5))):
        at: Any = state
        while True:
            keys = [*at] if isinstance(at, dict) else [*range(len(at))]
            if not keys:
                break
            key = rng.choice(keys)
            if not isinstance(at[key], (dict, list)) or rng.random() < 0.3:
                at[key] = copy.deepcopy(rng.choice(VALUES))
                break
            at = at[key]
    return json.dumps(state)


def cut(rng: random.Random) -> str:
    """Cut the file off, or repeat a piece of it."""
    text = tokenizer_json()
    at, length = rng.randrange(len(text)), rng.choice((1, 10, 1000))
    return rng.choice(
        [text[:at], text[:at] + text[at + length :], text[:at] + text[at : at + length] * 3 + text[at:], "[" * 9999]
    )


def config(rng: random.Random) -> str:
    """Write a tokenizer_config.json of values that it should not have."""
    names = [
        "eos_token", "bos_token", "add_bos_token", "added_tokens_decoder", "additional_special_tokens", "pad_token",
        "chat_template", "model_input_names", "response_template", "extra_special_tokens",
    ]  # fmt: skip
    tokens = {
        str(rng.choice((0, 290, 291, -1, 10**30, "x"))): rng.choice([{"content": "<a>"}, {}, {"content": 5}, None, 7])
    }
    return json.dumps(
        {rng.choice(names): rng.choice([*VALUES, tokens, [{"name": "default"}]]) for _ in range(rng.randrange(1, 6))}
    )


KINDS: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "tokenizer, cutting": ("tokenizer.json", cutting),
    "tokenizer, normalizing": ("tokenizer.json", normalizing),
    "tokenizer, model": ("tokenizer.json", modelling),
    "tokenizer, changed": ("tokenizer.json", changed),
    "tokenizer, cut off": ("tokenizer.json", cut),
    "tokenizer, configuration": ("tokenizer_config.json", config),
}


def files(rng: random.Random, count: int) -> Iterator[tuple[str, Path]]:
    """Yield folders with hostile tokenizers."""
    for _ in range(count):
        kind = rng.choices([*KINDS], [5, 3, 2, 3, 1, 2])[0]
        name, make = KINDS[kind]
        yield kind, folder(name, make(rng))
