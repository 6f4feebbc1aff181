"""The file of `--keys-file`: keys by their hashes, with roles, weights and limits. Faults are told by line."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dovetail.errors import ConfigError

MAX_BYTES = 8 << 20
MAX_KEYS = 10_000
HASH = r"^sha256:[0-9a-f]{64}$"
PER_MINUTE = 1 << 40
PRIORITIES = ((-1 << 31), (1 << 31) - 1)


def key_hash(key: str) -> str:
    """Return what the file has in place of a key, and what a key's owner is named by: the key cannot be read off it."""
    return hashlib.sha256(b"dovetail-owner:" + key.encode()).hexdigest()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class PriorityRange(_Strict):
    """Which `priority` a key's requests may have."""

    min: int = Field(default=PRIORITIES[0], ge=PRIORITIES[0], le=PRIORITIES[1], description="Lowest.")
    max: int = Field(
        default=0, ge=PRIORITIES[0], le=PRIORITIES[1], description="Highest: these go before all lower ones."
    )

    @model_validator(mode="after")
    def check_order(self) -> PriorityRange:
        """Refuse an empty range, and one without the priority of a request that asks for none."""
        if not self.min <= 0 <= self.max:
            raise ValueError("min is at most 0 and max at least 0: a request without a priority has 0")
        return self


Limit = Annotated[int | None, Field(ge=1, le=PER_MINUTE)]


class Limits(_Strict):
    """What a key may use. What is left out is bounded by the server's own limits only."""

    requests: Limit = Field(default=None, description="Requests at once, each choice counted.")
    input_tokens_per_minute: Limit = Field(default=None, description="Prompt tokens in a minute.")
    output_tokens_per_minute: Limit = Field(default=None, description="Generated tokens in a minute.")
    file_bytes: Limit = Field(default=None, description="Bytes of all its files together.")
    stored_responses: Limit = Field(default=None, description="Replies of /v1/responses that are kept, the newest.")
    batch_lines: Limit = Field(default=None, description="Requests of all its batches that have not ended.")
    priority: PriorityRange = Field(default=PriorityRange(), description="Which `priority` it may set.")


class KeyEntry(_Strict):
    """One key."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}$", description="For people: in usage and errors.")
    hash: str = Field(pattern=HASH, description="What `dovetail hash-key` prints for the key.")
    roles: tuple[Literal["user", "admin"], ...] = Field(
        default=("user",), min_length=1, max_length=2, description="`admin` may use the routes of --admin-api-key, too."
    )
    weight: float = Field(
        default=1.0,
        ge=0.01,
        le=1000,
        allow_inf_nan=False,
        description="Its share of the tokens, relative to other keys'.",
    )
    limits: Limits = Field(default=Limits(), description="What it may use.")

    @property
    def digest(self) -> str:
        """The hash alone, in hexadecimal."""
        return self.hash.removeprefix("sha256:")


class KeysFile(_Strict):
    """The whole file."""

    keys: tuple[KeyEntry, ...] = Field(max_length=MAX_KEYS)


def read_keys_file(path: Path) -> tuple[KeyEntry, ...]:
    """Read and check the file.

    Raises:
        ConfigError: It cannot be used. One line, with the line of the file and the field at fault.
    """
    where = f"--keys-file {str(path)!r}"
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{where}: is no file")
            if found.st_mode & stat.S_IWOTH:
                raise ConfigError(f"{where}: everybody may write to it, and give themselves a key; chmod o-w it")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; give a readable YAML file") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{where}: is over {MAX_BYTES} bytes")
    try:
        loader = yaml.BaseLoader(raw.decode("utf-8"))  # all values are texts, which the schema converts
        node = loader.get_single_node()
        lines = dict(_lines(node, ()))
        value = None if node is None else loader.construct_document(node)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{where} line {line}: not UTF-8") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = 1 if mark is None else mark.line + 1
        raise ConfigError(f"{where} line {line}: not valid YAML{f': {problem}' if problem else ''}") from None
    except RecursionError:
        raise ConfigError(f"{where} line 1: is nested too deeply") from None
    except _FaultError as error:
        raise ConfigError(f"{where} {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} line 1: expected `keys:` and a list of keys")
    try:
        keys = KeysFile.model_validate(value).keys
    except ValidationError as error:
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if first["type"] == "extra_forbidden":
            text = f"is no field; possible: {', '.join(_known(first['loc']))}"
        raise ConfigError(f"{where} {_place(lines, first['loc'])} {text[:1].lower()}{text[1:]}") from None
    for field in ("name", "hash"):
        counts = Counter(getattr(key, field) for key in keys)
        for i, key in enumerate(keys):
            if counts[getattr(key, field)] > 1:
                counts[getattr(key, field)] = -1
            elif counts[getattr(key, field)] < 0:
                raise ConfigError(f"{where} {_place(lines, ('keys', i, field))} another key has it, too")
    return keys


class _FaultError(Exception):
    """A fault of the file that neither YAML nor the schema knows."""


def _lines(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield the line of each value, by its path.

    Raises:
        _FaultError: A field stands twice in one place, or an alias in any: what it repeats may have no end.
    """
    seen: set[int] = set()
    stack = [] if node is None else [(node, path)]
    while stack:
        node, path = stack.pop()
        line = node.start_mark.line + 1
        if id(node) in seen:
            raise _FaultError(f"line {line}: YAML's aliases (*name) are not taken; write the value out")
        seen.add(id(node))
        yield path, line
        if isinstance(node, yaml.SequenceNode):
            stack += [(item, (*path, i)) for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for name, item in node.value:
                if name.value in names:
                    raise _FaultError(f"line {name.start_mark.line + 1}: {str(name.value)!r} is given twice")
                names.add(str(name.value))
                stack.append((item, (*path, str(name.value))))


def _place(lines: dict[tuple[str | int, ...], int], loc: tuple[int | str, ...]) -> str:
    """Word where a value stands: `line 7: keys[0].limits.requests`."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc).removeprefix(".")
    near = loc
    while near and near not in lines:
        near = near[:-1]
    return f"line {lines.get(near, 1)}: {path or 'the file'}"


MODELS: dict[str, type[BaseModel]] = {"keys": KeyEntry, "limits": Limits, "priority": PriorityRange}


def _known(loc: tuple[int | str, ...]) -> list[str]:
    """Return the fields that may stand where an unknown one does."""
    model: type[BaseModel] = KeysFile
    for step in loc[:-1]:
        model = MODELS.get(str(step), model)
    return list(model.model_fields)
