"""The file of `--keys-file`: keys by their hashes, with roles, weights and limits. Faults are told by line."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from dovetail.contracts.errors import ConfigError

MAX_BYTES = 8 << 20
MAX_KEYS = 10_000
HASH = r"^sha256:[0-9a-f]{64}$"
PER_MINUTE = 1 << 40
PRIORITIES = ((-1 << 31), (1 << 31) - 1)
Steps = tuple[str | int, ...]


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

    keys: Annotated[tuple[KeyEntry, ...], FailFast()] = Field(max_length=MAX_KEYS)


def read_keys_file(path: Path) -> tuple[KeyEntry, ...]:
    """Read and check the file.

    Raises:
        ConfigError: It cannot be used. One line, with the line of the file and the field at fault.
    """
    where = f"--keys-file {str(path)!r}"
    try:
        # Without O_NONBLOCK a named pipe keeps whoever opens it waiting until somebody writes to it.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
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
    from dovetail_server.tenants import lined_yaml  # YAML, for servers that have such a file

    lines: dict[Steps, int] = {}
    try:
        value = lined_yaml.read(raw, lines)
    except lined_yaml.FaultError as error:
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


def _place(lines: dict[Steps, int], loc: Steps) -> str:
    """Word where a value stands: `line 7: keys[0].limits.requests`."""
    names = (
        f"[{step}]" if isinstance(step, int) else "." + (step if step.isprintable() else repr(step)) for step in loc
    )
    path = "".join(names).removeprefix(".")
    near = loc
    while near and near not in lines:
        near = near[:-1]
    return f"line {lines.get(near, 1)}: {path or 'the file'}"


MODELS: dict[str, type[BaseModel]] = {"keys": KeyEntry, "limits": Limits, "priority": PriorityRange}


def _known(loc: Steps) -> list[str]:
    """Return the fields that may stand where an unknown one does."""
    model: type[BaseModel] = KeysFile
    for step in loc[:-1]:
        model = MODELS.get(str(step), model)
    return list(model.model_fields)


# Reading the file of `--keys-file` again when it has changed.

logger = logging.getLogger("dovetail.server")
EVERY_S = 1.0
Stamp = tuple[int, ...] | str


class KeysFileWatch:
    """Follows one file. While it cannot be used, which is logged and counted, the keys before hold."""

    def __init__(self, path: Path, use: Callable[[Sequence[KeyEntry]], None], every_s: float = EVERY_S) -> None:
        """Read the file for the first time, and give `use` its keys; so again whenever others are in it.

        Raises:
            ConfigError: It cannot be used.
        """
        self.path = path
        self.num_failures = 0
        """Times that a changed file could not be used."""
        self.is_current = True
        """Whether the keys in force are those of the file."""
        self._use = use
        self._every_s = every_s
        self._known = _stamp(path)
        use(read_keys_file(path))

    async def follow(self) -> None:
        """Look at the file now and then, for ever."""
        last = self._known
        while True:
            await asyncio.sleep(self._every_s)
            stamp = await asyncio.to_thread(_stamp, self.path)
            if stamp == last and stamp != self._known:  # whoever writes it has come to an end
                self._known = stamp
                await self._read()
            last = stamp

    async def _read(self) -> None:
        try:
            keys = await asyncio.to_thread(read_keys_file, self.path)
        except ConfigError as error:
            self.num_failures += 1
            self.is_current = False
            logger.error("%s. The keys before this change stay in force.", error)
            return
        self.is_current = True
        self._use(keys)
        logger.info("Keys file %s reloaded: %d keys.", self.path, len(keys))


def _stamp(path: Path) -> Stamp:
    """Return what changes whenever a file does, or why it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError as error:
        return str(error.strerror)
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
