"""What `LLM` is started with: the settings of `dovetail serve` that are no server's."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dovetail.base.config_file import read_config
from dovetail.base.word_numbers import wanted
from dovetail.contracts.errors import ConfigError
from dovetail.processing.plugin_settings import (
    ARGUMENT,
    ENV_PREFIX,
    GivenOption,
    PluginSettings,
    from_environment,
    merge_options,
)
from dovetail.processing.text_settings import TextSettings

logger = logging.getLogger("dovetail")
SHORT = {
    "model": "model_path",
    "plugins": "plugin",
    "deny": "plugin_deny",
    "allow": "plugin_allow",
    "lock": "plugins_locked",
}
"""Arguments of `LLM` that are called otherwise on the command line."""
LISTS = {"plugin", "plugin_file", "plugins_dir", "plugin_deny", "plugin_allow"}
"""Settings that are names or paths, any number of them; an empty list leaves them to the environment and the file."""


class OfflineSettings(TextSettings, BaseSettings):
    """Settings of `LLM`: arguments, then environment (`DOVETAIL_DTYPE`), then the file of `config`."""

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    config: Path | None = Field(None, description="YAML or TOML file with any of these settings.")

    @property
    def no_decoder(self) -> str:
        """`LLM` takes none."""
        return "images are read by a server only: send them to `dovetail serve`"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments and environment; the file joins them in `read_settings`."""
        return init_settings, env_settings


def read_settings(given: Mapping[str, Any]) -> OfflineSettings:
    """Return the settings of arguments, environment and file.

    Args:
        given: Fields of `OfflineSettings`, names of `SHORT`, and `plugin_options`: options by plugin and name.

    Raises:
        ConfigError: An argument is unknown or has a wrong value.
    """
    called = _by_field(name for name in given if name != "plugin_options")
    values = {field: _path_as_text(given[name]) for field, name in called.items()}
    options = _options(given.get("plugin_options"))
    for field in sorted(LISTS & values.keys()):
        if found := _names(called[field], values.pop(field)):
            values[field] = found
    path = values.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    if path and not isinstance(path, str):
        raise ConfigError(f"LLM(config={path!r}): should be the path of a YAML or TOML file")
    file = read_config(Path(path), OfflineSettings, _is_the_servers) if path else {}
    in_environment = {name for name in OfflineSettings.model_fields if os.environ.get(f"{ENV_PREFIX}{name.upper()}")}
    values = {name: value for name, value in file.items() if name not in in_environment} | values
    try:
        settings = OfflineSettings(**values)
    except ValidationError as error:
        raise ConfigError(_in_words(error, called)) from None
    stronger = merge_options(from_environment(os.environ), options)
    settings.plugins = merge_options(settings.plugins, stronger)
    return settings


def _by_field(names: Iterable[str]) -> dict[str, str]:
    """Return the names of arguments by the settings that they are for.

    Raises:
        ConfigError: Two are for one setting.
    """
    called: dict[str, str] = {}
    for name in names:
        field = SHORT.get(name, name)
        if field in called:
            raise ConfigError(f"LLM({called[field]}=…, {name}=…): both mean the same; give one of them")
        called[field] = name
    return called


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _names(name: str, value: Any) -> list[str]:
    """Return one name or several as a list; an empty one is none that was given.

    Raises:
        ConfigError: It is something else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if value else []
    is_many = isinstance(value, Iterable) and not isinstance(value, bytes | Mapping)
    items = [_path_as_text(item) for item in value] if is_many else [value]
    if not all(isinstance(item, str) for item in items):
        what = "a path or a list of paths" if "plugin_file" in name or "dir" in name else "a name or a list of names"
        raise ConfigError(f"LLM({name}={value!r}): expected {what}")
    return items


def _options(given: Any) -> dict[str, dict[str, Any]]:
    sections = given.values() if isinstance(given, Mapping) else ()
    if (
        not isinstance(given, Mapping | None)
        or not all(isinstance(section, Mapping) for section in sections)
        or not all(isinstance(name, str) and name for name in [*(given or ()), *(n for s in sections for n in s)])
    ):
        raise ConfigError(f"plugin_options={given!r}: expected {{'plugin': {{'option': value}}}}")
    noted: dict[str, Any] = {
        plugin: {name: GivenOption(value, f"{ARGUMENT}{plugin!r}][{name!r}]") for name, value in section.items()}
        for plugin, section in (given or {}).items()
    }
    return PluginSettings.model_validate({"plugins": noted}).plugins


def _is_the_servers(key: str, value: Any) -> bool:
    logger.warning("%s: LLM has no such setting; the line of the configuration file has no effect", key)
    return True


def _in_words(error: ValidationError, called: Mapping[str, str]) -> str:
    first = error.errors()[0]
    field = str(first["loc"][0]) if first["loc"] else "settings"
    name = called.get(field, field)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, [*OfflineSettings.model_fields, *SHORT, "plugin_options"], n=1)
        known = f"did you mean {near[0]}?" if near else "known are those of `dovetail serve` that are no server's"
        return f"LLM({name}=…): unknown argument; {known}"
    said = "should be a path" if first["type"] == "path_type" else re.sub(r"^(Value error, |Input )", "", first["msg"])
    text = wanted(first, OfflineSettings.model_fields[field]) if field in OfflineSettings.model_fields else ""
    text = text or said[:1].lower() + said[1:]
    return f"LLM({name}={first['input']!r}): {text}"
