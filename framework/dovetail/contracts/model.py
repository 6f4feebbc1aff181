"""What the author of a model architecture implements: `ModelPlugin`, and what it builds.

Importing this module does not import torch. A model file subclasses `ModelPlugin`, composes layers from
`dovetail.sdk.layers` (they carry fusing, sharding and loading), and is registered under its Hugging Face architecture
string in the entry-point group `dovetail.models.v1`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from dovetail.contracts.attention import ForwardBatch
    from dovetail.contracts.config import ModelConfig
    from dovetail.contracts.layers import BuildContext


Step = Literal["transpose", "deinterleave", "flatten"]


@dataclass(frozen=True, slots=True)
class WeightRule:
    r"""Maps modules of a checkpoint to layers of the model; of several rules for a tensor the first one holds.

    A rule names modules: what stands behind a module's name (`.weight`, `.bias`, a scale) the layer declares, so one
    rule serves plain and quantised checkpoints. A tensor that stands for several parts, or for all experts, is divided:
    parts by their widths one after the other, experts along the first axis.

    Args:
        module_pattern: Regular expression that must match the whole name of a module in the checkpoint
            (`model\.norm`). With an empty target, it must match a tensor's whole name.
        target: The layer's path in the model; may use the pattern's groups (`\1`). Empty: known and not needed.
        part: The part of a fused matrix (`q`, `gate`), or several in the checkpoint's order; None: all of them. May use
            groups.
        expert: Number of the expert, usually a group; None: no experts, or all of them in one tensor.
        steps: What is done to a tensor before it is placed. `transpose`: it is stored as `[in, out]`. `deinterleave`:
            its parts take turns row by row. `flatten`: its axes become one. A tensor of all experts whose shape fits
            only transposed needs no step; where both fit, the step says which.
    """

    module_pattern: str
    target: str
    part: str | tuple[str, ...] | None = None
    expert: str | None = None
    steps: tuple[Step, ...] = ()


class CausalLM(Protocol):
    """A built model, in practice a `torch.nn.Module`. T tokens in the batch, H hidden size, V vocabulary size."""

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` int64 to final hidden states `[T, H]` (after the last norm)."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Map hidden states `[R, H]` to logits `[R, V]` in the model's dtype; not called if it does not generate."""
        ...


@runtime_checkable
class Classifier(Protocol):
    """A built model that scores texts. R texts, H hidden size, N labels."""

    def classify(self, pooled: Tensor) -> Tensor:
        """Map the hidden states that stand for texts `[R, H]` to a score for each label `[R, N]`, not yet scaled."""
        ...


@runtime_checkable
class VisionTower(Protocol):
    """A built model that sees: `ModelConfig.vision` says what of its configuration the core needs."""

    def encode(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Map an image to embeddings.

        Every rank computes the whole of it.

        Args:
            arrays: What the model's image processor returned: uint8 on the model's device, int32 on the host; not to
                be changed.

        Returns:
            `[L, N, H]` in the model's dtype: N embeddings of the decoder, in the order of the image's tokens; behind
            them what is added to hidden states at these tokens behind the first L - 1 layers.
        """
        ...


@runtime_checkable
class SelfLoading(Protocol):
    """A built model that reads its checkpoint itself, in place of the rules of `weight_map`."""

    def load_checkpoint(self, folder: Path, headers: Sequence[TensorHeader]) -> None:
        """Fill every parameter from the folder's safetensors.

        Args:
            folder: The checkpoint's.
            headers: Of all its tensors, file by file.

        Raises:
            ModelError: Weights are missing, surplus, misshapen or not finite; all are named.
        """


class ConfigFacts(Protocol):
    """What is known of a model without torch: a class that the manifest of its plugin names as `config`.

    It stands in a module that imports no torch, so that a server refuses what does not fit before a process starts.
    """

    unneeded: ClassVar[str]
    """Names of tensors that may be there, and nobody reads, as a regular expression."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """As the plugin's."""
        ...

    @staticmethod
    def tensors(config: ModelConfig, names: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors that the model wants of a checkpoint that is not quantised.

        Args:
            config: The model's facts.
            names: Of the checkpoint's tensors, which may have several matrices as one.
        """
        ...


class ModelPlugin(Configurable, ABC):
    """One model family. Subclass it, name the class in an entry point of `dovetail.models.v1`.

    One that serves whatever comes is named as it likes, and its manifest says which architectures it `matches`; it is
    taken where no plugin is named as the architecture, or with `--model-impl`.
    """

    architectures: ClassVar[Sequence[str]]
    """Hugging Face architecture strings that this class serves; `*` for any."""

    batch_invariant: ClassVar[bool] = False
    """Built with `BuildContext.batch_invariant`, what it makes of a token has the same bits whatever tokens stand
    beside it: all its products are layers of the context, and what else it computes is by row. Not inherited: a
    subclass may compute something of its own, so it says it again."""

    @classmethod
    def why_not_invariant(cls, config: ModelConfig) -> str | None:
        """Say why a model of that configuration keeps no promise as `batch_invariant`; None: it does."""
        if vars(cls).get("batch_invariant", False):
            return None
        return f"the model {config.architecture} ({cls.__name__}) does not say that it is batch-invariant"

    compares_schedules: ClassVar[bool] = False
    """Every start computes a few tokens of the model whole, in two pieces and by decoding, and is refused where the
    results differ: for classes that run code which was not written for Dovetail."""

    @classmethod
    @abstractmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate the parsed `config.json`.

        Raises:
            ModelError: A value that the architecture cannot serve, naming the key and what is possible.
        """

    @classmethod
    @abstractmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module with uninitialised parameters on `ctx.device` in `ctx.dtype`."""

    @classmethod
    @abstractmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Ordered rules from the modules of a checkpoint to layers."""
