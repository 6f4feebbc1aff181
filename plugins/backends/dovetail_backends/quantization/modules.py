"""What the built-in quantisations share: a module's tensors by name, their checks, and what they are converted to.

A module's weight is called `M.weight`, or, where one tensor holds all experts, `M` (`experts.gate_up_proj`): its other
tensors are `M.weight_scale` or `M_scale`. E experts, N outputs, K inputs; `[…, N, K]` is `[N, K]` or `[E, N, K]`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import LayerFactory
from dovetail.contracts.quantization import Conversion, FileTensor, Quantization, Target
from dovetail.sdk.layers.packed import EIGHT, PackedFactory
from dovetail.sdk.quantization.forms import Form, Scaled, exponents

NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
PLAIN = ("BF16", "F16", "F32")
INDEX = ("I32", "I64")
SCALE = (*PLAIN, "F8_E8M0", "U8")
"""Types of scales; the last two are exponents of two."""
ACTIVATIONS = (".input_scale", ".input_global_scale", ".input_zero_point", ".input_g_idx")
"""Scales of activations found ahead of time: a row that is rounded has a scale of its own, which loses less."""
CACHE = (
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".output_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""Scales of a cache of fewer bits, which keeps the model's dtype; older tools call them `kv_scale`, or outputs'."""

Numbers = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
"""Makes a weight in a dtype of a module's tensors, by suffix: computed in float32, a few rows at a time."""


BIASES = (".bias", "_bias")
STORED = (".weight_packed", ".weight_scale", ".weight_zero", ".weight", "_packed", "_scale", "_zero", *BIASES)
"""Suffixes of what is kept of a matrix, and of a bias beside it."""
UNLIKE = "matrices written out whose parts, or experts, are stored in several ways"

MADE = "a plain checkpoint, quantised while it loads"


class Reads(NamedTuple):
    """One of the ways in which a quantisation finds matrices stored, for the documentation.

    Attributes:
        what: As its tool calls it.
        numbers: `int8`, `int4`, `float8_e4m3fn`, `mxfp4`, or another format (`mxfp8`), which is always written out.
        bits: Of a weight in the file, scales included.
    """

    what: str
    numbers: str
    bits: float


class PackedQuantization(Quantization):
    """A quantisation whose packed matrices are of the shared forms."""

    reads: ClassVar[Sequence[Reads]] = ()
    """What it reads, or makes."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Of configurations: those that are heeded, or say what files tell, too, or how weights were found."""

    @classmethod
    def unknown(cls, config: Mapping[str, Any]) -> Sequence[str]:
        """Return the other keys."""
        return sorted(set(config) - cls.keys - {"quant_method"})

    @classmethod
    def conversions(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Return what `read_modules` gives, where matrices whose parts are stored in several ways are written out."""
        made = list(cls.read_modules(config, tensors, target))
        unlike = of_several_forms(tensors, made)
        if not unlike:
            return made
        names = {name for name, tensor in tensors.items() if tensor.path in unlike}
        plain = {name: tensor._replace(path="") if name in names else tensor for name, tensor in tensors.items()}
        again = cls.read_modules(config, plain, target)
        return [replace(each, note=UNLIKE) if each.results and names & set(each.sources) else each for each in again]

    @classmethod
    @abstractmethod
    def read_modules(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """As `conversions`, each module by itself: one that has no `path` is written out."""

    def factory(self, plain: LayerFactory) -> LayerFactory:
        """Return what makes packed matrices where tensors of a form are read, and plain ones elsewhere."""
        return PackedFactory(self.stored, plain, self.dummy(), self.dummy_experts(), self.activations(), self.head())

    def dummy(self) -> Form | None:
        """Return the form of matrices without a checkpoint; None: plain ones."""
        return None

    def dummy_experts(self) -> Form | None:
        """Return the form of experts' matrices without a checkpoint."""
        return self.dummy()

    def activations(self) -> torch.dtype | None:
        """Return what products of many rows may round their rows to; None: they keep the model's dtype."""
        return None

    def head(self) -> Form | None:
        """Return the form in which the output head is packed; None: it keeps the model's dtype."""
        return None


def of_several_forms(tensors: Mapping[str, FileTensor], conversions: Iterable[Conversion]) -> set[str]:
    """Return the matrices of which parts, or experts, would be kept in other forms than others.

    Args:
        tensors: Of the checkpoint.
        conversions: What some of them become.
    """
    left = dict(tensors)
    for conversion in conversions:
        for source in conversion.sources:
            left.pop(source, None)
        left |= {result.name: result for result in conversion.results}
    of_module: dict[tuple[str, str], set[tuple[str, str, int]]] = {}
    for name, tensor in left.items():
        suffix = next((each for each in STORED if name.endswith(each)), "")
        if not tensor.path or suffix in BIASES:
            continue
        dtype = "plain" if tensor.dtype in PLAIN and "scale" not in suffix else tensor.dtype
        columns = tensor.shape[-1] if tensor.shape and "scale" in suffix else 0
        of_module.setdefault((tensor.path, name.removesuffix(suffix)), set()).add((suffix, dtype, columns))
    forms: dict[str, set[frozenset[tuple[str, str, int]]]] = {}
    for (path, _), found in of_module.items():
        forms.setdefault(path, set()).add(frozenset(found))
    return {path for path, found in forms.items() if len(found) > 1}


@dataclass(slots=True)
class Module:
    """The tensors of one module.

    Attributes:
        weight: What the model's rules call its weight: `M.weight` or `M`.
        tensors: By suffix, as `grouped` was given them.
    """

    weight: str
    tensors: dict[str, FileTensor] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The model's matrix, "" for none."""
        return next((tensor.path for tensor in self.tensors.values() if tensor.path), "")

    @property
    def inputs(self) -> int:
        """K of the model's matrix, 0 where it is not known."""
        return next((tensor.inputs for tensor in self.tensors.values() if tensor.inputs), 0)

    def need(self, suffix: str, *dtypes: str) -> FileTensor:
        """Return a tensor.

        Raises:
            ModelError: It is not there, or of none of the types that are named.
        """
        if (found := self.tensors.get(suffix)) is None:
            has = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in self.tensors.items())
            raise ModelError(f"{self.weight}: {suffix} is missing; it has {has}")
        if dtypes and found.dtype not in dtypes:
            raise ModelError(f"{self.weight}: {suffix} is {found.dtype}; possible: {', '.join(dtypes)}")
        return found

    def matrix(self, suffix: str, *dtypes: str) -> tuple[int, int]:
        """Return the shape of a tensor of two axes.

        Raises:
            ModelError: It has others.
        """
        shape = self.need(suffix, *dtypes).shape
        if len(shape) != 2 or 0 in shape:
            raise ModelError(f"{self.weight}: {suffix} is {list(shape)} instead of a matrix")
        return shape[0], shape[1]

    def check(self, suffix: str, *shapes: tuple[int, ...], why: str = "") -> None:
        """See that a tensor has one of the shapes.

        Raises:
            ModelError: It has another one.
        """
        if (shape := self.need(suffix).shape) not in shapes:
            wanted = " or ".join(str(list(each)) for each in dict.fromkeys(shapes))
            raise ModelError(f"{self.weight}: {suffix} is {list(shape)} instead of {wanted}{why and f' ({why})'}")


def grouped(tensors: Mapping[str, FileTensor], suffixes: Iterable[str], main: str) -> Iterator[Module]:
    """Yield the modules that have a tensor `main`, with those of `suffixes` that they have.

    Raises:
        ModelError: A module has one of the others and not `main`.
    """
    ordered = sorted({main, *suffixes}, key=len, reverse=True)
    found: dict[str, Module] = {}
    for name, tensor in tensors.items():
        suffix = next((each for each in ordered if name.endswith(each)), None)
        if suffix is None:
            continue
        base = name.removesuffix(suffix)
        weight = f"{base}.weight" if suffix.startswith(".") else base
        found.setdefault(weight, Module(weight)).tensors[suffix] = tensor
    for module in found.values():
        module.need(main)
        yield module


def written_out(
    module: Module,
    shape: tuple[int, ...],
    target: Target,
    numbers: Numbers,
    what: str,
    *,
    turned: bool = False,
) -> Conversion:
    """Return a conversion to a plain weight in the model's dtype.

    Args:
        module: Whose tensors are read.
        shape: Of the weight.
        target: What it is read for.
        numbers: Makes the weight; if it has experts, of some of these at a time.
        what: The numbers' name, for the memory table.
        turned: The model's rules want the last two axes swapped.
    """
    dtype = getattr(torch, target.dtype)
    suffix_of = {tensor.name: suffix for suffix, tensor in module.tensors.items()}

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = numbers({suffix_of[name]: tensor for name, tensor in tensors.items()}, dtype)
        return {module.weight: weight.transpose(-1, -2) if turned else weight}

    result = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    made = FileTensor(module.weight, NAMES[target.dtype], result, module.path)
    note = f"{what} written out: no product for it on {target.device}" if module.path else ""
    return Conversion(tuple(suffix_of), (made,), convert, note, by_expert(module.tensors.values(), result))


def by_expert(tensors: Iterable[FileTensor], shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of those tensors that have the experts of a result `[E, …, …]`; none where it has no experts."""
    return tuple(tensor.name for tensor in tensors if len(shape) > 2 and tensor.shape[:1] == shape[:1])


def dropped(tensors: Mapping[str, FileTensor]) -> Iterator[Conversion]:
    """Yield conversions of tensors that nothing needs."""
    for name in tensors:
        if name.endswith(ACTIVATIONS):
            yield Conversion((name,), (), lambda _: {})
        elif name.endswith(CACHE):
            yield Conversion((name,), (), lambda _: {}, "the cache in this dtype, too, not in the checkpoint's")


def eight_bits(
    module: Module, shape: tuple[int, ...], group: tuple[int, int], target: Target, *, scale: str, inverse: bool = False
) -> Iterator[Conversion]:
    """Yield what numbers of 8 bits with a scale for each block of `group` become: packed as they are, or written out.

    Args:
        module: Its weight is `.weight` or "".
        shape: Of the weight, `[…, N, K]`.
        group: Rows and columns of a block.
        target: What it is read for.
        scale: Its suffix.
        inverse: The scale is what numbers are divided by.
    """
    number = next(suffix for suffix in module.tensors if suffix in (".weight", ""))
    dtype = module.tensors[number].dtype
    kind = str(EIGHT[dtype]).removeprefix("torch.") if dtype in EIGHT else ""

    def scales(tensors: Mapping[str, Tensor]) -> Tensor:
        """One for each row, and for each block of columns."""
        found = as_scale(tensors[scale])
        found = found.reshape(*found.shape[: len(shape) - 2], *blocks_of(shape[-2:], group))
        found = found.reciprocal() if inverse else found
        return found.repeat_interleave(group[0], dim=-2)[..., : shape[-2], :] if group[0] > 1 else found

    inputs = None if group[1] >= shape[-1] else group[1]
    is_even = bool(module.path and kind) and shape[-1] % group[1] == 0
    if not is_even or not target.keeps(Scaled(EIGHT[dtype], inputs), shape):

        def numbers(tensors: Mapping[str, Tensor], to: torch.dtype) -> Tensor:
            packed = {"weight": tensors[number], "weight_scale": scales(tensors)}
            return Scaled(packed["weight"].dtype, group[1]).dequantise(packed, to)

        yield written_out(module, shape, target, numbers, kind)
        return
    name = module.weight + "_scale"
    made = FileTensor(name, "F32", (*shape[:-1], shape[-1] // group[1]), module.path)
    source = module.tensors[scale]

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: scales({scale: tensors[source.name]}).contiguous()}

    yield Conversion((source.name,), (made,), convert, by_expert=by_expert((source,), made.shape))


def blocks_of(shape: tuple[int, ...], group: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of scales, one for each block of a weight."""
    return (*shape[:-2], -(-shape[-2] // group[0]), -(-shape[-1] // group[1]))


def as_scale(scale: Tensor) -> Tensor:
    """Return a scale as float32; bytes are exponents of two."""
    if scale.dtype == torch.uint8:
        return exponents(scale)
    return scale.float()
