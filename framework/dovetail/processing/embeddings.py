"""What a checkpoint says of embeddings, and how one is made of a pooled hidden state.

Read are the files of sentence-transformers: `modules.json` with the configs of its modules, `sentence_bert_config.json`
and the prompts of `config_sentence_transformers.json`; and of the model's own `config.json` whether a shorter vector is
worth something (`matryoshka_dimensions`, `is_matryoshka`). Without them a causal model gives its last token's state and
an encoder its first one's, at length 1, as vLLM has it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.messages import Pool
from dovetail.runtime.checkpoint.folder import EmbeddingModule, ModelFolder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]

# The `Dense` module of sentence-transformers: a matrix that a pooled vector goes through. Needs no torch.

ACTIVATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "Identity": lambda np, x: x,
    "Tanh": lambda np, x: np.tanh(x),
    "ReLU": lambda np, x: np.maximum(x, 0),
    "Sigmoid": lambda np, x: 1 / (1 + np.exp(-x)),
    "SiLU": lambda np, x: x * (1 / (1 + np.exp(-x))),
}
"""By name, what it makes of a vector; numpy is imported only once somebody asks for embeddings."""


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

    def applied(self, vector: Vector) -> Vector:
        """Map `[in]` to `[out]`."""
        import numpy as np

        weights = _read(self.file)
        found: Any = weights["linear.weight"] @ vector
        if (bias := weights.get("linear.bias")) is not None:
            found = found + bias
        made: Vector = ACTIVATIONS[self.activation](np, found)
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


MODES: dict[str, Pool] = {
    **{"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
}
NO_LENGTH = 1 << 30
POSSIBLE = "cls_token, lasttoken, mean_tokens"


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a text before it is tokenized.

    Attributes:
        prompts: What stands before it, by name.
        default: The name that holds where a request gives none; None: nothing stands before it.
        is_lower: It is written in lower case.
    """

    prompts: dict[str, str] = {}
    default: str | None = None
    is_lower: bool = False

    def applied(self, text: str, name: str | None = None) -> str:
        """Return a text as the model was trained to read it.

        Raises:
            RequestError: The model has no prompt of that name.
        """
        if name and name not in self.prompts:
            possible = ", ".join(self.prompts) or "none"
            what = f"prompt_name {name!r}: not in config_sentence_transformers.json; possible: {possible}"
            raise RequestError(what, param="prompt_name", code="invalid_value")
        name = self.default if name is None else name
        text = self.prompts.get(name or "", "") + text
        return text.lower() if self.is_lower else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """How embeddings are made.

    Attributes:
        pool: What of the hidden states is asked for.
        normalize: Vectors have length 1.
        dense: Matrices that vectors go through first, in order.
        dimensions: Lengths that a vector may be cut to; empty: any, if `is_nested`.
        is_nested: It was trained so that the first numbers of a vector are one, too.
        max_tokens: The longest text that it was made for; None: what the model takes.
        rules: What becomes of texts.
        is_declared: The folder says that embeddings are what it is for.
        obstacle: Why the checkpoint's embeddings cannot be made; empty if they can.
    """

    pool: Pool = "last"
    normalize: bool = True
    dense: tuple[Dense, ...] = ()
    dimensions: tuple[int, ...] = ()
    is_nested: bool = False
    max_tokens: int | None = None
    rules: TextRules = field(default_factory=TextRules)
    is_declared: bool = False
    obstacle: str = ""

    @classmethod
    def of_folder(cls, folder: ModelFolder, pool: Pool = "last") -> Embedder:
        """Ask a model folder. What cannot be made of it is an `obstacle`: the model may still generate.

        Args:
            folder: The model's.
            pool: What holds where the folder does not say: the architecture's.
        """
        config = folder.config
        try:
            sizes = tuple(map(int, config.get("matryoshka_dimensions") or ()))
            plain = cls(pool=pool, dimensions=sizes, is_nested=bool(sizes or config.get("is_matryoshka")))
            return _with_modules(folder, plain)
        except ModelError as error:
            return cls(obstacle=str(error))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return cls(obstacle="modules.json or 1_Pooling/config.json is not as sentence-transformers writes it")

    def size(self, hidden_size: int) -> int:
        """Return how many numbers a whole vector has."""
        return self.dense[-1].out_features if self.dense else hidden_size

    def check(self, dimensions: int | None, hidden_size: int) -> None:
        """Refuse what cannot be made.

        Raises:
            RequestError: The checkpoint's embeddings cannot be made, or not with so many dimensions.
        """
        if self.obstacle:
            text = f"this checkpoint's embeddings cannot be made: {self.obstacle}"
            raise RequestError(text, param="model", code="unsupported_model")
        size = self.size(hidden_size)
        if dimensions is None or dimensions == size:
            return
        if not self.is_nested:
            text = (
                f"the model was not trained for shorter vectors (no matryoshka_dimensions in config.json): dimensions "
                f"can be {size}; leave it out"
            )
            raise RequestError(text, param="dimensions", code="unsupported_parameter")
        if dimensions > size or (self.dimensions and dimensions not in self.dimensions):
            possible = ", ".join(map(str, self.dimensions)) or f"1 to {size}"
            text = f"dimensions must be one of: {possible} (given: {dimensions})"
            raise RequestError(text, param="dimensions", code="invalid_value")

    def finish(self, pooled: bytes, dimensions: int | None = None, *, normalize: bool | None = None) -> Vector:
        """Make an embedding of what the engine pooled: by its matrices, cut, then scaled to length 1.

        Args:
            pooled: From `TokenDelta.pooled`.
            dimensions: How many numbers to keep; None: all.
            normalize: None: as the checkpoint says.
        """
        import numpy as np  # the server's process has it only once somebody asks for embeddings

        vector: Vector = np.frombuffer(pooled, dtype=np.float32)
        for dense in self.dense:
            vector = dense.applied(vector)
        vector = vector[:dimensions]
        if not (self.normalize if normalize is None else normalize):
            return vector
        wide = vector.astype(np.float64)
        length = float(np.sqrt((wide * wide).sum()))
        return (wide / length).astype(np.float32) if length else vector


def _with_modules(folder: ModelFolder, plain: Embedder) -> Embedder:
    """Read `modules.json`: a model, one pooling module, then matrices and at most a scaling to length 1.

    Raises:
        ModelError: Another module, another order, or a way of pooling that is not known here.
    """
    if not folder.modules:
        return plain
    rules = TextRules(
        prompts=dict(folder.prompts.get("prompts") or {}), default=folder.prompts.get("default_prompt_name")
    )
    found = replace(plain, normalize=False, is_declared=True, rules=rules)
    for module in folder.modules:
        kind = module.kind
        if found.normalize and kind in ("Pooling", "Dense"):
            raise ModelError(f"modules.json: a {kind} module behind Normalize is not served")
        if kind == "Transformer":
            found = _with_lengths(module, found)
        elif kind == "Pooling":
            found = replace(found, pool=_pool_of(module.config, found.rules))
        elif kind == "Dense":
            found = replace(found, dense=(*found.dense, Dense.of_module(module)))
        elif kind == "Normalize":
            found = replace(found, normalize=True)
        else:
            possible = "Transformer, Pooling, Dense, Normalize"
            raise ModelError(f"modules.json: a {kind} module is not served; possible: {possible}")
    return found


def _with_lengths(module: EmbeddingModule, found: Embedder) -> Embedder:
    """Read `sentence_bert_config.json`: how long texts may be, and whether they are written in lower case.

    Newer files leave the length to `tokenizer_config.json`, which writes a huge number where there is none.
    """
    given, other = module.object("sentence_bert_config.json"), module.object("tokenizer_config.json")
    rules = msgspec.structs.replace(found.rules, is_lower=bool(given.get("do_lower_case")))
    most = given.get("max_seq_length") or other.get("model_max_length")
    return replace(found, max_tokens=int(most) if most and most < NO_LENGTH else None, rules=rules)


def _pool_of(config: Mapping[str, Any], rules: TextRules) -> Pool:
    """Read how states are pooled: a name, or in older files a switch for each.

    Raises:
        ModelError: Not as is known here, or several ways at once.
    """
    named = config.get("pooling_mode")
    names = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    modes = [named] if isinstance(named, str) else list(named or names)
    if len(modes) != 1 or modes[0] not in MODES:
        given = ", ".join(map(str, modes)) or "none"
        raise ModelError(f"1_Pooling: {given} is not served; possible: {POSSIBLE}")
    if config.get("include_prompt") is False and any(rules.prompts.values()):
        raise ModelError("1_Pooling: include_prompt false is not served, and the model has prompts")
    return MODES[modes[0]]
