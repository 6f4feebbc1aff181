"""The configuration file: YAML or TOML, whose keys are settings under any of their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dovetail.contracts.errors import ConfigError


def field_aliases(settings: type[BaseModel]) -> dict[str, str]:
    """Map every accepted name of a setting, written with underscores, to its field name."""
    names: dict[str, str] = {}
    for name, field in settings.model_fields.items():
        extra = field.json_schema_extra
        aliases = extra.get("aliases", []) if isinstance(extra, dict) else []
        for alias in [name, *(aliases if isinstance(aliases, list) else [])]:
            names[str(alias).replace("-", "_")] = name
    return names


def read_config(
    path: Path, settings: type[BaseModel], means_nothing: Callable[[str, Any], bool] = lambda key, value: False
) -> dict[str, Any]:
    """Read a YAML or, by its suffix, TOML file; keys may be written as flags or fields, under any accepted name.

    Args:
        path: The file.
        settings: Whose fields they are.
        means_nothing: Asked about a key that is no field, with its value: whether it may be left out.

    Raises:
        ConfigError: The file is missing, is not a mapping, or gives one setting under two names.
    """
    import tomllib

    import yaml

    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {str(path)!r}: {error.strerror}; give a readable YAML or TOML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise ConfigError(f"--config {str(path)!r}: not valid YAML{line}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {str(path)!r}: not valid TOML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {str(path)!r}: expected `setting: value` lines, found a {type(data).__name__}")
    aliases, found = field_aliases(settings), dict[str, Any]()
    for key, value in data.items():
        name = str(key).replace("-", "_")
        field = aliases.get(name, name)
        if field not in settings.model_fields and means_nothing(str(key), value):
            continue
        if field in found:
            raise ConfigError(f"--config {str(path)!r}: {key!r} is another name of a setting that is already given")
        found[field] = value
    found.pop("config", None)
    return found
