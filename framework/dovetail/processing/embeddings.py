"""What a checkpoint says of embeddings, and how one is made of a pooled hidden state.

Read are the files of sentence-transformers: `modules.json`, the pooling module's `config.json`; and of the model's own
`config.json` whether a shorter vector is worth something (`matryoshka_dimensions`, `is_matryoshka`). Without them a
causal model gives its last token's state at length 1, as vLLM and SGLang have it. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import ModelError, RequestError
from dovetail.messages import Pool
from dovetail.runtime.hf_config import read_config, read_json

MODES: dict[str, Pool] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """How embeddings are made.

    Attributes:
        pool: What of the hidden states is asked for.
        normalize: Vectors have length 1.
        dimensions: Lengths that a vector may be cut to; empty: any, if `is_nested`.
        is_nested: It was trained so that the first numbers of a vector are one, too.
        obstacle: Why the checkpoint's embeddings cannot be made; empty if they can.
    """

    pool: Pool = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    is_nested: bool = False
    obstacle: str = ""

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Embedder:
        """Read a model folder. What cannot be made of it is an `obstacle`: the model may still generate."""
        config = read_config(folder)
        sizes = config.get("matryoshka_dimensions") or ()
        is_nested = bool(sizes or config.get("is_matryoshka"))
        try:
            pool, normalize = _modules(folder)
        except ModelError as error:
            return cls(obstacle=str(error))
        except (TypeError, AttributeError, KeyError):
            return cls(obstacle="modules.json or 1_Pooling/config.json is not as sentence-transformers writes it")
        return cls(pool=pool, normalize=normalize, dimensions=tuple(sizes), is_nested=is_nested)

    def check(self, dimensions: int | None, hidden_size: int) -> None:
        """Refuse what cannot be made.

        Raises:
            RequestError: The checkpoint's embeddings cannot be made, or not with so many dimensions.
        """
        if self.obstacle:
            raise RequestError(
                f"this checkpoint's embeddings cannot be made: {self.obstacle}", param="model", code="unsupported_model"
            )
        if dimensions is None or dimensions == hidden_size:
            return
        if not self.is_nested:
            text = (
                f"the model was not trained for shorter vectors (no matryoshka_dimensions in config.json): dimensions "
                f"can be {hidden_size}; leave it out"
            )
            raise RequestError(text, param="dimensions", code="unsupported_parameter")
        if dimensions > hidden_size or (self.dimensions and dimensions not in self.dimensions):
            possible = ", ".join(map(str, self.dimensions)) or f"1 to {hidden_size}"
            text = f"dimensions must be one of: {possible} (given: {dimensions})"
            raise RequestError(text, param="dimensions", code="invalid_value")

    def finish(self, pooled: bytes, dimensions: int | None = None, *, normalize: bool | None = None) -> Vector:
        """Make an embedding of what the engine pooled: cut it, then scale it to length 1.

        Args:
            pooled: From `TokenDelta.pooled`.
            dimensions: How many numbers to keep; None: all.
            normalize: None: as the checkpoint says.
        """
        import numpy as np  # the server's process has it only once somebody asks for embeddings

        vector: Vector = np.frombuffer(pooled, dtype=np.float32)[:dimensions]
        if not (self.normalize if normalize is None else normalize):
            return vector
        wide = vector.astype(np.float64)
        length = float(np.sqrt((wide * wide).sum()))
        return (wide / length).astype(np.float32) if length else vector


def _modules(folder: Path) -> tuple[Pool, bool]:
    """Read `modules.json`: a model, one pooling module, and at most a scaling to length 1.

    Raises:
        ModelError: Another module, or a way of pooling that is not known here.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return "last", True
    pool: Pool = "last"
    normalize = False
    for module in read_json(path):
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pool = _pool_of(read_json(folder / str(module["path"]) / "config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(f"modules.json: a {kind} module is not served; possible: Transformer, Pooling, Normalize")
    return pool, normalize


def _pool_of(config: dict[str, Any]) -> Pool:
    """Read how states are pooled: a name, or in older files a switch for each.

    Raises:
        ModelError: Not as is known here, or several ways at once.
    """
    named = config.get("pooling_mode")
    names = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    modes = [named] if isinstance(named, str) else list(named or names)
    if len(modes) != 1 or modes[0] not in MODES:
        given = ", ".join(map(str, modes)) or "none"
        raise ModelError(f"1_Pooling: {given} is not served; possible: lasttoken, mean_tokens")
    return MODES[modes[0]]
