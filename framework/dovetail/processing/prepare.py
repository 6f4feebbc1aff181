"""What comes before an engine: the model's folder, its checks and the plugin plan; for server, batches and `LLM` alike.

All of it takes milliseconds where nothing is fetched, so a mistake shows before weights, processes or the port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from dovetail.checkpoint.formats import Formats
from dovetail.contracts.config import ranks_for
from dovetail.contracts.errors import ModelError
from dovetail.contracts.needs import unserved
from dovetail.plugins import PluginPlan, Registry
from dovetail.plugins.config_facts import config_facts
from dovetail.plugins.plan import AUTO
from dovetail.processing.images import max_patches_of
from dovetail.processing.plan import Added, plan_plugins, scan
from dovetail.processing.plugin_settings import PluginSettings
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.hub import with_folders
from dovetail.runtime.device.devices import check_device
from dovetail.runtime.hf_config import CONFIG_KEYS
from dovetail.runtime.memory.checks import check_settings as check_memory_settings

S = TypeVar("S", bound=PluginSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPreparation(Generic[S]):
    """What an engine and its parsers start with.

    Attributes:
        settings: With the folders of what they name on a hub, the defaults that plugins propose, and the parsers found.
        registry: All plugins that are installed or given.
        plan: Those that are used.
        model: What the model's folder says.
    """

    settings: S
    registry: Registry
    plan: PluginPlan
    model: ModelFolder


def prepare(settings: S, added: Added | None = None, *, text: bool = True) -> StartPreparation[S]:
    """Fetch and check the model, and choose the plugins; of its weights, nothing is kept.

    Args:
        settings: As the user gave them.
        added: Registers plugins that are not installed, and returns settings that name them.
        text: Whether texts will be read; False: the model may have no tokenizer.

    Raises:
        ModelError: The model cannot be fetched or served.
        ConfigError: Settings do not go together.
        PluginError: A plugin that was asked for cannot be used.
    """
    found = examine(settings, added, text=text, loads=True)
    return replace(found, model=found.model.without_weights())


def examine(
    settings: S,
    added: Added | None = None,
    *,
    text: bool = True,
    device: str | None = None,
    loads: bool = False,
) -> StartPreparation[S]:
    """As `prepare`, with the headers of the model's tensors.

    Args:
        settings: As the user gave them.
        added: As of `prepare`.
        text: As of `prepare`.
        device: The kind of device to plan for; None: what is here.
        loads: Whether this process will serve; else it only looks, and neither finds nor loads parsers and APIs.
    """
    scanned = cache(partial(scan, settings))
    if device is None:
        check_device(scanned()[0], settings.device)
    formats = Formats.of_registry(lambda: scanned()[0], settings.load_format)
    settings = with_folders(settings, weights=lambda: not formats.is_filled)
    model = check_model(settings, formats)
    named = {name: getattr(settings, name) for name in ("reasoning_parser", "tool_call_parser")}
    detects = loads and AUTO in named.values()
    if not loads:
        settings = settings.model_copy(update={name: None for name, given in named.items() if given == AUTO})
    settings, registry, plan = plan_plugins(settings, model, added, scanned, device, loads=loads)
    model = model.with_tokenizer(settings.tokenizer_folder)
    check_facts(settings, registry, plan, model)
    most = max_patches_of(plan, model, settings.max_image_patches)
    settings = settings.model_copy(update={"max_image_patches": most})
    if text:
        from dovetail.text.tokenizer.backend import check_source

        check_source(model.texts.folder or model.tokenizer_path, model.texts.stored)
    if not detects:  # what detects has compiled the template
        from dovetail.text.chat.template import ChatTemplate

        ChatTemplate.load(model.texts, settings.chat_template)
    return StartPreparation(settings=settings, registry=registry, plan=plan, model=model)


def check_model(settings: PluginSettings, formats: Formats | None = None) -> ModelFolder:
    """Return what the model's folder says; what is odd about it is warned of.

    Args:
        settings: With folders, no names on a hub.
        formats: That may read it; None: all that are installed.

    Raises:
        ModelError: The folder cannot be served, with the reason and the fix.
        ConfigError: Settings of memory that cannot be met, a chat template that is not there, or ranks that
            cannot divide the model.
    """
    folder = settings.folder
    formats = formats or Formats.installed(settings.load_format)
    model = ModelFolder.read(folder, settings.tokenizer_folder, weights=not formats.is_filled, formats=formats)
    model.warn()
    check_ranks(model.config, settings.tensor_parallel_size)
    check_memory_settings(settings, None if settings.device == "auto" else settings.device)
    tokenizer = None if settings.tokenizer_path is None else Path(settings.tokenizer_path)
    if tokenizer is not None and not tokenizer.is_dir() and formats.at(tokenizer, is_model=False) is None:
        raise ModelError(f"--tokenizer-path {settings.tokenizer_path!r}: no such folder; give one with tokenizer.json")
    if settings.chat_template is not None:
        from dovetail.text.chat.templates import template_path

        template_path(settings.chat_template)
    model.texts.configured_ends()
    return model


def check_facts(settings: PluginSettings, registry: Registry, plan: PluginPlan, model: ModelFolder) -> None:
    """Hold a model's configuration against its tensors and the ranks, where its plugin tells of it without torch.

    Raises:
        ModelError: They do not fit.
        PluginError: What the plugin's manifest names cannot be used.
    """
    planned = plan.of_kind("model")[0]
    facts = config_facts(registry.resolve("model", planned.qualified), plan.timeout_s)
    if facts is None:
        return
    config = model.claimed_config(facts, served=CONFIG_KEYS).of_rank(settings.tensor_parallel_size)
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)


def check_ranks(hf: Mapping[str, Any], num_ranks: int) -> None:
    """Check that ranks can divide the heads that a config names; what a plugin makes of it, each rank checks.

    Raises:
        ModelError: They cannot.
    """
    inner = hf.get("text_config")
    text = inner if isinstance(inner, Mapping) else hf
    heads, kv = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if num_ranks > 1 and isinstance(heads, int) and heads > 0 and heads % num_ranks:
        fix = ranks_for(heads, kv if isinstance(kv, int) else heads)
        raise ModelError(f"config.json: {heads} query heads cannot be divided among {num_ranks} ranks; {fix}")
