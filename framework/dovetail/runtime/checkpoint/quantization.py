"""Which plugin makes a model's matrices: the plain ones, or those of the quantisation that its checkpoint names."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.layers import BuildContext, Experts, ExpertsSpec, LayerFactory, Linear, MatrixSpec, Parallel
from dovetail.contracts.model import ModelPlugin, WeightRule
from dovetail.contracts.quantization import FileTensor, Quantization, Stored, StoredTensor, Target
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.runtime.checkpoint.files import Checkpoint
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.weights import model_layers
from dovetail.runtime.hf_config import quantization_config
from dovetail.sdk.config import some
from dovetail.sdk.layers.plain import PLAIN

logger = logging.getLogger(__name__)
KIND = "quantization"
BIASES = (".bias", "_bias")


def choose_quantization(plugins: LoadedPlugins, hf: Mapping[str, Any]) -> tuple[str, type[Quantization]] | None:
    """Return name and class of the plan's quantisation that reads this checkpoint; None where the plan has none.

    Raises:
        PluginError: The one asked for cannot, or no candidate of `auto` can; every reason is given.
    """
    config, reasons = quantization_config(hf), []
    for planned, cls in plugins.candidates(KIND):
        with _reading(planned.name):
            reason = cls.why_not(config)
            unknown = cls.unknown(config) if reason is None else ()
        if reason is None:
            logger.info("Quantization: %s reads the checkpoint.", planned.name)
            if unknown:
                logger.warning(
                    "quantization_config: %s does not know %s, and leaves it out.", planned.name, some(unknown)
                )
            return planned.name, cls
        reasons.append(f"{describe(planned)}: {reason}")
        if planned.requested:
            break
    if reasons:
        raise PluginError(f"--quantization: this checkpoint cannot be read: {'; '.join(reasons)}")
    return None


def converted(
    chosen: type[Quantization] | None,
    folder: ModelFolder,
    plugin: type[ModelPlugin],
    config: ModelConfig,
    target: Target,
) -> Checkpoint:
    """Return the checkpoint of a folder as the quantisation has it read.

    Args:
        chosen: The quantisation, or None.
        folder: What the model's folder says; it has weights.
        plugin: The model's.
        config: Its facts.
        target: What it is read for.

    Raises:
        ModelError: The checkpoint cannot be read, or lacks tensors that belong to others.
    """
    plain, rules = Checkpoint.of_folder(folder), plugin.weight_map(config)
    if chosen is not None and not rules and not quantization_config(folder.config):
        raise ModelError(
            f"--quantization: {config.architecture} is read by another library, which does not quantise it while it "
            "loads; leave it out, or give a quantised checkpoint"
        )
    if chosen is None or not rules:  # without rules the model reads its checkpoint itself
        return plain
    return convert(plain, chosen, quantization_config(folder.config), rules, widths_of(plugin, config), target)


def convert(
    plain: Checkpoint,
    chosen: type[Quantization],
    config: Mapping[str, Any],
    rules: Sequence[WeightRule],
    widths: Widths,
    target: Target,
) -> Checkpoint:
    """Return a checkpoint as a quantisation has it read.

    Args:
        plain: As it stands.
        chosen: The quantisation.
        config: Its `quantization_config`.
        rules: The model's.
        widths: Of the model's matrices.
        target: What it is read for.
    """
    tensors = file_tensors(plain, rules, widths)
    with _reading(chosen.__name__):
        return Checkpoint(plain.folder, plain.headers, chosen.conversions(config, tensors, target), plain.stored)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what a plugin raises at a value of `quantization_config` into one line.

    Raises:
        ModelError: It raised.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"quantization_config: {name} raised {type(error).__name__}: {' '.join(str(error).split())}; correct "
            "config.json, or report this to the plugin's author"
        ) from error


class Widths(NamedTuple):
    """Inputs by path: of the matrices that a model asks for, and of its other layers with such a weight.

    `biased` are the matrices to which it adds a bias, and the other layers.
    """

    matrices: Mapping[str, int]
    others: Mapping[str, int] = MappingProxyType({})
    biased: Set[str] = frozenset()


def file_tensors(plain: Checkpoint, rules: Sequence[WeightRule], widths: Widths) -> dict[str, FileTensor]:
    """Return a checkpoint's tensors by name, with the matrix of the model that each belongs to."""
    patterns, tensors = _compiled(rules), {}
    for header in plain.headers:
        places = _places(header, patterns)
        paths = [path for path, _ in places]
        path = next((path for path in paths if path in widths.matrices), "")
        if path not in widths.biased and any(tensor.suffix in BIASES for _, tensor in places):
            tensors[header.name] = FileTensor(header.name, header.dtype, header.shape)
            continue
        inputs = widths.matrices[path] if path else next((widths.others.get(path, 0) for path in paths), 0)
        tensors[header.name] = FileTensor(header.name, header.dtype, header.shape, path, inputs)
    return tensors


def widths_of(plugin: type[ModelPlugin], config: ModelConfig) -> Widths:
    """Return the inputs of a model's matrices and of others; it is built without memory to find out."""
    asked = RecordingFactory()
    model: Any = plugin.build(config, BuildContext(device=torch.device("meta"), dtype=torch.bfloat16, factory=asked))
    others = {
        path: shape[1]
        for path, layer in model_layers(model).items()
        if path not in asked.inputs
        for slot, shape in layer.slots().items()
        if slot.tensor == "weight" and len(shape) == 2
    }
    return Widths(asked.inputs, others, asked.biased | others.keys())


def built_bytes(
    plugin: type[ModelPlugin], config: ModelConfig, dtype: torch.dtype, factory: LayerFactory, parallel: Parallel
) -> int:
    """Return what a rank's weights take in bytes; the model is built without memory to find out.

    Args:
        plugin: The model's.
        config: Its facts.
        dtype: The engine's.
        factory: Makes its matrices.
        parallel: The rank; all have as much.

    Raises:
        ModelError: The ranks cannot divide the model.
    """
    ctx = BuildContext(device=torch.device("meta"), dtype=dtype, factory=factory, parallel=parallel)
    model: Any = plugin.build(config, ctx)
    return sum(int(param.numel() * param.element_size()) for param in model.parameters())


class RecordingFactory:
    """Makes plain matrices and remembers where and how wide they are."""

    def __init__(self) -> None:
        self.inputs: dict[str, int] = {}
        self.biased: set[str] = set()

    def linear(self, ctx: BuildContext, spec: MatrixSpec) -> Linear:
        """See `LayerFactory.linear`."""
        self.inputs[spec.path] = spec.in_features
        self.biased |= {spec.path} if spec.bias else set()
        return PLAIN.linear(ctx, spec)

    def experts(self, ctx: BuildContext, spec: ExpertsSpec) -> Experts:
        """See `LayerFactory.experts`."""
        paths = {f"{spec.path}.gate_up": spec.hidden, f"{spec.path}.down": spec.inner}
        self.inputs |= paths
        self.biased |= paths.keys() if spec.bias else set()
        return PLAIN.experts(ctx, spec)


def factory_of(
    chosen: type[Quantization] | None,
    hf: Mapping[str, Any],
    rules: Sequence[WeightRule],
    headers: Sequence[TensorHeader] | None,
) -> LayerFactory:
    """Return what makes the model's matrices.

    Args:
        chosen: The quantisation, or None.
        hf: The parsed `config.json`.
        rules: The model's.
        headers: Of the tensors that are loaded; None: there are none.
    """
    if chosen is None:
        return PLAIN
    tensors = {} if headers is None else stored_tensors(rules, headers)
    return made_by(chosen, quantization_config(hf), Stored(tensors, is_known=headers is not None))


def made_by(chosen: type[Quantization], config: Mapping[str, Any], stored: Stored) -> LayerFactory:
    """Return what makes the matrices of a quantisation.

    Raises:
        ModelError: It raised.
        PluginError: It was written for contracts that asked for a matrix by several arguments.
    """
    with _reading(chosen.__name__):
        made = chosen(config, stored).factory(PLAIN)
    for name, spec in (("linear", MatrixSpec), ("experts", ExpertsSpec)):
        method = getattr(made, name, None)  # who packs no experts may have left them out
        if method is None or _takes_spec(method):
            continue
        given = ", ".join(signature(method).parameters)
        raise PluginError(
            f"quantization {chosen.__name__} of {chosen.__module__}: {type(made).__name__} has {name}({given}), and is "
            f"called as {name}(ctx, spec); upgrade the package, or have its author take {spec.__name__} of "
            "dovetail.contracts, whose fields are what stood behind ctx"
        )
    return made


def _takes_spec(method: Callable[..., Any]) -> bool:
    """Whether it takes a context and a spec, not a `name` and more behind it, as it did once."""
    try:
        return "name" not in signature(method).bind(None, None).arguments
    except TypeError:
        return False


def stored_tensors(rules: Sequence[WeightRule], headers: Sequence[TensorHeader]) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the tensors of each layer by its path, as the rules map modules; those that no rule knows are left out."""
    patterns = _compiled(rules)
    found: dict[str, list[StoredTensor]] = {}
    for header in headers:
        for path, tensor in _places(header, patterns):
            found.setdefault(path, []).append(tensor)
    return {path: tuple(tensors) for path, tensors in found.items()}


def _compiled(rules: Sequence[WeightRule]) -> list[tuple[re.Pattern[str], WeightRule]]:
    return [(re.compile(rule.module_pattern), rule) for rule in rules]


def _places(
    header: TensorHeader, patterns: Sequence[tuple[re.Pattern[str], WeightRule]]
) -> list[tuple[str, StoredTensor]]:
    """Where a tensor belongs: the longest name of a module before it that a rule knows.

    Behind a module's name comes a dot, or where one tensor holds all experts, an underscore (`gate_up_proj_scale`).
    """
    name = header.name
    ends = [index for index, char in enumerate(name) if char == "." or (char == "_" and "." not in name[index:])]
    for cut in (len(name), *reversed(ends)):
        for pattern, rule in patterns:
            match = pattern.fullmatch(name[:cut])
            if match is None:
                continue
            if not rule.target:
                return []
            parts = (rule.part,) if isinstance(rule.part, str) else rule.part or ()
            part = "+".join(match.expand(each) for each in parts)
            return [(match.expand(rule.target), StoredTensor(name[cut:], part, header.dtype, header.shape))]
    return []
