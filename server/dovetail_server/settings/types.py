"""Types of settings: how a value is read from a flag, a variable or the file, and what is refused."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode

from dovetail.base.word_lists import given_names, split_words
from dovetail_server.schema.tags import TAGS


def split_keys(value: object) -> object:
    """As `given_names`; keys that were read already stay as they are."""
    if isinstance(value, str | list):
        items = value if isinstance(value, list) else [value]
        keys = [key for item in items for key in ([item] if isinstance(item, SecretStr) else split_words(str(item)))]
        return keys or given_names(value)
    return value


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


def check_aliases(aliases: list[str]) -> list[str]:
    """Refuse an API without routes that name a model, a pattern of nothing, and JSON: no alias has a target."""
    for alias in aliases:
        api, is_for_api, pattern = alias.rpartition("=")
        if not pattern or pattern[0] in "{[" or (is_for_api and api not in TAGS):
            raise ValueError(f"{alias!r} is no PATTERN such as gpt-*, nor API=PATTERN with API of: {', '.join(TAGS)}")
    return aliases


ApiKey = Annotated[SecretStr | None, AfterValidator(check_key)]
ApiKeys = Annotated[list[SecretStr], NoDecode, BeforeValidator(split_keys), AfterValidator(check_keys)]
Origins = Annotated[list[str], NoDecode, BeforeValidator(given_names), AfterValidator(check_origins)]
Aliases = Annotated[list[str], NoDecode, BeforeValidator(given_names), AfterValidator(check_aliases)]
Hosts = Annotated[list[str], NoDecode, BeforeValidator(given_names), AfterValidator(check_hosts)]
