"""Fills a model from its files: first it is found where each tensor goes, then they are read layer by layer.

For each tensor: match by name and shape, steps and this rank's slice (both are views, so that only what is used is read
from disk), place; when a layer has all of its own, it is repacked, and the pages of the file are let go of. Experts
that stand in one tensor are read a few at a time. So host memory holds the model, on whatever device, and of the files
what a few layers are being made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from dovetail.contracts.checkpoint import CheckpointFormat
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.model import SelfLoading, WeightRule
from dovetail.runtime.checkpoint.files import Checkpoint, open_checkpoint
from dovetail.runtime.checkpoint.weight_match import Move, match_weights
from dovetail.runtime.device.devices import device_of
from dovetail.sdk.checkpoint import is_finite
from dovetail.sdk.config import some
from dovetail.sdk.layers.base import Layer
from dovetail.sdk.quantization.scratch import SCRATCH

MAX_THREADS = 8
"""That fill layers, each of which holds one layer's files in memory."""
HELD_BYTES = 64 << 20
"""Of files, after which pages are let go of in the middle of a layer: those of experts are large."""


def load_checkpoint(model: nn.Module, rules: Sequence[WeightRule], source: Checkpoint | Path) -> None:
    """Fill a model from a checkpoint, or from a folder's: by the rules, unless it reads the folder itself.

    Raises:
        ModelError: As `load_weights`.
    """
    if isinstance(model, SelfLoading):
        read = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        model.load_checkpoint(read.folder, read.headers)
    else:
        load_weights(model, rules, source)


def load_weights(model: nn.Module, rules: Sequence[WeightRule], source: Checkpoint | Path) -> None:
    """Load every tensor of a checkpoint, or of a folder's, into `model` and finalise its layers.

    Raises:
        ModelError: No safetensors, a broken file, or weights that are missing, surplus, misshapen, there twice or not
            finite; all are named with their files.
    """
    layers, checkpoint = model_layers(model), source if isinstance(source, Checkpoint) else open_checkpoint(source)
    moves = match_weights(layers, rules, checkpoint.headers, checkpoint.folder)
    device = next((param.device for param in model.parameters()), None)
    of_layer: dict[str, list[Move]] = {}
    for move in moves:
        of_layer.setdefault(move.path, []).append(move)
    poisoned: list[str] = []

    order, large = large_first(of_layer)

    def fill(path: str) -> int:
        num_bytes = _fill(layers[path], of_layer[path], checkpoint, device, poisoned)
        if path in large:  # no other one will need as much memory
            SCRATCH.clear()
        return num_bytes

    with (
        checkpoint,
        ExitStack() as stack,
        tqdm(
            total=sum(move.header.num_bytes for move in moves),
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
        ) as bar,
    ):
        stack.callback(SCRATCH.clear)
        threads = 1 if device is None or not device_of(device).is_host else MAX_THREADS
        for num_bytes in side_by_side(fill, order, threads):
            bar.update(num_bytes)
    if poisoned:
        raise ModelError(
            f"{checkpoint.folder}: weights that are not finite: {some(sorted(poisoned))}; download the checkpoint again"
        )
    finalize(layer for path, layer in layers.items() if path not in of_layer)


def large_first(of_layer: Mapping[str, Sequence[Move]]) -> tuple[list[str], set[str]]:
    """Return layers as they stand in the files, but first those with more than a sixteenth of all bytes, and these.

    They are the embeddings and the output head: at the end one thread would repack it while the others wait.
    """
    sizes = {path: sum(move.header.num_bytes for move in moves) for path, moves in of_layer.items()}
    large = {path for path, size in sizes.items() if size > sum(sizes.values()) // 16}
    return sorted(sizes, key=lambda path: -sizes[path] if path in large else 0), large


def _fill(
    layer: Layer, moves: Sequence[Move], checkpoint: Checkpoint, device: torch.device | None, poisoned: list[str]
) -> int:
    """Place all tensors of a layer and repack it; returns the bytes that were read."""
    num_bytes = first = released = 0
    for index, move in enumerate(moves):
        if not _place(layer, move, checkpoint, device):
            poisoned.append(f"{move.header.name} ({move.header.file.name})")
        num_bytes += move.header.num_bytes
        if num_bytes - released > HELD_BYTES:
            checkpoint.release(each.header.name for each in moves[first:index])
            first, released = index, num_bytes
    layer.finalize()
    SCRATCH.awaited.clear()  # what was made for this layer beside what it has places for
    SCRATCH.reuse()
    checkpoint.release(move.header.name for move in moves[first:])
    return num_bytes


def side_by_side(do: Callable[[str], int], items: Iterable[str], most: int) -> Iterator[int]:
    """Yield what `do` gives for each item, in order: in as many threads as torch has, `most` at most.

    Each of them computes alone: torch's own threads would wait for each other at every small operation.
    """
    threads, is_inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    if min(most, threads) < 2:
        yield from map(do, items)
        return

    def work(item: str) -> int:
        with torch.inference_mode(is_inference):
            return do(item)

    try:
        with ThreadPoolExecutor(min(most, threads), "load", torch.set_num_threads, (1,)) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(threads)  # theirs is their own, but threads to come begin with what was set last


def model_layers(model: nn.Module) -> dict[str, Layer]:
    """Return the layers of a model by path.

    Raises:
        PluginError: One was asked for under another name than it is kept under.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
    for path, layer in layers.items():
        if layer.path not in (None, path):
            raise PluginError(
                f"the model's layer {path!r} was asked for as {layer.path!r}: give submodules `ctx.at(…)` with their "
                "place, and matrices the attribute's name"
            )
    return layers


def _place(layer: Layer, move: Move, checkpoint: Checkpoint, device: torch.device | None) -> bool:
    """Read a tensor into its slots, some experts at a time; whether what was written is finite."""
    finite, name = True, move.header.name
    for experts in checkpoint.parts(move.header) if move.is_stacked else (None,):
        # Another rank's experts: a conversion of theirs would compute for nobody.
        if not any(layer.is_here(slot) for row in move.of(experts) for slot in row):
            continue
        tensor = checkpoint.read(name, device, in_scratch=layer.holds is not None, experts=experts)
        for slot, piece in move.pieces(tensor, experts):
            written = layer.place(slot, piece)
            finite &= written is None or is_finite(written)
        if layer.holds is False:
            SCRATCH.reuse()
        if experts is not None:
            checkpoint.release((name,), experts)
    return finite


def fill(model: nn.Module, filler: CheckpointFormat, seed: int = 0) -> None:
    """Let a format make up every parameter, and finalise the layers: for benchmarks without a checkpoint."""
    params = list(model.named_parameters())
    generator = torch.Generator(device=params[0][1].device).manual_seed(seed)
    for name, param in tqdm(params, desc="Filling weights", unit="tensor", leave=False):
        filler.fill(name, param, generator)
    finalize(model_layers(model).values())


def finalize(layers: Iterable[Layer]) -> None:
    """Let layers repack their weights."""
    for layer in list(layers):
        layer.finalize()
