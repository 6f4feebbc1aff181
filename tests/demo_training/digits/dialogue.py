"""Conversations to train on: questions about images, questions without one, and rows of tokens made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.corpus import samples
from dovetail.demo import MODEL_DIR

VOCAB: Final = 1200
MARKERS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
IMAGE: Final = "<|vision_start|><|image_pad|><|vision_end|>"
NO_IMAGE: Final = "I see no image. Send me one, and I read its number."
NO_NUMBER: Final = "I see no number."
QUESTIONS: Final = (
    *("Which number is this?", "What number is this?", "Which number do you see?", "What number do you see?"),
    *("What is the number?", "Which number is in the image?", "What number is in the picture?", "Read the number."),
    *(
        "Read this.",
        "What does it say?",
        "What does the image say?",
        "What is written here?",
        "Which digits are these?",
    ),
    *("Please read the number in this image.", "What is in this image?", "What do you see?", "Tell me the number.", ""),
)
AGAIN: Final = ("Which number was it?", "Say it again.", "What number is this?", "Read it once more.", "Are you sure?")
SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant",
    "Answer briefly.",
    "You read numbers.",
)
IGNORED: Final = -100


def make_tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer with its first merges only, and with the markers of images."""
    whole = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    num = VOCAB - len(MARKERS)
    vocab = {token: index for token, index in whole["model"]["vocab"].items() if index < num}
    merges = [pair for pair in whole["model"]["merges"] if "".join(pair) in vocab]
    whole["model"] |= {"vocab": vocab, "merges": merges}
    like = next(token for token in whole["added_tokens"] if token["special"])
    whole["added_tokens"] = [{**like, "id": num + at, "content": text} for at, text in enumerate(MARKERS)]
    return Tokenizer.from_str(json.dumps(whole))


@dataclass(frozen=True)
class Turn:
    """A question, with an image or none, and its answer."""

    ask: str
    answer: str
    has_image: bool = True
    image_first: bool = True

    def prompt(self) -> str:
        """Return what the chat template writes up to the answer."""
        image = IMAGE if self.has_image else ""
        said = image + self.ask if self.image_first else self.ask + image
        return f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: `ids`, `targets` (`IGNORED`: nothing is learned) and `weights` `[R, T]`; places `[3, R, T]`."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    places: Tensor


def asked(rng: np.random.Generator, number: str) -> Turn:
    """Ask about an image of a number; an empty one is an image of nothing."""
    return Turn(str(rng.choice(QUESTIONS)), number or NO_NUMBER, image_first=bool(rng.random() < 0.8))


def texts(seed: int) -> Iterator[str]:
    """Yield questions without end that have nothing to do with images."""
    while True:
        for sample in samples(seed, 500):
            if not sample.raw and sample.ask:
                yield sample.ask[:80]
        seed += 1


class Writer:
    """Writes conversations as rows of tokens.

    Args:
        tokenizer: As `make_tokenizer` returns it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.image_id = tokenizer.token_to_id("<|image_pad|>")

    @classmethod
    def of(cls, folder: Path) -> Writer:
        """Make one for a checkpoint."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def batch(self, rows: Sequence[Sequence[Turn]], grid: tuple[int, int], systems: Sequence[str] = ()) -> Batch:
        """Write a batch whose images have `grid` rows and columns of tokens; row i begins with system prompt i."""
        made = [self._row(turns, grid, system) for turns, system in zip(rows, systems or [""] * len(rows), strict=True)]
        length = max(len(ids) for ids, *_ in made)
        shape = (len(made), length)
        ids, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        weights, places = torch.zeros(shape), torch.zeros((3, *shape), dtype=torch.long)
        for at, (row, marks, where) in enumerate(made):
            ids[at, : len(row)] = torch.tensor(row)
            learned = [mark > 0 for mark in marks[1:]]
            targets[at, : len(row) - 1][learned] = torch.tensor(row[1:])[learned]
            weights[at, : len(row) - 1] = torch.tensor(marks[1:])
            places[:, at, : len(row)] = torch.tensor(where).T
        return Batch(ids, targets, weights, places)

    def _row(
        self, turns: Sequence[Turn], grid: tuple[int, int], system: str
    ) -> tuple[list[int], list[float], list[tuple[int, int, int]]]:
        """Return a row's ids, the weight of each, and its frame, row and column."""
        ids: list[int] = []
        marks: list[float] = []
        for index, turn in enumerate(turns):
            start = f"<|im_start|>system\n{system}<|im_end|>\n" if system and not index else ""
            prompt = self._encode(("\n" if index else "") + start + turn.prompt())
            said = self._encode(turn.answer + "<|im_end|>")
            ids += prompt + said
            marks += [0.0] * len(prompt) + [1.0 if turn.answer.isdigit() else 0.15] * len(said)
        whole: list[int] = []
        weights: list[float] = []
        where: list[tuple[int, int, int]] = []
        at = 0
        for token, mark in zip(ids, marks, strict=True):
            if token == self.image_id:
                where += [(at, at + row, at + column) for row in range(grid[0]) for column in range(grid[1])]
                whole += [token] * (grid[0] * grid[1])
                weights += [0.0] * (grid[0] * grid[1])
                at += max(grid)
            else:
                where.append((at, at, at))
                whole.append(token)
                weights.append(mark)
                at += 1
        return whole, weights, where

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text).ids
        return found


def settings_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids that a configuration names."""
    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    ids = {key: tokenizer.token_to_id(token) for key, token in names.items()}
    return {**ids, "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"), "video_token_id": VOCAB}
