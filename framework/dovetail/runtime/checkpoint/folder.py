"""Reads a model folder: config, tokenizer's files, and headers of tensors, held against each other. Needs no torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.base.model_files import object_if_there, read_object
from dovetail.checkpoint.formats import Formats, StoredFormat
from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ConfigFacts
from dovetail.runtime.checkpoint.claims import CheckpointContents, check_claims, check_params, held
from dovetail.runtime.checkpoint.config_keys import translate
from dovetail.runtime.checkpoint.weight_files import WeightFiles, weight_files
from dovetail.runtime.checkpoint.weight_size import HEAD, has_own_head, headers_of, stored_headers
from dovetail.runtime.hf_config import architecture, config_of, modules_of, quant_method
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import some

# Holds the tensors that a model wants against those of its files, by name and shape. Does not import torch.

MOST_NAMED = 3
"""Tensors of each kind of fault that one line names."""


@dataclass(slots=True)
class Account:
    """What does not fit."""

    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def check(self, folder: Path) -> None:
        """Raise the one error that names all.

        Raises:
            ModelError: Something does not fit.
        """
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "wrong shape or type": self.misshapen}
        kinds["there twice"] = self.twice
        parts = [f"{what}: {some(names, MOST_NAMED)}" for what, names in kinds.items() if names]
        if parts:
            raise ModelError(
                f"{folder}: the weights do not fit the model; {'; '.join(parts)}; does config.json belong to this "
                "checkpoint?"
            )


def check_fit(
    folder: Path, wanted: Mapping[str, tuple[int, ...]], headers: Sequence[TensorHeader], unneeded: str
) -> None:
    """Check that every wanted tensor is there, in its shape, and no other one.

    Args:
        folder: The model's.
        wanted: Shapes by name, of a checkpoint that is not quantised.
        headers: Of its tensors.
        unneeded: Names that may be there all the same, as a regular expression.

    Raises:
        ModelError: One is missing, surplus or misshapen; all are named, with their files.
    """
    account = Account()
    for header in headers:
        shape, file = wanted.get(header.name), f"({header.file.name})"
        if shape is None:
            if not re.fullmatch(unneeded, header.name):
                account.unexpected.append(f"{header.name} {file}")
        elif not header.is_floating_point:
            account.misshapen.append(f"{header.name} {header.dtype} instead of a floating-point type {file}")
        elif header.shape != shape:
            account.misshapen.append(f"{header.name} {list(header.shape)} instead of {list(shape)} {file}")
    if not account.misshapen:
        account.missing = sorted(wanted.keys() - {header.name for header in headers})
    account.check(folder)


logger = logging.getLogger(__name__)
INT_BITS = 2
"""Fewest bits of a quantised number: files pack them into bytes and words."""


class EmbeddingModule:
    """A module of sentence-transformers, as `modules.json` lists it."""

    def __init__(self, kind: str, path: Path) -> None:
        """Take its class's name and its folder; nothing is read."""
        self.kind, self.path = kind, path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its `config.json`.

        Raises:
            ModelError: It is not there, or no JSON object.
        """
        return read_object(self.path / "config.json")

    def object(self, name: str) -> Mapping[str, Any]:
        """Return another JSON file of its folder; empty where there is none.

        Raises:
            ModelError: It is no JSON object.
        """
        return object_if_there(self.path / name)


class ModelFolder:
    """What a model folder says. Each file is read once, when it is first asked for; `check` holds them together.

    Attributes:
        path: The folder, or a file that a format reads.
        tokenizer_path: Where its tokenizer is, mostly the same.
    """

    def __init__(
        self, path: Path, tokenizer: Path | None = None, *, weights: bool = True, formats: Formats | None = None
    ) -> None:
        """Say where it is; nothing is read.

        Args:
            path: The folder, or a file that a format reads.
            tokenizer: The tokenizer's, if it is another one.
            weights: Whether it needs weights. A format that makes them up does not.
            formats: Those that may read it; None: all that are installed.
        """
        self.path, self.tokenizer_path, self._has_weights = path, tokenizer or path, weights
        self.formats = formats or Formats.installed()

    @classmethod
    def read(
        cls, path: Path, tokenizer: Path | None = None, *, weights: bool = True, formats: Formats | None = None
    ) -> ModelFolder:
        """Read and check a folder. Arguments and errors are those of `__init__` and `check`."""
        folder = cls(path, tokenizer, weights=weights, formats=formats)
        folder.check()
        return folder

    @cached_property
    def stored(self) -> StoredFormat | None:
        """What a format of the plugin kind reads of it; None: it is a folder as transformers writes them.

        Raises:
            ModelError: Several formats claim it, or the one that `--load-format` names does not.
        """
        return self.formats.at(self.path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The parsed `config.json`, or what a format says in the same words; `check` looks at its numbers.

        Raises:
            ModelError: It is missing or broken.
        """
        return config_of(self.path, self.stored)

    @cached_property
    def architecture(self) -> str:
        """The model class that the config names.

        Raises:
            ModelError: It names none.
        """
        return architecture(self.config, self.path)

    @cached_property
    def texts(self) -> TokenizerFiles:
        """What the files say of tokenizer, chat templates, sampling and the end of a reply.

        Raises:
            ModelError: One is broken.
        """
        same = self.tokenizer_path == self.path
        own = self.stored if same else self.formats.at(self.tokenizer_path, is_model=False)
        return TokenizerFiles.of(self.tokenizer_path, own, self.path, self.stored, self.config)

    @cached_property
    def modules(self) -> tuple[EmbeddingModule, ...]:
        """Modules of sentence-transformers, in order; mostly none.

        Raises:
            ModelError: `modules.json` is no list of modules, or one lies outside of the folder.
        """
        return tuple(EmbeddingModule(kind, place) for kind, place in modules_of(self.path))

    @cached_property
    def prompts(self) -> Mapping[str, Any]:
        """What sentence-transformers says of prompts: its `config_sentence_transformers.json`; mostly nothing.

        Raises:
            ModelError: It is no JSON object.
        """
        return object_if_there(self.path / "config_sentence_transformers.json")

    @cached_property
    def _files(self) -> WeightFiles | None:
        return weight_files(self.path) if self._has_weights and self.stored is None else None

    @cached_property
    def headers(self) -> tuple[TensorHeader, ...] | None:
        """Of all tensors, file by file; None: weights are not read.

        Raises:
            ModelError: A file is missing or broken.
        """
        if not self._has_weights:
            return None
        if self.stored is not None:
            return tuple(stored_headers(self.stored))
        return None if self._files is None else tuple(headers_of(self.path, self._files))

    @cached_property
    def _held(self) -> CheckpointContents | None:
        """What the weight files hold, summed up; None: they are not read."""
        if self.headers is None:
            return None
        is_packed = bool(quant_method(self.config))
        return held((h.name, h.numbers or h.shape, 1 if h.numbers else _numbers(h, is_packed)) for h in self.headers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight files that are there, whether they are whole or not."""
        files = self.path.glob("*.safetensors") if self.stored is None else self.stored.files
        return sum(file.stat().st_size for file in files if file.is_file())

    def check(self) -> None:
        """Hold what the config claims against the headers of the tensors, once; who translates the config has it done.

        Raises:
            ModelError: A file is missing or broken, or claims a size that its tensors do not have.
        """
        _ = self.architecture, self.modules, self._claims

    @cached_property
    def _claims(self) -> None:
        check_claims(self.config, self._held)

    def with_tokenizer(self, path: Path) -> ModelFolder:
        """Return the same model with the tokenizer of another folder."""
        return self if path == self.tokenizer_path else self._copy(path, ("texts",), weights=self._has_weights)

    def without_weights(self) -> ModelFolder:
        """Return the same without the headers of its tensors, which take megabytes of a large model."""
        return self._copy(self.tokenizer_path, ("_files", "headers", "_held", "_claims"), weights=False)

    def _copy(self, tokenizer: Path, unread: Collection[str], *, weights: bool) -> ModelFolder:
        made = ModelFolder(self.path, tokenizer, weights=weights, formats=self.formats)
        vars(made).update({name: value for name, value in vars(self).items() if name not in (*vars(made), *unread)})
        return made

    def warn(self) -> None:
        """Log what is odd and served all the same; once for a start, so not while reading."""
        if self._files is not None and self._files.note:
            logger.warning("%s", self._files.note)

    def model_config(
        self, config_from_hf: Callable[[Mapping[str, Any]], ModelConfig], served: Collection[str] = ()
    ) -> ModelConfig:
        """Let a plugin translate the config; see `translate`.

        Raises:
            ModelError: It cannot, or the model has more parameters than the files hold.
        """
        self.check()
        return self._as_held(translate(config_from_hf, self.config, served=served))

    def claimed_config(self, facts: type[ConfigFacts], served: Collection[str] = ()) -> ModelConfig:
        """Let what needs no torch translate the config, and hold it against the tensors' headers; logs nothing.

        Args:
            facts: What a model's manifest names.
            served: As of `model_config`.

        Raises:
            ModelError: As `model_config`, or tensors are missing, surplus or misshapen.
        """
        self.check()
        config = translate(facts.config_from_hf, self.config, served=served, warns=False)
        if self.headers is None or self._held is None:
            return config
        check_params(dense_numel(config), self._held)
        if self.stored is None and not quant_method(self.config):
            has_head = any(
                HEAD.fullmatch(header.name) for header in self.headers
            )  # one of its own is used, though tied
            untied = replace(config, tie_word_embeddings=config.tie_word_embeddings and not has_head)
            wanted = facts.tensors(untied, {header.name for header in self.headers})
            check_fit(self.path, wanted, self.headers, facts.unneeded)
        return config

    def _as_held(self, config: ModelConfig) -> ModelConfig:
        if self.headers is None or self._held is None:
            return config
        if config.tie_word_embeddings and config.generates and has_own_head(self.headers):
            logger.warning(
                "%s: the config ties the output head to the embedding, and the files have another lm_head: it is used. "
                'Write "tie_word_embeddings": false into config.json if that is right, else remove the tensor.',
                self.path,
            )
            tables = config.vocab_size * config.hidden_size
            params = None if config.num_params is None else config.num_params + tables
            config = replace(config, tie_word_embeddings=False, num_params=params)
        check_params(dense_numel(config), self._held)
        return config


def _numbers(header: TensorHeader, is_packed: bool) -> int:
    """Return how many numbers each item of a tensor holds at most.

    `is_packed`: several quantised numbers may share one, of whatever dtype: bitsandbytes stores nf4 in bfloat16.
    """
    bits = header.num_bits
    return 1 if header.is_floating_point and bits >= 8 and not is_packed else max(1, bits // INT_BITS)
