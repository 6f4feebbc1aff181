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

from dovetail.config_file import read_config
from dovetail.errors import ConfigError
from dovetail.plugin_settings import ENV_PREFIX, GivenOption, PluginSettings, from_environment, merge_options
from dovetail.processing.text_settings import TextSettings

logger = logging.getLogger("dovetail")
SHORT = {
    "plugins": "plugin",
    "deny": "plugin_deny",
    "allow": "plugin_allow",
    "lock": "plugins_locked",
}
"""Arguments of `LLM` that are called otherwise on the command line."""


class OfflineSettings(TextSettings, BaseSettings):
    """Settings of `LLM`: arguments, then environment (`DOVETAIL_DTYPE`), then the file of `config`."""

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    config: Path | None = Field(None, description="YAML or TOML file with any of these settings.")

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
    values = {SHORT.get(name, name): value for name, value in given.items()}
    options = _options(values.pop("plugin_options", None))
    for name in ("plugin", "plugin_file", "plugins_dir", "plugin_deny", "plugin_allow"):
        if isinstance(found := values.get(name), str | os.PathLike):
            values[name] = [os.fspath(found)]
        elif isinstance(found, Iterable):
            values[name] = [os.fspath(item) for item in found]
    path = values.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    file = read_config(Path(path), OfflineSettings, _is_the_servers) if path else {}
    in_environment = {name for name in OfflineSettings.model_fields if os.environ.get(f"{ENV_PREFIX}{name.upper()}")}
    values = {name: value for name, value in file.items() if name not in in_environment} | values
    try:
        settings = OfflineSettings(**values)
    except ValidationError as error:
        raise ConfigError(_in_words(error)) from None
    stronger = merge_options(from_environment(os.environ), options)
    settings.plugins = merge_options(settings.plugins, stronger)
    return settings


def _options(given: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(given, Mapping | None) or not all(isinstance(s, Mapping) for s in (given or {}).values()):
        raise ConfigError(f"plugin_options={given!r}: expected {{'plugin': {{'option': value}}}}")
    noted: dict[str, Any] = {
        plugin: {name: GivenOption(value, f"plugin_options[{plugin!r}][{name!r}]") for name, value in section.items()}
        for plugin, section in (given or {}).items()
    }
    return PluginSettings.model_validate({"plugins": noted}).plugins


def _is_the_servers(key: str, value: Any) -> bool:
    logger.warning("%s: LLM has no such setting; the line of the configuration file has no effect", key)
    return True


def _in_words(error: ValidationError) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, [*OfflineSettings.model_fields, *SHORT, "plugin_options"], n=1)
        return f"LLM({name}=…): unknown argument" + (f"; did you mean {near[0]}?" if near else "")
    text = re.sub(r"^(Value error, |Input )", "", first["msg"])
    return f"LLM({name}={first['input']!r}): {text[:1].lower()}{text[1:]}"
