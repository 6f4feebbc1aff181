"""Frames on a socket between processes: a 4-byte big-endian length, then msgpack."""

from __future__ import annotations

import struct

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30


def frame(payload: bytes) -> bytes:
    """Put the length in front."""
    return HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the frames that are complete.

        Raises:
            ValueError: A frame is longer than 1 GiB.
        """
        self._buffer += data
        frames, at = [], 0
        while len(self._buffer) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, at)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
            end = at + HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[at + HEADER.size : end]))
            at = end
        del self._buffer[:at]
        return frames
