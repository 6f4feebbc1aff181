"""Reading a `multipart/form-data` body with one file, straight to disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from dovetail.contracts.errors import RequestError
from dovetail_server.storage.disk import create, disk_full, free_bytes, write_failed

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
MAX_HEADER_BYTES = 8192
MAX_NAME_CHARS = 512
WRITE_BYTES = 1 << 20
CHECK_BYTES = 64 << 20
"""The room on disk is looked at again after so many bytes."""


def bad_form(message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> RequestError:
    """Return the error for a form."""
    return RequestError(message, param=param, code=code, status=status)


@dataclass(slots=True)
class FormField:
    """One field while it is read."""

    headers: dict[str, str] = field(default_factory=dict)
    header_name: bytearray = field(default_factory=bytearray)
    header_value: bytearray = field(default_factory=bytearray)
    name: str = ""
    value: bytearray = field(default_factory=bytearray)
    is_file: bool = False


class FormReader:
    """Splits a form into small fields, kept, and the bytes of the field `file`, handed out as they come."""

    def __init__(self, content_type: str, max_file_bytes: int) -> None:
        """Prepare for a body of this content type.

        Raises:
            RequestError: It is no form.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            shown = repr(kind.decode("latin-1")) if kind else "is missing"
            text = f"content-type {shown}: a file is sent as multipart/form-data with the fields file and purpose"
            raise bad_form(text, code="unsupported_media_type", status=415)
        boundary = options.get(b"boundary", b"")
        if not 1 <= len(boundary) <= 256:
            raise bad_form("content-type: multipart/form-data needs a boundary", code="invalid_multipart")
        self.max_file_bytes = max_file_bytes
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_file_bytes = 0
        self.is_finished = False
        self._part = FormField()
        self._out: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece of the body and return the file's bytes in it.

        Raises:
            RequestError: The form is broken, or the file too large.
        """
        self._out = []
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise bad_form(f"the body is no valid form: {error}", code="invalid_multipart") from None
        return self._out

    def _begin(self) -> None:
        self._part = FormField()
        if len(self.fields) >= MAX_FIELDS:
            raise bad_form(f"the form has more than {MAX_FIELDS} fields", code="invalid_multipart")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._part.header_name) + len(self._part.header_value) > MAX_HEADER_BYTES or len(self._part.headers) > 8:
            raise bad_form("a field of the form has headers that are too long", code="invalid_multipart")

    def _header_end(self) -> None:
        name = self._part.header_name.decode("latin-1").lower()
        self._part.headers[name] = self._part.header_value.decode("latin-1")
        self._part.header_name.clear()
        self._part.header_value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._part.headers.get("content-disposition", ""))
        self._part.name = text_of(options.get(b"name", b""), "a field's name")
        if self._part.name in self.fields or (self._part.name == "file" and self.filename is not None):
            raise bad_form(f"the field {self._part.name!r} is given twice", self._part.name)
        if self._part.name == "file":
            if b"filename" not in options:
                raise bad_form("file must be sent as a file, with a file name", "file")
            self._part.is_file = True
            self.filename = text_of(options[b"filename"], "the file name") or "upload"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self.num_file_bytes += end - start
            if self.num_file_bytes > self.max_file_bytes:
                text = f"the file is over {self.max_file_bytes} bytes, the limit set by --max-file-bytes"
                raise bad_form(text, "file", "file_too_large", 413)
            self._out.append(data[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            raise bad_form(f"{self._part.name} is over {MAX_FIELD_BYTES} bytes", self._part.name)

    def _end(self) -> None:
        if not self._part.is_file:
            self.fields[self._part.name] = text_of(bytes(self._part.value), self._part.name)

    def _finish(self) -> None:
        self.is_finished = True


def text_of(raw: bytes, what: str) -> str:
    """Decode a short text of a form.

    Raises:
        RequestError: Not UTF-8, too long, or with control characters.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise bad_form(f"{what} is not valid UTF-8") from None
    if len(text) > MAX_NAME_CHARS:
        raise bad_form(f"{what} is over {MAX_NAME_CHARS} characters")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise bad_form(f"{what} holds a control character")
    return text


async def receive_file(reader: FormReader, body: AsyncIterator[bytes], temp: Path, min_free: int) -> None:
    """Write the form's file to `temp`; memory holds about one write at a time.

    Raises:
        RequestError: The form is broken, cut off, or without a file.
        ServiceError: The disk is full, or the file cannot be written now.
    """
    try:
        file = await asyncio.to_thread(create, temp)
        try:
            await _copy(reader, body, file, temp, min_free)
            await asyncio.to_thread(file.flush)
        finally:
            await asyncio.to_thread(file.close)
    except OSError as error:
        raise write_failed(error, min_free) from error
    if reader.filename is None:
        raise bad_form("file is required", "file", "missing_required_parameter")
    if not reader.is_finished:
        raise bad_form("the form ends before its closing boundary", code="invalid_multipart")


async def _copy(reader: FormReader, body: AsyncIterator[bytes], file: IO[bytes], temp: Path, min_free: int) -> None:
    waiting: list[bytes] = []
    size = checked = 0
    async for chunk in body:
        pieces = reader.feed(chunk)
        waiting += pieces
        size += sum(map(len, pieces))
        if size >= WRITE_BYTES:
            checked += size
            await asyncio.to_thread(file.write, b"".join(waiting))
            waiting, size = [], 0
        if checked >= CHECK_BYTES:
            checked = 0
            await asyncio.to_thread(_check_free, temp, min_free)
    await asyncio.to_thread(file.write, b"".join(waiting))


def _check_free(temp: Path, min_free: int) -> None:
    free = free_bytes(temp.parent)
    if free < min_free:
        raise disk_full(free, min_free)
