"""The `Dense` module of sentence-transformers: a matrix that a pooled vector goes through. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dovetail.runtime.checkpoint.folder import EmbeddingModule

    Array = npt.NDArray[np.float32]

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "Sigmoid", "SiLU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """One module.

    Attributes:
        file: Its weights, `linear.weight` `[out, in]` and perhaps `linear.bias`; read when first needed.
        out_features: Numbers of what comes out.
        activation: One of `ACTIVATIONS`.
    """

    file: Path
    out_features: int
    activation: str

    @classmethod
    def of_module(cls, module: EmbeddingModule) -> Dense:
        """Read the config.

        Raises:
            ModelError: Weights that are not there, or something that is not served.
        """
        from dovetail.runtime.checkpoint.weight_size import headers  # imports numpy

        config, folder = module.config, module.path
        activation = str(config.get("activation_function") or "Identity").rpartition(".")[2]
        file = folder / "model.safetensors"
        what = ""
        if activation not in ACTIVATIONS:
            what = f"the activation {activation} is not served; possible: {', '.join(ACTIVATIONS)}"
        elif config.get("use_residual"):
            what = "use_residual is not served"
        elif config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            what = f"it reads {config['module_input_name']!r}; only sentence_embedding is served"
        elif not file.is_file():
            what = "no model.safetensors; pickled weights are refused"
        if what:
            raise ModelError(f"{folder.name}: {what}")
        size = int(config["out_features"])
        shapes = {header.name: header.shape for header in headers(file)}
        found = shapes.pop("linear.weight", ())
        if len(found) != 2 or found[0] != size or any(shape != (size,) for shape in shapes.values()):
            raise ModelError(f"{folder.name}: out_features is {size}, and linear.weight is {list(found)}")
        return cls(file=file, out_features=size, activation=activation)

    def applied(self, vector: Array) -> Array:
        """Map `[in]` to `[out]`."""
        import numpy as np

        weights = _read(self.file)
        found: Any = weights["linear.weight"] @ vector
        if (bias := weights.get("linear.bias")) is not None:
            found = found + bias
        if self.activation == "Tanh":
            found = np.tanh(found)
        elif self.activation == "ReLU":
            found = np.maximum(found, 0)
        elif self.activation in ("Sigmoid", "SiLU"):
            sigmoid = 1 / (1 + np.exp(-found))
            found = sigmoid if self.activation == "Sigmoid" else found * sigmoid
        made: Array = found
        return made


@cache
def _read(file: Path) -> dict[str, Any]:
    """Read weights as float32; kept for as long as the process runs."""
    import numpy as np
    from safetensors import deserialize

    found = {}
    for name, tensor in deserialize(file.read_bytes()):  # type: ignore[no-untyped-call]
        data, kind = tensor["data"], tensor["dtype"]
        if kind == "BF16":  # the upper half of a float32
            numbers = (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
        else:
            numbers = np.frombuffer(data, dtype={"F32": "<f4", "F16": "<f2", "F64": "<f8"}[kind]).astype("<f4")
        found[name] = numbers.reshape(tensor["shape"])
    return found
