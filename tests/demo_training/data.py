"""Feeds the trainer: worker processes write and tokenize documents while the network already learns."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.corpus import documents
from demo_training.model import Group

LENGTHS: Final = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""The row lengths that documents are padded to, in tokens; each divides `GROUP_TOKENS`."""
GROUP_TOKENS: Final = 12_288

Rows = dict[int, tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]]
"""For each row length, tokens and loss weights, both [rows, length]."""

_tokenizer: Tokenizer | None = None


def load_worker(path: str) -> None:
    """Loads the tokenizer of a worker process."""
    global _tokenizer
    _tokenizer = Tokenizer.from_file(path)


def start_worker(path: str) -> None:
    """Prepares a worker process: one thread, and behind the trainer, which a GPU waits for."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(10)
    load_worker(path)


def _weights(prompt: int, completion: int, whole: bool) -> list[int]:
    """Returns the weight of each token of a document, in units of 1/20: long answers count less per token."""
    value = max(4, round(20 * math.sqrt(min(1.0, 32 / max(1, completion)))))
    return [4 if whole else 0] * prompt + [value] * completion


def make_shard(seed: int, count: int) -> Rows:
    """Writes, tokenizes and pads `count` documents.

    Raises:
        RuntimeError: The worker has no tokenizer.
    """
    if _tokenizer is None:
        raise RuntimeError("load_worker has not run")
    texts = list(documents(seed, count))
    prompts = _tokenizer.encode_batch([text.prompt for text in texts])
    completions = _tokenizer.encode_batch([text.completion for text in texts])
    rows: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in LENGTHS}
    for text, prompt, completion in zip(texts, prompts, completions, strict=True):
        ids = prompt.ids + completion.ids
        length = next((length for length in LENGTHS if length >= len(ids)), None)
        if length is not None:
            rows[length].append((ids, _weights(len(prompt.ids), len(completion.ids), text.whole)))
    return {length: _padded(found, length) for length, found in rows.items() if found}


def _padded(
    found: list[tuple[list[int], list[int]]], length: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Pads ids and weights with zeros at the right."""
    tokens = np.zeros((len(found), length), np.uint16)
    weights = np.zeros((len(found), length), np.uint8)
    for i, (ids, values) in enumerate(found):
        tokens[i, : len(ids)] = ids
        weights[i, : len(values)] = values
    return tokens, weights


@dataclass
class _Store:
    """The rows of one length: those being served, in random order, and those that have just arrived."""

    tokens: Tensor
    weights: Tensor
    order: Tensor
    at: int = 0
    fresh: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Feed:
    """Batches of documents from worker processes; rows repeat only when the workers fall behind.

    Args:
        tokenizer: The path of `tokenizer.json`.
        device: Where batches go.
        workers: How many processes write documents.
        shard: How many documents a process writes at a time.
        most: The number of shards after which the workers stop.
        seed: Seeds the order of rows; shard i is written with seed `seed + i`.
    """

    def __init__(self, tokenizer: Path, device: torch.device, workers: int, shard: int, most: int, seed: int) -> None:
        self._device = device
        self._random = torch.Generator().manual_seed(seed)
        self._stores: dict[int, _Store] = {}
        self._arrived: list[Rows] = []
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._failure: BaseException | None = None
        self._left = most
        self._next, self._shard = seed, shard
        self._totals = dict.fromkeys(LENGTHS, 0)
        self._served = dict.fromkeys(LENGTHS, 0)
        self.documents = 0
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(str(tokenizer),))
        for _ in range(2 * workers):
            self._submit()

    def _submit(self) -> None:
        """Asks for one more shard."""
        if self._left > 0:
            self._left -= 1
            future = self._pool.submit(make_shard, self._next, self._shard)
            self._next += 1
            future.add_done_callback(self._take)

    def _take(self, future: Future[Rows]) -> None:
        """Receives a shard, or the reason why there is none."""
        if future.cancelled():
            return
        failure = future.exception()
        with self._lock:
            if failure is None:
                self._arrived.append(future.result())
            else:
                self._failure = failure
        self._first.set()
        try:
            self._submit()
        except (RuntimeError, BrokenProcessPool):  # the pool is closed, or broken: `batch` reports that
            return

    def _absorb(self) -> None:
        """Moves shards that have arrived to the device."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            failure = self._failure
        if failure is not None:
            raise failure
        for rows in arrived:
            for length, (tokens, weights) in rows.items():
                pair = (
                    torch.from_numpy(tokens.astype(np.int16)).to(self._device),
                    torch.from_numpy(weights).to(self._device),
                )
                self._totals[length] += tokens.size
                self.documents += len(tokens)
                if length not in self._stores:
                    order = torch.randperm(len(tokens), generator=self._random).to(self._device)
                    self._stores[length] = _Store(*pair, order)
                else:
                    self._stores[length].fresh.append(pair)

    def _draw(self, length: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns `count` rows of one length, new ones first."""
        store = self._stores[length]
        picked: list[Tensor] = []
        while count:
            if store.at == len(store.order):
                begin = len(store.tokens) if store.fresh else 0
                if store.fresh:
                    store.tokens = torch.cat([store.tokens, *(tokens for tokens, _ in store.fresh)])
                    store.weights = torch.cat([store.weights, *(weights for _, weights in store.fresh)])
                    store.fresh = []
                order = torch.randperm(len(store.tokens) - begin, generator=self._random) + begin
                store.order, store.at = order.to(self._device), 0
            taken = store.order[store.at : store.at + count]
            store.at += len(taken)
            count -= len(taken)
            picked.append(taken)
        at = torch.cat(picked)
        return store.tokens[at].long(), store.weights[at].float() / 20

    def batch(self, groups: int, group_tokens: int = GROUP_TOKENS) -> tuple[Tensor, Tensor, Tensor, list[Group]]:
        """Returns tokens, targets and loss weights, each [groups * group_tokens], and the shape of the groups.

        Row lengths come up in proportion to the tokens that the corpus has in them.
        """
        self._first.wait()
        self._absorb()
        parts: list[tuple[Tensor, Tensor]] = []
        shapes: list[Group] = []
        for _ in range(groups):
            total = sum(self._totals.values())
            done = sum(self._served.values()) + group_tokens
            length = max(self._stores, key=lambda item: self._totals[item] / total * done - self._served[item])
            self._served[length] += group_tokens
            parts.append(self._draw(length, group_tokens // length))
            shapes.append((group_tokens // length, length))
        tokens = torch.cat([part.flatten() for part, _ in parts])
        targets = torch.cat([part.roll(-1, 1).flatten() for part, _ in parts])
        weights = torch.cat([_shifted(part).flatten() for _, part in parts])
        return tokens, targets, weights, shapes

    def close(self) -> None:
        """Stops the workers."""
        self._left = 0
        self._pool.shutdown(wait=False, cancel_futures=True)


def _shifted(weights: Tensor) -> Tensor:
    """Aligns weights [rows, length] with the targets; the last position of a row has none."""
    shifted = weights.roll(-1, 1)
    shifted[:, -1] = 0
    return shifted
