"""From settings to a plugin plan: rules, files, hook plugins, options, and what `--help` says of plugins.

Order: read metadata under the deny list, allow list and lock; run plugin files; enable hook plugins, which may register
more and propose defaults; choose; check options; load what this process needs, so that mistakes show at once.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from dovetail.contracts import ConfigDraft
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins import HookManager, PlannedPlugin, PluginPlan, Registry, load, make_plan
from dovetail.plugins.files import add_file, given_files
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.loader import describe, import_planned, naming_plugin, options_of
from dovetail.plugins.lock import check_files, read_lock
from dovetail.plugins.options import Option, OptionError, describe_options, option_key, plain_options
from dovetail.plugins.plan import AUTO, as_planned
from dovetail.plugins.records import PluginState
from dovetail.plugins.time_limit import time_limit
from dovetail.processing.plugin_settings import (
    ARGUMENT,
    OF_THIS_RUN,
    GivenOption,
    PluginSettings,
    is_secret,
)
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.device.devices import check_device
from dovetail.runtime.hf_config import quant_method, vision_type

logger = logging.getLogger("dovetail.plugins")
NAMED = {kind.name: kind.setting for kind in KINDS.values() if kind.setting}
"""The setting that names the plugin of a kind."""


S = TypeVar("S", bound=PluginSettings)


Added = Callable[[Registry], Mapping[str, str | list[str]]]
"""Registers plugins that are not installed, and returns settings that name them."""
Scanned = tuple[Registry, HookManager]
FindOptions = Callable[[PlannedPlugin], type[Any] | None]
"""Returns a plugin's `Options`; imports the plugin."""


def plan_plugins(
    settings: S,
    model: ModelFolder,
    added: Added | None = None,
    scanned: Callable[[], Scanned] | None = None,
    device: str | None = None,
    *,
    loads: bool = True,
) -> tuple[S, Registry, PluginPlan]:
    """Choose the plugins; enabled hook plugins may register more and propose defaults first.

    Args:
        settings: Names, rules and options.
        model: What the model's folder says.
        added: Registers more plugins, and returns settings that name them.
        scanned: What is installed, where it has been read.
        device: The kind of device to plan for; None: what is here.
        loads: Whether what this process needs is loaded: it will serve.

    Raises:
        PluginError: One that was asked for is unknown or cannot be used, or an option is wrong.
    """
    try:
        registry, manager = scanned() if scanned is not None else scan(settings)
        if added is not None:
            settings = settings.model_copy(update=added(registry))
        facts = {"architecture": model.architecture, "device": settings.device, "model_path": settings.model_path}
        settings = configure(settings, manager if manager.planned else None, facts)
        settings = with_parsers(settings, registry, manager, facts, model)
        plan = make_plan(
            registry,
            model=model.architecture,
            **{kind: getattr(settings, name) for kind, name in NAMED.items()},
            checkpoint=model.formats.used(model.path, settings.tokenizer_folder),
            prefill_attention_backend=settings.prefill_attention_backend,
            decode_attention_backend=settings.decode_attention_backend,
            hooks=[planned.qualified for planned in manager.planned],
            device=device or check_device(registry, settings.device),
            quant_method=quant_method(model.config),
            vision=vision_type(model.config),
            model_impl=settings.model_impl,
            select=manager.select,
            timeout_s=settings.plugin_timeout,
        )
        settings, plan = without_images(settings, registry, plan)
        if settings.plugins_locked is not None:
            check_files({p.distribution for p in plan.plugins if not registry.resolve(p.kind, p.qualified).builtin})
        plan = with_options(plan, settings, manager)
        if loads:
            warn_of_private_imports(registry, plan)
            make_parsers(plan)
    except OptionError as error:
        raise PluginError(in_users_words(error, settings)) from None
    return settings, registry, plan


def without_images(settings: S, registry: Registry, plan: PluginPlan) -> tuple[S, PluginPlan]:
    """Leave out the image processor, and with it the model's tower, where nothing would decode an image."""
    unused, why = plan.of_kind("processor"), settings.no_decoder
    if not (unused and why):
        return settings, plan
    for planned in unused:
        registry.mark(planned.kind, planned.qualified, PluginState.FOUND, why)
    rest = tuple(planned for planned in plan.plugins if planned not in unused)
    return settings.model_copy(update={"processor": None}), msgspec.structs.replace(plan, plugins=rest)


def warn_of_private_imports(registry: Registry, plan: PluginPlan) -> None:
    """Say in the log which packages import what any release may move: they work now, and may not after an upgrade."""
    records = [registry.resolve(planned.kind, planned.qualified) for planned in plan.plugins if planned.distribution]
    strangers = {
        (record.distribution, record.file or re.split("[.:]", record.target)[0]): record
        for record in records
        if not record.builtin
    }
    if not strangers:
        return
    from dovetail.plugins.core_imports import ADVICE, private_imports

    for record in strangers.values():
        if found := private_imports(record):
            text = "%s imports %s, which any release of Dovetail may move or change; %s."
            logger.warning(text, describe(as_planned(record)), ", ".join(found), ADVICE)


def make_parsers(plan: PluginPlan) -> None:
    """Load what this process needs and make the parsers once: what cannot be made is refused before anything starts.

    Raises:
        PluginError: One cannot be imported or made.
    """
    loaded = load(plan, "api")
    for kind in ("reasoning_parser", "tool_parser"):
        for planned, parser in loaded.candidates(kind):
            limit = time_limit(f"{describe(planned)}: making it", plan.timeout_s)
            with limit, naming_plugin(loaded), loaded.watched(planned):
                parser()


def configure(settings: S, manager: HookManager | None, facts: dict[str, Any]) -> S:
    """Apply the defaults that plugins propose, each with its reason in the log; what the user gave stays.

    Raises:
        ConfigError: A proposed value is not possible.
    """
    if manager is None:
        return settings
    fields = type(settings).model_fields
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    draft = ConfigDraft(frozenset(fields), given)
    manager.configure(draft, facts)
    for proposal in draft.proposals:
        state = "sets" if proposal.applied else "would set"
        value = "a secret" if is_secret(fields[proposal.key]) else repr(proposal.value)
        logger.info("Plugin %s %s %s to %s: %s.", proposal.plugin, state, proposal.key, value, proposal.why)
    defaults = draft.defaults()
    try:
        checked = type(settings)(**(given | defaults))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""  # none: settings that do not go together
        is_shown = name and not is_secret(fields[name])
        shown = f"{name} {first['input']!r}" if is_shown else name or "settings"
        raise ConfigError(f"a plugin proposes {shown}: {first['msg']}") from None
    return settings.model_copy(update={name: getattr(checked, name) for name in defaults})


def with_parsers(
    settings: S, registry: Registry, manager: HookManager, facts: Mapping[str, Any], model: ModelFolder
) -> S:
    """Answer `auto` for the parsers: a hook plugin's choice, or what the model's chat template shows.

    Raises:
        ConfigError: The tokenizer's files or the chat template cannot be read.
        PluginError: A parser that is named cannot be used.
    """
    given = {"reasoning_parser": settings.reasoning_parser, "tool_parser": settings.tool_call_parser}
    if AUTO not in given.values():
        return settings
    from dovetail.text.detection.detect import resolve_parsers

    found, notes = resolve_parsers(
        registry,
        model.with_tokenizer(settings.tokenizer_folder).texts,
        given,
        chat_template=settings.chat_template,
        select=manager.select,
        facts={key: str(value) for key, value in facts.items()},
        timeout_s=settings.plugin_timeout,
    )
    settings = settings.model_copy(update={NAMED[kind]: name for kind, name in found.items()})
    settings.auto_notes = (*settings.auto_notes, *notes)
    return settings


def scan(settings: PluginSettings) -> tuple[Registry, HookManager]:
    """Read what is installed under the settings' rules, run plugin files, and enable hook plugins.

    Raises:
        PluginError: A lock file, a plugin file or a hook plugin cannot be used.
    """
    lock = read_lock(settings.plugins_locked) if settings.plugins_locked is not None else None
    registry = Registry.scan(deny=settings.plugin_deny, allow=settings.plugin_allow, lock=lock)
    names = list(settings.plugin)
    for file, given in given_files(settings.plugin_file, settings.plugins_dir).items():
        if lock is not None:
            raise PluginError(f"{given}: a file cannot be locked; leave out --plugins-locked")
        if (found := add_file(registry, file, settings.plugin_timeout, given)) is not None:
            names.append(found)
    sections = {
        plugin: {n: given.value for n, given in section.items()} for plugin, section in settings.plugins.items()
    }
    return registry, HookManager.enable(registry, names, options=sections, timeout_s=settings.plugin_timeout)


def with_options(plan: PluginPlan, settings: PluginSettings, manager: HookManager) -> PluginPlan:
    """Return the plan with each plugin's options, checked where the plugin is loaded in this process.

    Several plugins may share a name; each gets the options that it declares, and one that none declares is an error.

    Raises:
        OptionError: An option is unknown or has a wrong value.
        ConfigError: A flag names a plugin that is not selected.
    """
    check_sections(plan, settings)
    find = partial(options_class, manager=manager, timeout_s=plan.timeout_s)
    planned = []
    for plugin in plan.plugins:
        section = settings.plugins.get(option_key(plugin.name), {})
        given = {name: option.value for name, option in section.items()}
        sharing = [p for p in plan.plugins if option_key(p.name) == option_key(plugin.name)]
        if "api" in plugin.roles and given:
            given = _own_options(plugin, given, sharing, find)
            _mark_public(sharing, section, find)
        planned.append(msgspec.structs.replace(plugin, options=given))
    return msgspec.structs.replace(plan, plugins=tuple(planned))


def _mark_public(sharing: list[PlannedPlugin], section: dict[str, GivenOption], find: FindOptions) -> None:
    """Note which options of a section may be shown: those of plugins that are looked at here, as these declare them."""
    if all("api" in other.roles for other in sharing):
        described = [option for other in sharing for option in _declared(find(other))]
        secrets = {option.name for option in described if option.is_secret}
        for name in {option.name for option in described} & section.keys() - secrets:
            section[name] = dataclasses.replace(section[name], is_public=True)


def check_sections(plan: PluginPlan, settings: PluginSettings) -> None:
    """Refuse options that this run was given for a plugin that is not selected.

    The file and the environment may hold them for other runs.

    Raises:
        ConfigError: A flag, or `LLM`'s `plugin_options`, names such a plugin.
    """
    selected = {option_key(plugin.name): plugin.name for plugin in plan.plugins}
    for name, section in settings.plugins.items():
        if name in selected or not section:
            continue
        sources = [option.source for option in section.values()]
        given = [source for source in sources if source.startswith(OF_THIS_RUN)]
        text = f"{(given or sources)[0]}: plugin {name!r} is not selected; selected: {', '.join(selected.values())}"
        if given:
            fix = f"plugins=[{name!r}]" if given[0].startswith(ARGUMENT) else f"--plugin {name}"
            raise ConfigError(f"{text}; name it, for example with {fix}")
        logger.warning("%s. It has no effect.", text)


def _own_options(
    plugin: PlannedPlugin, given: dict[str, Any], sharing: list[PlannedPlugin], find: FindOptions
) -> dict[str, Any]:
    """Return the options that `plugin` declares of those given under its name, as checked plain values."""
    declared = find(plugin)
    known = {option.name for option in _declared(declared)}
    looked_at = [other for other in sharing if other is not plugin and "api" in other.roles]
    others = {option.name for other in looked_at for option in _declared(find(other))}
    elsewhere = any("api" not in other.roles for other in sharing)
    own = {name: value for name, value in given.items() if name in known or not (name in others or elsewhere)}
    if declared is None:
        for name in own:
            raise OptionError(name, "unknown; this plugin has no options", describe(plugin), plugin.name)
        return {}
    return plain_options(declared, options_of(msgspec.structs.replace(plugin, options=own), declared))


def _declared(cls: type[Any] | None) -> list[Option]:
    return [] if cls is None else describe_options(cls)


def options_class(plugin: PlannedPlugin, manager: HookManager, timeout_s: float) -> type[Any] | None:
    """Return a plugin's `Options`; imports the plugin."""
    if plugin.kind == "hooks":
        return next((r.value for r in manager.settings() if r.plugin.qualified == plugin.qualified), None)
    found: type[Any] | None = import_planned(msgspec.structs.replace(plugin, options={}), timeout_s).Options
    return found


def in_users_words(error: OptionError, settings: PluginSettings) -> str:
    """Word a wrong option with the flag, variable or line that gave it."""
    section = settings.plugins.get(option_key(error.plugin), {})
    given = section.get(error.name.replace("-", "_"), GivenOption(None, f"option {error.name!r}"))
    return f"{given.source}: {error.reason}; it is an option of {error.owner}"
