"""Types of settings: how a value is read from a flag, a variable or the file, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode

from dovetail.plugins.options import option_key

SamplingName = Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]


def split_names(value: object) -> object:
    """Accept `a,b` for a list of names, as environment variables and a single flag write it, and a JSON list."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(str(value[0]))
    if isinstance(value, list):
        return [word for item in value for word in split_words(str(item))]
    return value


def split_keys(value: object) -> object:
    """As `split_names`; keys that were read already stay as they are."""
    if isinstance(value, str | list):
        items = value if isinstance(value, list) else [value]
        return [key for item in items for key in ([item] if isinstance(item, SecretStr) else split_words(str(item)))]
    return value


def read_object(value: object) -> object:
    """Accept a JSON object as text, as flags and environment variables write it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"is no JSON object: {error}") from None


def split_words(text: str) -> list[str]:
    """Return the comma-separated words of a text."""
    return [word.strip() for word in text.split(",") if word.strip()]


def check_keys(keys: list[SecretStr]) -> list[SecretStr]:
    """Refuse keys that no client could send in a header."""
    for key in keys:
        if not re.fullmatch(r"[\x21-\x7e]{1,1024}", key.get_secret_value()):
            raise ValueError("a key has 1 to 1024 printable ASCII characters and no spaces")
    return keys


def check_key(key: SecretStr | None) -> SecretStr | None:
    """As `check_keys`, for one that may be missing."""
    check_keys([] if key is None else [key])
    return key


def check_origins(origins: list[str]) -> list[str]:
    """Refuse what no browser sends as an origin."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
            raise ValueError(f"{origin!r} is no origin such as https://chat.example.org:8443 (no path), nor *")
    return origins


def check_hosts(names: list[str]) -> list[str]:
    """Refuse what no `Host` header has."""
    for name in names:
        if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", name):
            raise ValueError(f"{name!r} is no name such as chat.example.org or *.example.org (no port), nor *")
    return names


def none_word(value: object) -> object:
    """Accept `none` for an optional plugin name, and normalise the peers' spellings (`deepseek_r1`)."""
    if isinstance(value, str):
        value = value.strip().lower().replace("_", "-")
        return None if value in {"none", ""} else value
    return value


@dataclass(frozen=True, slots=True)
class GivenOption:
    """A plugin's option as given, with where it was given, for messages."""

    value: Any
    source: str


def note_source(value: object) -> object:
    """Attach the source to options that carry none: they come from the configuration file."""
    if not isinstance(value, dict):
        return value
    noted: dict[str, Any] = {}
    for plugin, section in value.items():
        if not isinstance(section, dict):
            raise ValueError(f"plugins.{plugin}: expected `option: value` lines")
        noted[option_key(str(plugin))] = {
            str(name).replace("-", "_"): given
            if isinstance(given, GivenOption)
            else GivenOption(given, f"'plugins.{plugin}.{name}' in the configuration file")
            for name, given in section.items()
        }
    return noted


PluginOptions = Annotated[dict[str, dict[str, GivenOption]], NoDecode, BeforeValidator(note_source)]
Names = Annotated[list[str], NoDecode, BeforeValidator(split_names)]
ApiKey = Annotated[SecretStr | None, AfterValidator(check_key)]
ApiKeys = Annotated[list[SecretStr], NoDecode, BeforeValidator(split_keys), AfterValidator(check_keys)]
Origins = Annotated[list[str], NoDecode, BeforeValidator(split_names), AfterValidator(check_origins)]
Hosts = Annotated[list[str], NoDecode, BeforeValidator(split_names), AfterValidator(check_hosts)]
JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(read_object)]
Sampling = Annotated[dict[SamplingName, float], NoDecode, BeforeValidator(read_object)]
PluginName = Annotated[str | None, BeforeValidator(none_word)]
