"""Phase `check`: reads configuration and the heads of files, chooses what serves them, and refuses what cannot be."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from dovetail.base.settings import EngineSettings
from dovetail.checkpoint.formats import KIND, Formats
from dovetail.contracts.cache import Recurrent
from dovetail.contracts.checkpoint import CheckpointFormat
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.kernels import Kernels, repacks
from dovetail.contracts.layers import LayerFactory
from dovetail.contracts.model import ModelPlugin
from dovetail.contracts.quantization import Target
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.runtime.attention.backends import Chosen, choose_backends
from dovetail.runtime.attention.measure import measuring_on
from dovetail.runtime.batch_invariance import check_model
from dovetail.runtime.cache_dtype import with_cache_dtype
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import built_bytes, choose_quantization, converted, factory_of
from dovetail.runtime.checkpoint.weight_size import head_row_bytes
from dovetail.runtime.device.devices import device_of, find_device
from dovetail.runtime.device_memory import DeviceMemory
from dovetail.runtime.hf_config import CONFIG_KEYS, quant_method
from dovetail.runtime.kernels.ahead import CompiledAhead
from dovetail.runtime.kernels.binding import KernelBinder, load_sets
from dovetail.runtime.kernels.contest import Trials
from dovetail.runtime.memory.plan import context_len
from dovetail.runtime.ranks import Rank

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a start goes by; nothing of it is on the device.

    Attributes:
        settings: The engine's.
        plugins: Those of the plan, loaded.
        rank: Which rank this is.
        device: Where it computes.
        dtype: What it computes in.
        plugin: The model's.
        config: The model's facts, with the context that is served.
        local: What of them this rank caches and attends.
        quantization: Name of the quantisation, "" for none.
        factory: Makes the model's matrices.
        chosen: What attends.
        checkpoint: What is loaded; None: weights are made up.
        filler: What makes them up then.
        memory: What the device has, and how it would be divided.
        kernels: Binds the model's operations while it is built.
        compiled: Compiles kernels while the model is loaded; None: there are none.
    """

    settings: EngineSettings
    plugins: LoadedPlugins
    rank: Rank
    device: torch.device
    dtype: torch.dtype
    plugin: type[ModelPlugin]
    config: ModelConfig
    local: ModelConfig
    quantization: str
    factory: LayerFactory
    chosen: Chosen
    checkpoint: Checkpoint | None
    filler: CheckpointFormat | None
    memory: DeviceMemory
    kernels: KernelBinder
    compiled: CompiledAhead | None


def check(settings: EngineSettings, plugins: LoadedPlugins, rank: Rank) -> Checked:
    """Check all that can be checked without the weights.

    Raises:
        ConfigError: The model, the device, the memory or a plugin cannot serve these settings.
    """
    device = find_device(settings, plugins, rank.parallel.rank)
    formats = Formats.of_plan(plugins, settings.load_format)
    filler = formats.filler()
    folder = ModelFolder.read(settings.folder, weights=filler is None, formats=formats)
    hf = folder.config
    compiled = _compiled_ahead(device, settings, folder, plugins)
    plugin = _model_plugin(plugins)
    found = choose_quantization(plugins, hf)
    config = folder.model_config(plugin.config_from_hf, served=() if found is None else CONFIG_KEYS)
    logger.info("%s is served by %s.", config.architecture, describe(plugins.plan.of_kind("model")[0]))
    quantization, method = found or ("", None)
    config = _seeing(plugins, config)
    config = with_cache_dtype(replace(config, context_len=context_len(settings, config)), settings)
    dtype_name = config.dtype if settings.dtype == "auto" else settings.dtype
    dtype: torch.dtype = getattr(torch, dtype_name)
    local = config.of_rank(rank.parallel.size)
    check_model(plugin, config, device, settings)
    captured = device_of(device).captures and not settings.disable_cuda_graph
    kernels = KernelBinder(
        load_sets(plugins), device_of(device).view, captured=captured, peers=rank.peers,
        trials=cache(partial(Trials.on, device_of(device))), decided=rank.decided,
    )  # fmt: skip
    chosen = _choose_attention(plugins, local, device, dtype, settings, rank, kernels)
    _check_speculator(plugins, config)
    checkpoint = None
    if filler is None:
        target = Target(dtype_name, device_of(device).kind, partial(kernels.keeps, dtype_name))
        checkpoint = converted(method, folder, plugin, config, target)
    headers = None if checkpoint is None else checkpoint.headers
    factory = factory_of(method, hf, plugin.weight_map(config), headers)
    is_built = rank.parallel.size > 1 or (checkpoint is None and method is not None)
    built = built_bytes(plugin, config, dtype, factory, rank.parallel) if is_built else None
    dims = {"N": -(-config.vocab_size // rank.parallel.size), "K": config.hidden_size}
    head = kernels.ask("linear", dtype_name, dims, {}, invariant=settings.batch_invariant)
    form, is_repacked = getattr(factory, "head", None), repacks(head, kernels.serves)
    copied = head_row_bytes(form, config, dtype_name, is_repacked=is_repacked)
    memory = DeviceMemory(settings, config, device, dtype, rank, checkpoint, built, head_row_bytes=copied)
    return Checked(
        settings=settings, plugins=plugins, rank=rank, device=device, dtype=dtype, plugin=plugin, config=config,
        local=local, quantization=quantization, factory=factory, chosen=chosen, checkpoint=checkpoint, filler=filler,
        memory=memory, kernels=kernels, compiled=compiled,
    )  # fmt: skip


def _compiled_ahead(
    device: torch.device, settings: EngineSettings, folder: ModelFolder, plugins: LoadedPlugins
) -> CompiledAhead | None:
    """Begin to prepare the kernels that this engine will launch, where it has any."""
    on = device_of(device)
    if on.compiler() is None or settings.disable_compile_ahead:
        return None
    startup_fields = {"model_path", "random_seed", "report_cache", "wait_for_kernels"}
    if not quant_method(folder.config) and settings.quantization in (None, "auto"):
        startup_fields.add("load_format")  # plain weights and dummies launch the same
    loaded = [state for state in plugins.states() if state[0] != KIND]  # `load_format` says what counts of these
    return CompiledAhead(on, [settings.model_dump(mode="json", exclude=startup_fields), folder.config, loaded])


def _choose_attention(
    plugins: LoadedPlugins,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    settings: EngineSettings,
    rank: Rank,
    kernels: Kernels,
) -> Chosen:
    """Choose what attends: the first rank for all."""
    measuring = None
    if device_of(device).compiles:
        measuring = measuring_on(device, kernels, compiles_ahead=not settings.disable_compile_ahead)
    decided = () if rank.meeting is None else rank.meeting.attention
    chosen = choose_backends(plugins, config, device, dtype, settings, measuring, decided)
    if rank.meeting is not None:
        rank.meeting.attention = chosen.names
    return chosen


def _check_speculator(plugins: LoadedPlugins, config: ModelConfig) -> None:
    """Refuse drafts for a model that cannot take them back.

    Raises:
        ConfigError: It has recurrent layers.
    """
    for planned in plugins.plan.of_kind("speculator"):
        if any(isinstance(group.reach, Recurrent) for group in config.cache_groups):
            raise ConfigError(
                f"--speculator {planned.name!r}: {config.architecture} has recurrent layers, whose states take in "
                "drafts that do not hold and cannot give them back; leave out --speculator"
            )


def _seeing(plugins: LoadedPlugins, config: ModelConfig) -> ModelConfig:
    """Return the facts without the vision tower where nothing makes images ready for it.

    Raises:
        ConfigError: An image processor was asked for, and the model has no tower.
    """
    processors = plugins.plan.of_kind("processor")
    if not processors:
        return config.text_only
    if config.vision is None:
        raise ConfigError(
            f"--processor {processors[0].name!r}: {config.architecture} is served as a text model, which takes no "
            "images; leave out --processor"
        )
    return config


def _model_plugin(plugins: LoadedPlugins) -> type[ModelPlugin]:
    planned = plugins.plan.of_kind("model")
    if len(planned) != 1:
        raise ModelError(f"the plugin plan must hold one model, it holds {len(planned)}")
    found: type[ModelPlugin] = plugins.get("model", planned[0].qualified)
    return found
