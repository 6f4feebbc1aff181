"""GGUF files whose heads lie: values of keys, counts, lengths, tensors."""

from __future__ import annotations

import math
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gguf_files import write_gguf

from hostile_files.claims import checkpoint, value, words
from hostile_files.claims import read as read_config
from hostile_files.claims import start as start

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MORE = words("""
    attention.key_length attention.value_length attention.sliding_window attention.scale attention.causal
    attention.head_count_kv attn_logit_softcapping expert_count expert_used_count expert_feed_forward_length
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.dimension_count
    rope.freq_base rope.freq_base_swa vocab_size context_length block_count embedding_length feed_forward_length
""")
PLACES = ("general.alignment", "general.architecture", "split.count", "split.no", "split.tensors.count")


@dataclass
class Head:
    """A file's head, taken apart.

    Attributes:
        keys: Name, type and bytes of each value.
        tensors: Name, axes, type and offset of each.
        data: What stands behind the head.
    """

    keys: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes

    def write(self, rng: random.Random, lie: bool) -> bytes:
        """Put it together, with other counts if it is to lie about them."""
        made = bytearray()
        for name, kind, raw in self.keys:
            made += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + raw
        for name, axes, kind, offset in self.tensors:
            made += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(axes))
            made += b"".join(struct.pack("<Q", axis % (1 << 64)) for axis in axes)
            made += struct.pack("<IQ", kind % (1 << 32), offset % (1 << 64))
        counts = [len(self.tensors), len(self.keys)]
        if lie:
            counts[rng.randrange(2)] = rng.choice((0, 1, counts[0] + 1, 1 << 20, 1 << 40, (1 << 64) - 1))
        head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + made
        return head + bytes(-len(head) % 32) + self.data


@cache
def base(kind: str) -> bytes:
    """A good file."""
    file = Path(tempfile.mkdtemp(dir="/tmp")) / "base.gguf"
    write_gguf(checkpoint(kind), file)
    return file.read_bytes()


def taken_apart(data: bytes) -> Head:
    """Read a good file."""
    at = 8

    def number(kind: str) -> int:
        nonlocal at
        (found,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return int(found)

    def text() -> bytes:
        nonlocal at
        size = number("Q")
        at += size
        return data[at - size : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            inner, num = number("I"), number("Q")
            for _ in range(num):
                skip(inner)
        else:
            at += struct.calcsize("<" + SCALARS[kind])

    num_tensors, num_keys = number("Q"), number("Q")
    keys, tensors = [], []
    for _ in range(num_keys):
        name, kind, start = text(), number("I"), at
        skip(kind)
        keys.append((name, kind, data[start:at]))
    for _ in range(num_tensors):
        name, num_axes = text(), number("I")
        tensors.append((name, [number("Q") for _ in range(num_axes)], number("I"), number("Q")))
    return Head(keys, tensors, data[-(-at // 32) * 32 :])


def encoded(rng: random.Random, given: Any) -> tuple[int, bytes]:
    """Write a value as a type that may hold it, or as one that does not."""
    if isinstance(given, (list, dict)):
        items = list(given)[:50]
        inner = rng.choice((4, 6, 8, 9, 10))
        raw = b"".join(_item(inner, item) for item in items)
        return 9, struct.pack("<IQ", inner, rng.choice((len(items), len(items), 1 << 33, (1 << 64) - 1))) + raw
    kind = 8 if isinstance(given, str) else rng.choice((*SCALARS, 8, 99)) if given is None else rng.choice((*SCALARS,))
    return kind, _item(kind, given)


def _item(kind: int, given: Any) -> bytes:
    if kind not in SCALARS:
        raw = str(given).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(raw)) + raw
    code = SCALARS[kind]
    if code in "fd":
        try:
            return struct.pack("<" + code, float(given))
        except (OverflowError, TypeError, ValueError):
            return struct.pack("<" + code, math.inf)
    whole = int(given) if isinstance(given, (int, float)) and math.isfinite(given) else 1 << 63
    return (whole % (1 << 8 * struct.calcsize("<" + code))).to_bytes(struct.calcsize("<" + code), "little")


def keys(rng: random.Random, head: Head) -> None:
    """Give keys of the model other values."""
    start = next(raw[8:] for name, _, raw in head.keys if name == b"general.architecture")
    own = [index for index, (name, _, _) in enumerate(head.keys) if name.startswith(start)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.6:
            index = rng.choice(own)
            head.keys[index] = (head.keys[index][0], *encoded(rng, value(rng)))
        else:
            name = rng.choice([start + b"." + key.encode() for key in MORE] + [key.encode() for key in PLACES])
            head.keys = [key for key in head.keys if key[0] != name]
            head.keys.append((name, *encoded(rng, value(rng))))


def vocabulary(rng: random.Random, head: Head) -> None:
    """Give keys of the tokenizer other values."""
    own = [index for index, (name, _, _) in enumerate(head.keys) if name.startswith(b"tokenizer")]
    for index in rng.sample(own, rng.randrange(1, 3)):
        head.keys[index] = (head.keys[index][0], *encoded(rng, value(rng)))


def gone(rng: random.Random, head: Head) -> None:
    """Leave keys or tensors out, or have them twice."""
    for entries in (head.keys, head.tensors):
        if entries and rng.random() < 0.6:
            index = rng.randrange(len(entries))
            entries[index : index + 1] = [entries[index]] * rng.choice((0, 0, 2))  # type: ignore[list-item]


def tensors(rng: random.Random, head: Head) -> None:
    """Change axes, types, places and names of tensors."""
    for index in rng.sample(range(len(head.tensors)), rng.choice((1, 1, 2, 4))):
        name, axes, kind, offset = head.tensors[index]
        number = value(rng)
        whole = number if isinstance(number, int) else 1 << 63
        what = rng.randrange(5)
        if what == 0:
            axes = [*axes]
            axes[rng.randrange(len(axes))] = whole
        elif what == 1:
            axes = rng.choice([[], [*axes, 1], axes[::-1], axes * 3, [1, *axes], [0]])
        elif what == 2:
            kind = rng.choice((*range(40), 255, 1 << 31))
        elif what == 3:
            offset = rng.choice([0, whole, offset + 32, offset + 1])
        else:
            name = rng.choice(
                [b"", b"rope_freqs.weight", b"blk.99999.attn_q.weight", b"x" * 70_000, b"\xff", name[:-1]]
            )
        head.tensors[index] = (name, axes, kind, offset)


CHANGES: tuple[Callable[[random.Random, Head], None], ...] = (keys, keys, keys, vocabulary, gone, tensors)


def files(rng: random.Random, count: int) -> Iterator[tuple[str, Path]]:
    """Yield files."""
    for _ in range(count):
        data = base(rng.choice(FAMILIES))
        change = rng.choice((*CHANGES, None, None))
        if change is not None:
            head = taken_apart(data)
            change(rng, head)
            data = head.write(rng, rng.random() < 0.1)
        elif rng.random() < 0.5:
            data = data[: rng.randrange(len(data))]
        else:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 4, 40))):
                changed[rng.randrange(4, 8000)] = rng.choice((0, 255, rng.randrange(256)))
            data = bytes(changed)
        folder = Path(tempfile.mkdtemp())
        (folder / rng.choice(("m.gguf", "m.gguf", "m.gguf", "m-00001-of-00001.gguf"))).write_bytes(data)
        yield f"gguf: {'bytes' if change is None else change.__name__}", folder


def read(path: Path) -> float:
    """Do what a start does, the tokenizer included.

    Raises:
        ConfigError: The file is refused.
    """
    from dovetail.checkpoint.tokenizer_files import TokenizerFiles
    from dovetail.runtime.checkpoint.files import open_checkpoint
    from dovetail.text.tokenizer.backend import load_backend

    read_config(path)
    TokenizerFiles.read(path)
    load_backend(path)
    open_checkpoint(path)
    return 0.0
