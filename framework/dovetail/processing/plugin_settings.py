"""Settings that say which plugins are used and with which options: of the server, of batches and of `LLM` alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, PrivateAttr, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from dovetail.base.settings import EngineSettings, Names, Seconds, none_word, setting
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.options import option_key

ENV_PREFIX = "DOVETAIL_"
ENV_OPTION = f"{ENV_PREFIX}PLUGIN__"
ARGUMENT = "plugin_options["
"""How the source of an option begins that `LLM` was given as an argument."""
OF_THIS_RUN = ("--", ARGUMENT)
"""How the sources of options begin that were meant for this run alone: flags and arguments."""


@dataclass(frozen=True, slots=True)
class GivenOption:
    """A plugin's option as given, with where it was given, for messages.

    One that `is_public` may be shown: the plugin was looked at, and declares that it is no secret.
    """

    value: Any
    source: str
    is_public: bool = False


Given = dict[str, dict[str, GivenOption]]
"""Options by plugin and name, both normalised."""


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


def from_environment(environment: Mapping[str, str]) -> Given:
    """Return the options that environment variables hold; an empty variable is none.

    Raises:
        ConfigError: A variable names no plugin or no option.
    """
    given: Given = {}
    for variable, value in environment.items():
        if not variable.startswith(ENV_OPTION) or not value:
            continue
        plugin, _, option = variable.removeprefix(ENV_OPTION).lower().partition("__")
        if not plugin or not option:
            raise ConfigError(f"environment variable {variable}: expected {ENV_OPTION}<PLUGIN>__<OPTION>")
        given.setdefault(option_key(plugin), {})[option] = GivenOption(value, f"environment variable {variable}")
    return given


def merge_options(weaker: Mapping[str, dict[str, Any]], stronger: Mapping[str, dict[str, Any]]) -> Given:
    """Return both, `stronger` where they disagree."""
    return {plugin: {**weaker.get(plugin, {}), **stronger.get(plugin, {})} for plugin in {*weaker, *stronger}}


def is_secret(field: FieldInfo) -> bool:
    """Tell whether the setting holds what nobody may read off a message."""
    return SecretStr in {field.annotation, *get_args(field.annotation)}


PluginOptions = Annotated[Given, NoDecode, BeforeValidator(note_source)]
PluginName = Annotated[str | None, BeforeValidator(none_word)]


class PluginSettings(EngineSettings):
    """An engine's settings, and which plugins stand before it."""

    chat_template: str | None = setting(None, common=True)
    """Chat template that replaces the model's own: a Jinja file, or the name of a built-in one such as chatml or qwen3.
    """
    reasoning_parser: PluginName = setting("auto", common=True)
    """Plugin that separates reasoning from content, such as qwen3; auto: selected by the model's chat template; none:
    off.
    """
    tool_call_parser: PluginName = setting("auto", "tool-parser", common=True)
    """Plugin that parses the model's tool calls, such as hermes; auto: selected by the model's chat template; none:
    off.
    """
    grammar_backend: PluginName = setting("auto", "guided-decoding-backend", common=True)
    """Plugin that enforces structured outputs; auto: selected per request; none: off."""
    apis: Names = setting(default_factory=list)
    """APIs to serve, by plugin name, comma-separated. Each one listed is served, so to add one such as `ollama`, list
    the built-in three too.
    """
    logits_processors: Names = setting(default_factory=list)
    """Logits processors that requests may use, by plugin name, comma-separated, such as `no-repeat-ngram`."""
    strict_schema: bool = setting(False)
    """Reject a `strict` JSON schema that cannot be enforced in full, instead of validating the output."""
    refuse_validate_only: bool = setting(False)
    """Reject a JSON schema or tool for which only JSON syntax can be enforced, instead of validating the output."""
    plugin: Names = setting(default_factory=list, common=True)
    """Hook plugins to enable, comma-separated."""
    plugin_file: Names = setting(default_factory=list)
    """Python files with plugins, or directories with an __init__.py, comma-separated."""
    plugins_dir: Names = setting(default_factory=list)
    """Directories of such files and directories; all their plugins are available by name. Comma-separated."""
    plugin_deny: Names = setting(default_factory=list)
    """Packages, or package:plugin, whose plugins are never imported, comma-separated."""
    plugin_allow: Names = setting(default_factory=list)
    """The only packages, or package:plugin, allowed to provide plugins besides Dovetail's own."""
    plugins_locked: Path | None = setting(None)
    """Lock file of `dovetail plugin lock`; plugins not listed in it as installed are rejected."""
    plugin_timeout: Seconds = setting(60.0)
    """Maximum time to import or start a plugin; 0: no limit."""
    plugins: PluginOptions = setting(default_factory=dict, has_flag=False)
    """Options of plugins: `--acme.top-k 5`, or a section `plugins: {acme: {top_k: 5}}` in the file."""

    _auto_notes: tuple[str, ...] = PrivateAttr(())

    @property
    def no_decoder(self) -> str:
        """Why nothing here decodes images, whatever the model; empty where something does."""
        return ""

    @property
    def auto_notes(self) -> tuple[str, ...]:
        """Lines for the log about what `auto` chose; known once plugins are planned."""
        return self._auto_notes

    @auto_notes.setter
    def auto_notes(self, lines: tuple[str, ...]) -> None:
        self._auto_notes = lines
