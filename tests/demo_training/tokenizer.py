"""Trains the demo model's byte-level BPE tokenizer on a slice of the corpus and writes it as `transformers` reads it.

Run it as `python -m demo_training.tokenizer --out DIR`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tqdm import tqdm

from demo_training.corpus import documents
from dovetail.demo import MODEL_DIR

VOCAB_SIZE: Final = 4096
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words take their leading space; digits stand alone; punctuation never swallows a letter or a line break, so that
# names keep the same pieces in prose and in JSON and a prompt's last token does not depend on what follows it.
_SPLIT: Final = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}[\p{L}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"


def texts(count: int, seed: int) -> Iterator[str]:
    """Yields the prompt and the completion of `count` documents, with every marker cut out."""
    for document in documents(seed, count):
        for text in (document.prompt, document.completion):
            for marker in (*SPECIAL, *MARKERS):
                text = text.replace(marker, "\n")
            yield text


def train_tokenizer(count: int, seed: int) -> Tokenizer:
    """Trains on `count` documents and appends the markers as single ids after the learned vocabulary."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tqdm(texts(count, seed), total=2 * count, desc="tokenizer"), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = out / "chat_template.jinja"
    if template.resolve() != (MODEL_DIR / "chat_template.jinja").resolve():
        shutil.copyfile(MODEL_DIR / "chat_template.jinja", template)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tokenizer = train_tokenizer(options.documents, options.seed)
    save_tokenizer(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {options.out}")


if __name__ == "__main__":
    main()
