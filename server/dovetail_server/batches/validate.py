"""Looking through a batch's input before anything of it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from dovetail_server.apis.messages.batches import ENDPOINT
from dovetail_server.batches.model import MAX_ERRORS, same_endpoint
from dovetail_server.schema.batches import BatchError, decode_line
from dovetail_server.schema.tags import MESSAGES, OPENAI
from dovetail_server.serving.served import Served
from dovetail_server.storage.disk import open_to_read

MAX_CUSTOM_ID = 512


class ModelOfLine(msgspec.Struct):
    """The part of a body that is looked at early."""

    model: Any = None


decode_model = msgspec.json.Decoder(ModelOfLine).decode


@dataclasses.dataclass(slots=True)
class ValidatedFile:
    """What an input file holds: where its lines are, or why it is refused."""

    lines: list[tuple[int, str, int, int]] = dataclasses.field(default_factory=list)
    """Line number, custom_id, offset and length in bytes."""
    errors: list[BatchError] = dataclasses.field(default_factory=list)
    model: str | None = None


class Validator:
    """Reads one file; CPU and disk work, for a worker thread."""

    def __init__(
        self, endpoint: str, served: Served | None, *, max_lines: int, max_line_bytes: int, left: int | None = None
    ) -> None:
        """Set what is allowed.

        Args:
            endpoint: The batch's.
            served: Names that a line may ask for; None where a package's API reads them.
            max_lines: Most lines of a batch.
            max_line_bytes: Most bytes of a line.
            left: Most lines that the batch's owner may have beside those of its other batches; None for any number.
        """
        self.left = left
        self.endpoint = endpoint
        self.served = served
        self.tag = MESSAGES if endpoint == ENDPOINT else OPENAI
        self.max_lines = max_lines
        self.max_line_bytes = max_line_bytes
        self.found = ValidatedFile()
        self._ids: dict[str, int] = {}

    def read(self, path: Path) -> ValidatedFile:
        """Check every line, up to the first `MAX_ERRORS` mistakes."""
        with open_to_read(path) as file:
            for line_no, offset, raw in self._split(file):
                if len(self.found.lines) >= self.max_lines:
                    what = f"more than {self.max_lines} requests (--max-batch-lines); split it"
                    self.found.errors = [too_many(what)]
                    break
                if self.left is not None and len(self.found.lines) >= self.left:
                    self.found.errors = [too_many_for(self.left)]
                    break
                custom_id = self._check(line_no, raw)
                self.found.lines.append((line_no, custom_id, offset, len(raw)))
                if len(self.found.errors) >= MAX_ERRORS:
                    break
        if not self.found.lines and not self.found.errors:
            text = "the input file holds no request; write one JSON object per line"
            self.found.errors.append(BatchError(code="empty_file", message=text, param="input_file_id"))
        return self.found

    def _split(self, file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, offset and bytes of every line that is not blank."""
        offset = line_no = 0
        while raw := file.readline(self.max_line_bytes + 2):
            line_no += 1
            if raw.strip():
                yield line_no, offset, raw
            offset += len(raw)
            while len(raw) > self.max_line_bytes and not raw.endswith(b"\n"):
                raw = file.readline(self.max_line_bytes + 2)
                offset += len(raw)

    def _check(self, line_no: int, raw: bytes) -> str:
        """Note what is wrong with a line and return its custom_id, if any."""
        if len(raw) > self.max_line_bytes:
            self._note("invalid_json_line", f"the line is over {self.max_line_bytes} bytes", line_no)
            return ""
        try:
            line = decode_line(raw)
            model = decode_model(line.body).model
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            text = f"the line is no JSON object with custom_id, method, url and body: {error}"
            self._note("invalid_json_line", text, line_no)
            return ""
        self._check_id(line_no, line.custom_id)
        if line.method != "POST":
            self._note("invalid_method", f"method must be 'POST', not {line.method[:64]!r}", line_no, "method")
        if not same_endpoint(line.url, self.endpoint):
            text = f"url {line.url[:128]!r} is not the batch's endpoint, {self.endpoint!r}"
            self._note("url_mismatch", text, line_no, "url")
        if isinstance(model, str):
            self._check_model(line_no, model)
        return line.custom_id

    def _check_id(self, line_no: int, custom_id: str) -> None:
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID or "\0" in custom_id:
            text = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters, none of them NUL"
            self._note("invalid_json_line", text, line_no, "custom_id")
        elif custom_id in self._ids:
            text = f"custom_id {custom_id!r} is that of line {self._ids[custom_id]} already"
            self._note("duplicate_custom_id", text, line_no, "custom_id")
        else:
            self._ids[custom_id] = line_no

    def _check_model(self, line_no: int, model: str) -> None:
        if self.served is None:
            return
        if not self.served.takes(model, self.tag):
            text = f"the model {model[:128]!r} does not exist here; served: {', '.join(self.served.names)}"
            self._note("model_mismatch", text, line_no, "body.model")
        elif self.found.model is None and model in self.served.names:
            self.found.model = model

    def _note(self, code: str, message: str, line: int, param: str | None = None) -> None:
        if len(self.found.errors) < MAX_ERRORS:
            self.found.errors.append(BatchError(code=code, message=message, param=param, line=line))


def too_many(what: str) -> BatchError:
    """Return the error for a batch with too many lines."""
    return BatchError(code="too_many_tasks", message=f"the input file holds {what}", param="input_file_id")


def too_many_for(left: int) -> BatchError:
    """Return the error for a batch with more lines than its owner may have beside those of its other batches."""
    what = f"more than the {left} requests that your key may add to its batches now"
    return too_many(f"{what}; split it, or wait for others to end")
