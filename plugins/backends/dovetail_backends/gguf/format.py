"""`gguf`: the kind `checkpoint` of llama.cpp's files. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dovetail.contracts.checkpoint import CheckpointFormat, Listing, TensorHeader
from dovetail.contracts.errors import ModelError
from dovetail_backends.gguf.blocks import BY_NAME, PLAIN
from dovetail_backends.gguf.config import generation_config, model_config
from dovetail_backends.gguf.names import GgufTensorName, named_tensors
from dovetail_backends.gguf.reader import MAGIC, Gguf, read_files
from dovetail_backends.gguf.texts import chat_templates, special_tokens

if TYPE_CHECKING:
    import tokenizers
    import torch

DIVIDED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""How files of a divided model are called."""


class GgufFile(CheckpointFormat):
    """Reads one file, or the parts of one."""

    @classmethod
    def claims(cls, listing: Listing) -> Sequence[str]:
        """Return the files of a model: those whose names say so, and a given one that begins so.

        Raises:
            ModelError: There are several models to choose from, or a part is missing.
        """
        if listing.is_file:
            (name,) = listing.names
            return _parts(listing, name) if name.endswith(".gguf") or listing.head(name, 4) == MAGIC else ()
        found = [name for name in listing.names if name.endswith(".gguf") and not name.startswith("mmproj")]
        models = [name for name in found if (part := DIVIDED.fullmatch(name)) is None or int(part[2]) == 1]
        if len(models) > 1:
            names = ", ".join(models[:8]) + (" and others" if len(models) > 8 else "")
            raise ModelError(
                f"model path {str(listing.folder)!r}: several GGUF files; give one of them as the path: {names}"
            )
        return _parts(listing, next(iter(models or found))) if found else ()

    @property
    def heads(self) -> Gguf:
        """What the heads of its files say.

        Raises:
            ModelError: One is broken.
        """
        return read_files(self.files)

    def config(self) -> Mapping[str, Any]:
        """Return the configuration that the keys describe.

        Raises:
            ModelError: A key is missing, or its value is another than belongs there.
        """
        try:
            return model_config(self.heads)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            file = self.files[0]
            raise ModelError(f"{file}: a value of its head cannot be read ({error}); get the file again") from None

    @cached_property
    def _named(self) -> Mapping[str, GgufTensorName]:
        return {named.name: named for named in named_tensors(self.heads)}

    def headers(self) -> Iterable[TensorHeader]:
        """Return the tensors under transformers' names; the shape of blocks is that of bytes.

        Raises:
            ModelError: Rows of queries or keys are no pairs in heads, or a norm is in blocks.
        """
        return [_header(named) for named in named_tensors(self.heads)]

    def tensor(self, header: TensorHeader, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor in transformers' order; a view where nothing has to be undone."""
        from dovetail_backends.gguf.tensors import undone

        return undone(self._named[header.name], data)

    def generation_config(self) -> Mapping[str, Any]:
        """Return ends and sampling."""
        return generation_config(self.heads)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of the vocabulary in the file."""
        from dovetail_backends.gguf.tokenizer import backend_of

        return backend_of(self.heads)

    def tokenizer_config(self) -> Mapping[str, Any]:
        """Return the special tokens."""
        return special_tokens(self.heads)

    def chat_templates(self) -> Mapping[str, str]:
        """Return the chat templates."""
        return chat_templates(self.heads)

    def end_id(self) -> int | None:
        """Return the id of `eos_token`."""
        return self.heads.token_id("eos")


def _parts(listing: Listing, name: str) -> list[str]:
    """Return the names of all files of a model, whichever of them was given.

    Raises:
        ModelError: One is not there.
    """
    divided = DIVIDED.fullmatch(name)
    if divided is None:
        return [name]
    num = int(divided[3])
    names = [f"{divided[1]}-{index:05}-of-{num:05}.gguf" for index in range(1, num + 1)]
    lost = [one for one in names if not (listing.folder / one).is_file()]
    if lost:
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        text = f"of the {num} files of this model {', '.join(lost[:4])}{more} are missing; get them"
        raise ModelError(f"{listing.folder / name}: {text}")
    return names


def _header(named: GgufTensorName) -> TensorHeader:
    place, start = named.place, named.place.offset
    if named.heads and named.shape[0] % (2 * named.heads):
        raise ModelError(f"{place.file}: {place.name} has {named.shape[0]} rows, no pairs in {named.heads} heads")
    if named.offset and place.kind not in PLAIN:
        raise ModelError(f"{place.file}: {place.name} is {place.kind}; a norm is F32, F16 or BF16")
    if named.expert is not None:
        start += named.expert * (place.num_bytes // place.shape[0])
    is_plain = BY_NAME[place.kind].numbers == 1
    shape = named.shape if is_plain else (*named.shape[:-1], place.row_bytes)
    numbers = () if is_plain else named.shape
    return TensorHeader(named.name, place.file, shape, place.kind, start=start, numbers=numbers)
