"""Holds the tensors that a model wants against those of its files, by name and shape. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.contracts.checkpoint import TensorHeader
from dovetail.contracts.errors import ModelError
from dovetail.sdk.config import some

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
