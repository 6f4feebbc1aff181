"""Reads a model folder before torch is imported: its config, held against the headers of its files. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail.contracts.config import ModelConfig
from dovetail.gguf.reader import gguf_of
from dovetail.runtime.checkpoint.claims import Held, check_claims, check_params, held
from dovetail.runtime.checkpoint.config_keys import TrackedConfig, made_by, translate
from dovetail.runtime.checkpoint.weight_files import weight_files
from dovetail.runtime.checkpoint.weight_size import TensorHeader, dense_numel, has_own_head, headers_of
from dovetail.runtime.hf_config import architecture, dense_config, modules_of, quant_method, read_config

logger = logging.getLogger(__name__)
INT_BITS = 2
"""Fewest bits of a quantised number: files pack them into bytes and words."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a model folder says.

    Attributes:
        path: The folder, or a GGUF file.
        architecture: The model class that its config names.
        config: The parsed `config.json`, or what a GGUF file says in the same words.
        headers: Of all tensors, file by file; None: weights are not read.
        files: What they hold, summed up; None: as above.
        notes: What is odd about the folder, in sentences.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    headers: tuple[TensorHeader, ...] | None = field(repr=False)
    files: Held | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, *, weights: bool = True) -> ModelFolder:
        """Read a folder.

        Args:
            path: The folder, or a GGUF file.
            weights: Whether it needs weights. Dummy weights do not.

        Raises:
            ModelError: A file is missing or broken, or claims a size that its tensors do not have.
        """
        config = read_config(path)
        name = architecture(config, path)
        modules_of(path)
        found = weight_files(path) if weights else None
        headers = None if found is None else tuple(headers_of(path, found))
        files = None if headers is None else held_by(path, headers, is_packed=bool(quant_method(config)))
        check_claims(config, files)
        return cls(path, name, config, headers, files, () if found is None or not found.note else (found.note,))

    def warn(self) -> None:
        """Log what is odd and served all the same; once for a start, so not while reading."""
        for note in self.notes:
            logger.warning("%s", note)

    def model_config(
        self, config_from_hf: Callable[[Mapping[str, Any]], ModelConfig], served: Collection[str] = ()
    ) -> ModelConfig:
        """Let a plugin translate the config; see `translate`.

        Raises:
            ModelError: It cannot, or the model has more parameters than the files hold.
        """
        return self._held(translate(config_from_hf, self.config, served=served))

    def plain_config(self) -> ModelConfig:
        """Return the facts of an architecture that the usual keys describe whole, without its plugin.

        Raises:
            ModelError: As `model_config`.
        """
        return self._held(made_by(dense_config, TrackedConfig(self.config)))

    def _held(self, config: ModelConfig) -> ModelConfig:
        if self.headers is None or self.files is None:
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
        check_params(dense_numel(config), self.files)
        return config


def held_by(path: Path, headers: Iterable[TensorHeader], *, is_packed: bool) -> Held:
    """Return what the weight files of a model folder hold.

    Args:
        path: The folder, or a GGUF file.
        headers: Of its tensors.
        is_packed: Several quantised numbers may share an item, of whatever dtype: bitsandbytes stores nf4 in bfloat16.

    Raises:
        ModelError: One is missing or broken.
    """
    if (gguf := gguf_of(path)) is not None:
        return held((place.name, place.shape, 1) for place in gguf.tensors.values())
    return held((header.name, header.shape, _numbers(header, is_packed)) for header in headers)


def _numbers(header: TensorHeader, is_packed: bool) -> int:
    """Return how many numbers each item of a tensor holds at most."""
    bits = header.num_bits
    return 1 if header.is_floating_point and bits >= 8 and not is_packed else max(1, bits // INT_BITS)
