"""The files of `dovetail run-batch --ray`: chunks of lines, their results as parts, and one output for an input.

Beside the output stands a folder `.NAME.parts`: `run.json`, which says of what it holds results, and a file for each
chunk that is answered, `000012.3` for chunk 12 with 3 requests that were refused or failed. A part appears whole or not
at all, so a run that was ended goes on behind what is there, and every line has one result. The output is the parts one
behind the other, in the order of the input; then the folder goes.
"""

from __future__ import annotations

import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from dovetail.contracts.errors import ConfigError
from dovetail_server.batches.model import ENDPOINTS, endpoint_of
from dovetail_server.batches.validate import MAX_CUSTOM_ID
from dovetail_server.schema.batches import decode_line
from dovetail_server.storage.disk import open_to_read, read_at, write_whole

CHUNK_LINES = 256
CHUNK_BYTES = 8 << 20
"""A chunk ends where it has so many bytes, too: it travels in one message."""
PIECE = 1 << 20
SHOWN = 3
"""Mistakes of a file that are told."""


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Lines that are answered together: where they are in the input, and how many."""

    number: int
    offset: int
    length: int
    num_lines: int


class About(msgspec.Struct, frozen=True):
    """Of what parts are the results; parts of anything else are not put together with new ones."""

    size: int
    mtime_ns: int
    chunk_lines: int
    settings: str


@dataclass(slots=True)
class BatchFile:
    """One input and its output."""

    source: Path
    target: Path
    chunks: list[LineChunk]
    num_failed: int = 0
    done: set[int] = field(default_factory=set)

    @property
    def parts(self) -> Path:
        """Where results are until all are there."""
        return self.target.with_name(f".{self.target.name}.parts")

    @property
    def num_lines(self) -> int:
        """Requests of the input."""
        return sum(chunk.num_lines for chunk in self.chunks)

    def open(self, settings: str) -> None:
        """Begin, or go on where a run before has ended.

        Args:
            settings: What results depend on besides the input.

        Raises:
            ConfigError: What is there belongs to another input or other settings.
        """
        found = self.source.stat()
        about = About(found.st_size, found.st_mtime_ns, CHUNK_LINES, settings)
        marker = self.parts / "run.json"
        self.parts.mkdir(exist_ok=True)
        if not marker.exists():
            write_whole(marker, self.parts / ".run.tmp", [msgspec.json.encode(about)])
        elif (had := msgspec.json.decode(marker.read_bytes(), type=About)) != about:
            same_input = (had.size, had.mtime_ns) == (about.size, about.mtime_ns)
            why = "other settings" if same_input else f"another {str(self.source)!r}: it has changed since"
            raise ConfigError(f"{str(self.parts)!r} has results of a run with {why}; remove that folder to begin anew")
        for path in self.parts.glob("[0-9]*.*"):
            number, _, failed = path.name.partition(".")
            self.done.add(int(number))
            self.num_failed += int(failed)

    def lines(self, chunk: LineChunk) -> bytes:
        """Read a chunk.

        Raises:
            OSError: It cannot be read.
        """
        return read_at(self.source, chunk.offset, chunk.length)

    def save(self, chunk: LineChunk, results: bytes, num_failed: int) -> None:
        """Keep a chunk's results; they are durable when this returns."""
        write_whole(self.parts / f"{chunk.number:06d}.{num_failed}", self.parts / ".part.tmp", [results])
        self.done.add(chunk.number)
        self.num_failed += num_failed

    def finish(self) -> None:
        """Put all results together in the order of the input, and publish them."""
        paths = sorted(self.parts.glob("[0-9]*.*"), key=lambda path: int(path.name.partition(".")[0]))
        write_whole(self.target, self.target.with_name(f".{self.target.name}.tmp"), pieces_of(paths))
        for path in (*paths, self.parts / "run.json"):
            path.unlink()
        self.parts.rmdir()


def pieces_of(paths: list[Path]) -> Iterator[bytes]:
    """Yield the bytes of files, one behind the other."""
    for path in paths:
        with open_to_read(path) as file:
            while piece := file.read(PIECE):
                yield piece


def look_through(source: Path, max_line_bytes: int, others: Collection[str] = ()) -> list[LineChunk]:
    """Check every line of an input, and cut it into chunks. 8 bytes a line are held.

    Args:
        source: The input.
        max_line_bytes: Most bytes of a line.
        others: Paths of packages' APIs.

    Raises:
        ConfigError: With the first mistakes.
    """
    chunks: list[LineChunk] = []
    hashes, mistakes = array.array("Q"), list[str]()
    begin = offset = num_lines = 0
    with open_to_read(source) as file:
        for number, raw in enumerate(file, 1):
            offset += len(raw)
            if raw.strip():
                num_lines += 1
                custom_id, mistake = check_line(raw, max_line_bytes, others)
                if mistake is not None:
                    mistakes.append(f"line {number}: {mistake}")
                    if len(mistakes) >= SHOWN:
                        break
                hashes.append(int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest()))
            if num_lines == CHUNK_LINES or (num_lines and offset - begin >= CHUNK_BYTES):
                chunks.append(LineChunk(len(chunks), begin, offset - begin, num_lines))
                begin, num_lines = offset, 0
    if num_lines:
        chunks.append(LineChunk(len(chunks), begin, offset - begin, num_lines))
    if not mistakes:
        if not chunks:
            mistakes.append("it holds no request; write one JSON object per line")
        mistakes += twice(source, hashes)
    if mistakes:
        raise ConfigError(f"-i {str(source)!r}: {'; '.join(mistakes)}")
    return chunks


def check_line(raw: bytes, max_line_bytes: int, others: Collection[str]) -> tuple[str, str | None]:
    """Return a line's custom_id, and what is wrong with the line, if anything is."""
    if len(raw) > max_line_bytes:
        return "", f"it is over {max_line_bytes} bytes (--max-body-bytes)"
    try:
        line = decode_line(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return "", f"no JSON object with custom_id, method, url and body: {error}"
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID:
        return "", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters"
    if line.method != "POST":
        return line.custom_id, f"method must be 'POST', not {line.method[:64]!r}"
    if endpoint_of(line.url, others) is None:
        return line.custom_id, f"url {line.url[:128]!r} is none of {', '.join((*ENDPOINTS, *others))}"
    return line.custom_id, None


def twice(source: Path, hashes: array.array[int]) -> list[str]:
    """Return the first identifier that two lines have, as a mistake."""
    found, counts = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_counts=True)
    candidates = {int(one) for one in found[counts > 1]}
    if not candidates:
        return []
    seen: dict[str, int] = {}
    with open_to_read(source) as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            custom_id = decode_line(raw).custom_id
            if int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest()) not in candidates:
                continue
            if (first := seen.setdefault(custom_id, number)) != number:
                return [f"line {number}: custom_id {custom_id!r} is that of line {first} already"]
    return []


def files_of(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Return inputs and their outputs: of a file one pair, of a folder one for each `*.jsonl` in it.

    Raises:
        ConfigError: The folder has no input, or an output is older than its input.
    """
    if not source.is_dir():
        return [(source, target)]
    pairs = [(path, target / path.name) for path in sorted(source.glob("*.jsonl")) if path.is_file()]
    if not pairs:
        raise ConfigError(f"-i {str(source)!r}: the folder has no *.jsonl")
    for path, out in pairs:
        if out.exists() and out.stat().st_mtime_ns < path.stat().st_mtime_ns:
            raise ConfigError(f"-o {str(out)!r} is older than its input; remove it, or give another folder")
    return [(path, out) for path, out in pairs if not out.exists()]
