"""What the author of a quantisation implements: `Quantization`, which makes matrices as a checkpoint stores them.

```python
class AcmeInt8(Quantization):
    @classmethod
    def why_not(cls, config):
        return None if config.get("quant_method") == "acme-int8" else "it reads quant_method acme-int8"

    def factory(self, plain):
        return AcmeFactory(self.stored, plain)
```

The class is named in the entry-point group `dovetail.quantizations.v1`. A `LayerFactory` answers for every matrix that
a model asks for; `dovetail.sdk.layers.matrix.Matrix` is the base of matrices that know parts, ranks and slots of the
loader. A format whose tensors do not stand as `[out, …]`, or that has no product here, says in `conversions` what its
tensors become while they are read: tensors of a packed matrix, or a plain weight, which every layer takes. Importing
this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.contracts.layers import LayerFactory


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, as its file's header says.

    Attributes:
        suffix: What stands behind the module's name: `.weight`, `.weight_scale`.
        part: Of a fused matrix (`q`, `gate`), several as `gate+up`; "" for a whole one.
        dtype: As safetensors calls it: `I8`, `BF16`, `F8_E4M3`.
        shape: In the file.
    """

    suffix: str
    part: str
    dtype: str
    shape: tuple[int, ...]


class FileTensor(NamedTuple):
    """A tensor of a checkpoint under its own name.

    Attributes:
        name: In the file, or the one that a conversion gives its result.
        dtype: As safetensors calls it.
        shape: In the file, or of the result.
        path: The matrix of the model that its module is, or is a part of; "" where the model asks for no such matrix
            (norms, embeddings, the output head): it can only be served in the model's dtype.
        inputs: Of that matrix, or of what else the model has there (an output head); 0 where it has nothing such, a
            bias that it does not add among them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str = ""
    inputs: int = 0


class Target(NamedTuple):
    """What weights are read for.

    Attributes:
        dtype: Of the model: `bfloat16`.
        device: Kind of the device.
        keeps: Takes a form and the shape `[…, N, K]` of a matrix, or of experts' matrices: whether a kernel set keeps
            it packed (`KernelSet.keeps_packed`). A matrix that no set keeps becomes a plain weight in `dtype`.
    """

    dtype: str
    device: str
    keeps: Callable[[Any, Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of a checkpoint that others stand in for, made while it is read. Models and loader see the results only.

    Attributes:
        sources: Names in the checkpoint. A tensor may be a source of one conversion.
        results: What is made of them, under the names by which rules find them; none: they are not needed.
        convert: Makes the results, by name, of the sources, by name. Sources are views of the file: not to be written.
        note: What the memory table says of it: `fp8 written out: no product for it on cpu`.
        by_expert: Sources whose first axis counts experts, as that of the one result does. `convert` is then given some
            experts of these at a time, with all of the other sources, and makes these experts of the result, so that
            memory holds a few of them. Empty: all is made at once.
    """

    sources: tuple[str, ...]
    results: tuple[FileTensor, ...]
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    note: str = ""
    by_expert: tuple[str, ...] = ()


class Stored:
    """What a checkpoint stores for each of the model's matrices, known before a weight is read."""

    def __init__(self, tensors: Mapping[str, tuple[StoredTensor, ...]], *, is_known: bool = True) -> None:
        """`tensors` by the path under which the model asks for a matrix; `is_known` False: there is no checkpoint."""
        self._tensors = tensors
        self.is_known = is_known

    def of(self, path: str) -> tuple[StoredTensor, ...]:
        """Return a matrix's tensors; the matrices of experts are asked for as `path.gate_up` and `path.down`."""
        return self._tensors.get(path, ())

    def dtypes(self, path: str, suffix: str = ".weight") -> frozenset[str]:
        """Return the types in which the parts of a matrix are stored; empty where there is no such tensor."""
        return frozenset(tensor.dtype for tensor in self.of(path) if tensor.suffix == suffix)


class Quantization(Configurable, ABC):
    """One way in which checkpoints store weights in fewer bits."""

    def __init__(self, config: Mapping[str, Any], stored: Stored) -> None:
        """Take what the checkpoint says of itself.

        Args:
            config: `quantization_config` of its `config.json`, for which `why_not` gave None.
            stored: Its tensors. With `--load-format dummy` there are none, and everything that can be is covered.
        """
        self.config, self.stored = config, stored

    @classmethod
    @abstractmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """Say why a checkpoint cannot be served, or None.

        Args:
            config: Its `quantization_config`; empty if it has none.
        """

    @classmethod
    def unknown(cls, config: Mapping[str, Any]) -> Sequence[str]:
        """Return the keys of a configuration that say nothing to this class: users are told that they are left out.

        Args:
            config: As `why_not` took it.
        """
        return ()

    @classmethod
    def conversions(
        cls, config: Mapping[str, Any], tensors: Mapping[str, FileTensor], target: Target
    ) -> Iterable[Conversion]:
        """Say which tensors are converted while the checkpoint is read; the others are served as they stand.

        Args:
            config: As `why_not` has it.
            tensors: All of the checkpoint, by name.
            target: What they are read for.

        Raises:
            ModelError: Tensors that belong together are not there or do not fit; named, before anything is read.
        """
        return ()

    @abstractmethod
    def factory(self, plain: LayerFactory) -> LayerFactory:
        """Return what makes the model's matrices.

        Args:
            plain: Makes them in the model's dtype: for those that are not quantised.
        """
