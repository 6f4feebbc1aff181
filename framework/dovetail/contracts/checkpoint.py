"""Checkpoints: what a file says of its tensors before one is read, and formats of files. Does not import torch."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    import tokenizers
    import torch


class TensorHeader(NamedTuple):
    """What a checkpoint's file says of one tensor before it is read."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it: `BF16`, `F8_E4M3`, `I64`, `BOOL`; another word for what is stored as bytes."""
    is_made: bool = False
    """It is not in the file: a conversion makes it."""
    start: int = 0
    """Of its bytes in the file."""
    numbers: tuple[int, ...] = ()
    """The shape of the numbers that it stands for, where `shape` counts bytes that hold several; else empty."""
    num_stored: int = -1
    """Its bytes in the file where they are not as many as shape and dtype say, as of compressed ones; else -1."""

    @property
    def num_bits(self) -> int:
        """Size of an item."""
        digits = "".join(takewhile(str.isdecimal, self.dtype.lstrip("BFIU")))
        return int(digits) if digits else 8

    @property
    def num_bytes(self) -> int:
        """Size once it is read."""
        return prod(self.shape) * self.num_bits // 8

    @property
    def stored_bytes(self) -> int:
        """Size in the file."""
        return self.num_bytes if self.num_stored < 0 else self.num_stored

    @property
    def is_floating_point(self) -> bool:
        """Whether its numbers have a fraction."""
        return self.dtype.startswith(("F", "BF"))


class Listing(NamedTuple):
    """What stands at a model path, from which a format tells whether it is its own."""

    folder: Path
    names: tuple[str, ...]
    """Of the folder's files, sorted; of a path that is a file its own name alone."""
    is_file: bool = False
    """Whether the path is a file, not a folder."""

    def head(self, name: str, num_bytes: int) -> bytes:
        """Return the first bytes of a file; fewer where it is shorter, none where it cannot be read."""
        try:
            with (self.folder / name).open("rb") as file:
                return file.read(num_bytes)
        except OSError:
            return b""


class CheckpointFormat(Configurable, ABC):
    """Reads checkpoints of one format. Its module imports no torch: it is asked before torch is there.

    `--load-format auto` asks the installed formats of a path that has no `*.safetensors`, and the one that claims files
    is made of them; a name asks that format alone. What it does not say (None) the usual files beside say:
    `config.json`, `generation_config.json`, `tokenizer.json` and the others.

    The core maps the files, checks what headers claim against them and the configuration against the headers, and
    hands out bytes; so a format allocates nothing for a size that a file claims. Whatever is wrong with a file is a
    `ModelError` that names the file and the fix.

    Attributes:
        is_filled: It reads no tensors: `fill` makes each parameter up. Configuration and tokenizer are those of what
            else stands at the path.
        files: Its files, in the order in which `claims` names them.
    """

    is_filled: ClassVar[bool] = False

    @classmethod
    def claims(cls, listing: Listing) -> Sequence[str]:
        """Return the names of the files that it reads; none if the path is not its own.

        Args:
            listing: What stands at the path. Files beside a given one may be named, too, but none of other folders.

        Raises:
            ModelError: It is its own and cannot be read: several models to choose from, a part that is missing.
        """
        return ()

    def __init__(self, files: Sequence[Path]) -> None:
        """Take the files that were claimed. May read their heads; the core has seen that each is there."""
        self.files = tuple(files)

    def config(self) -> Mapping[str, Any] | None:
        """Return the model's facts in the words of `config.json`; its `quantization_config` names who reads blocks."""
        return None

    def headers(self) -> Iterable[TensorHeader]:
        """Return the header of each tensor, file by file, under the names that checkpoints of transformers have.

        The core refuses a name that is there twice, bytes outside of the file, and more tensors than models have.
        """
        return ()

    def tensor(self, header: TensorHeader, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor of its bytes, as the header says it.

        Args:
            header: One of `headers`.
            data: uint8 `[stored_bytes]`, a view of the mapped file, not to be written.

        Returns:
            Of the header's shape and dtype, uint8 for a dtype that safetensors has not. A view where it can be.
        """
        raise NotImplementedError(f"{type(self).__name__} has headers and no tensor()")

    def fill(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Write a parameter in place, of a format that `is_filled`.

        Args:
            name: The parameter's path in the model.
            parameter: In the model's dtype, on its device.
            generator: Of random numbers, on that device.
        """
        raise NotImplementedError(f"{type(self).__name__} is filled and has no fill()")

    def generation_config(self) -> Mapping[str, Any] | None:
        """Return what ends a reply and how it is sampled, in the words of `generation_config.json`."""
        return None

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """Return the tokenizer."""
        return None

    def tokenizer_config(self) -> Mapping[str, Any] | None:
        """Return special tokens by name (`bos_token`), and the rest of `tokenizer_config.json`."""
        return None

    def chat_templates(self) -> Mapping[str, str] | None:
        """Return the chat templates by name; `default` is the usual one."""
        return None

    def end_id(self) -> int | None:
        """Return the id of the token `eos_token`; None where only the tokenizer tells."""
        return None
