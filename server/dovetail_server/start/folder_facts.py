"""What of a model folder takes longer to see than a start's checks, or torch: for commands that look and serve nothing.

A server finds the same when it loads the model, in the same words.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.needs import unserved
from dovetail.contracts.quantization import Target
from dovetail.plugins import Registry, load
from dovetail.plugins.config_facts import config_facts
from dovetail.plugins.loader import import_planned, naming_plugin
from dovetail.plugins.plan import as_planned, model_plugin
from dovetail.plugins.records import PluginRecord
from dovetail.processing.oddities import oddities
from dovetail.processing.prepare import StartPreparation
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.hf_config import CONFIG_KEYS, quant_method

if TYPE_CHECKING:
    from dovetail.runtime.checkpoint.files import Checkpoint
    from dovetail.sdk.quantization.forms import Form
    from dovetail.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """How a model's weights are read.

    Attributes:
        checkpoint: What a quantisation has read; None: nothing is converted, or nothing is read.
        built: Bytes of a rank's parameters where only building the model tells; None: the headers do, or the config.
        head: The form in which the output head is packed; None: the model's dtype.
    """

    checkpoint: Checkpoint | None = None
    built: int | None = None
    head: Form | None = None


def model_config(model: ModelFolder, record: PluginRecord) -> ModelConfig:
    """Read a model's facts: without torch where its plugin's manifest names how.

    Args:
        model: What its folder says.
        record: Its plugin.

    Raises:
        ConfigError: The config cannot be served.
    """
    facts = config_facts(record) or import_planned(as_planned(record))
    config = model.model_config(facts.config_from_hf, served=CONFIG_KEYS)
    if (reason := unserved(config)) is not None:
        raise ModelError(reason)
    return config


def config_of(model: ModelFolder, impl: str = "auto") -> ModelConfig:
    """Read the facts of a model that is not served, from the plugin that would serve it; `impl` as `--model-impl`.

    Raises:
        ConfigError: No plugin serves the architecture, or the config cannot be served.
    """
    registry = Registry.scan()
    return model_config(model, registry.resolve("model", model_plugin(registry, model.architecture, impl)))


def read_as(found: StartPreparation[Any], config: ModelConfig, dtype: str, device: str) -> Reading:
    """Find out how the engine would read the weights, and whether they fit; without torch where a start needs none.

    Args:
        found: The model and its plugins, with the headers of its tensors.
        config: The model's facts.
        dtype: Name of the engine's dtype.
        device: Kind of the device.

    Raises:
        ConfigError: No plugin reads them, tensors are missing, surplus or misshapen, or the ranks cannot divide it.
    """
    settings, folder = found.settings, found.model
    planned, ranks = found.plan.of_kind("model")[0], settings.tensor_parallel_size
    is_plain = not (settings.quantization not in (None, "auto") or quant_method(folder.config))
    facts = config_facts(found.registry.resolve("model", planned.qualified))
    if is_plain and ranks == 1 and (folder.headers is None or (facts is not None and folder.stored is None)):
        return Reading()
    import torch

    from dovetail.contracts.layers import BuildContext, Parallel
    from dovetail.runtime.checkpoint.quantization import choose_quantization, converted, factory_of
    from dovetail.runtime.checkpoint.weight_match import match_weights
    from dovetail.runtime.checkpoint.weights import model_layers
    from dovetail.runtime.device.devices import view_of
    from dovetail.runtime.kernels.binding import KernelBinder, load_sets

    plugins = load(found.plan, "engine")
    chosen = choose_quantization(plugins, folder.config)
    model, quantization = plugins.get("model", planned.qualified), None if chosen is None else chosen[1]
    sets = KernelBinder(load_sets(plugins), view_of(found.registry, device))
    target = Target(dtype, device, partial(sets.keeps, dtype))
    checkpoint = None if folder.headers is None else converted(quantization, folder, model, config, target)
    headers = None if checkpoint is None else checkpoint.headers
    rules = model.weight_map(config)
    if is_plain and ranks == 1 and not rules:
        return Reading()  # read by another library, which says what does not fit when it does
    factory = factory_of(quantization, folder.config, rules, headers)
    first = Parallel(size=ranks, all_reduce=lambda share: share, expert_shard=settings.expert_shard)
    ctx = BuildContext(device=torch.device("meta"), dtype=getattr(torch, dtype), factory=factory, parallel=first)
    with naming_plugin(plugins):
        built: Any = model.build(config, ctx)
    if checkpoint is not None and rules:
        match_weights(model_layers(built), rules, checkpoint.headers, folder.path)
    is_known = ranks == 1 and (checkpoint is not None or quantization is None)
    num = None if is_known else sum(int(param.numel() * param.element_size()) for param in built.parameters())
    return Reading(None if is_plain and ranks == 1 else checkpoint, num, ctx.head_form)


def tokenizer_of(model: ModelFolder, config: ModelConfig | None) -> Tokenizer:
    """Load a model's tokenizer; what is odd about it is warned of, where the facts of its model are known.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    from dovetail.text.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.of_files(model.tokenizer_path, model.texts)
    if config is not None:
        for note in oddities(tokenizer, config.vocab_size, generates=config.generates):
            logger.warning("%s", note)
    return tokenizer
