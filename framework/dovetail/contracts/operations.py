"""The table of operations that kernel sets may compute: what each takes, gives and means in plain torch.

The rows stand in `operations.json`, beside this file. Importing this module does not import torch.

Letters: T rows of a step (tokens), H and F widths, N heads or outputs, K inputs, D head dim, R rank, V vocabulary size,
S device rows, E experts, I width between of an expert, C experts chosen for each token. Where tokens are folded into
states: B requests, C pieces of them, M copies of states, G key heads with J value heads each, N of these in all (of a
norm by groups: N groups), D and W widths of a key and of a value, K taps and P channels of a convolution. Rotations
have F factors: one number, or D / 2 in a tensor. "kept" is the dtype of states, float32 where `--state-dtype` does not
say otherwise. A gate or a convolution without an option `act` is followed by SiLU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dovetail.contracts.tables import table


class Component(NamedTuple):
    """An operation that another can be put together of.

    Attributes:
        op: Its name.
        dims: Its letters, each with its number, or the letter of the whole that has it; `2F`: twice that of `F`.
        options: Its options.
    """

    op: str
    dims: Mapping[str, str | int]
    options: Mapping[str, Any] = {}


PARTS = "parts"
"""As the meaning of an operation: its composition, of the meanings of its parts."""


class Operation(NamedTuple):
    """A row of `OPS`.

    Attributes:
        name: As an `Ask` names it.
        signature: Operands with their shapes, in order, and what comes back.
        dims: Letters of the shapes that are known when the model is built; an `Ask` holds each.
        meaning: `module:attr` of the function of plain torch that says what it computes, on any device; or `PARTS`.
        options: What else is known then; the meaning takes them as keywords, a kernel has them in its `Ask`.
        may_overwrite: Operands that a claim may say it overwrites.
        changes: Operands that it changes: that is what it is for.
        invariant_meaning: `module:attr` of the meaning where rows must not depend on each other, if it is another
            function.
        composed_of: Operations of which it can be put together, if a set serves one of those and none serves this; or
            `module:attr` of a function that returns them for an `Ask`.
        composition: `module:attr` of the function that does: it takes their kernels, and its options as keywords, and
            returns a kernel.
        is_row_by_row: Where rows must not depend on each other, the meaning is applied to each row by itself on a CPU:
            torch computes the ends of its loops by other instructions. All its operands are by row.
        packs: Its kernel is a `PackedKernel`, which makes what it reads of a stored matrix; its meaning is a class that
            takes the options.
        over_ranks: Each of several ranks calls it, all in one order; a kernel may read memory that ranks share
            (`KernelSet.connect`). Its last operand is the model's `Parallel`, by which its meaning adds up.
        reads_host: Its meaning reads tensors on the host: no graph can record it. Prompts come through it, and where
            rows may not depend on one another, what decodes does, too.
    """

    name: str
    signature: str
    dims: tuple[str, ...]
    meaning: str
    options: tuple[str, ...] = ()
    may_overwrite: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    invariant_meaning: str = ""
    composed_of: tuple[Component, ...] | str = ()
    composition: str = ""
    is_row_by_row: bool = False
    packs: bool = False
    over_ranks: bool = False
    reads_host: bool = False

    @property
    def operands(self) -> Mapping[str, str]:
        """What `signature` says of each operand behind its name, in order."""
        found = (each.strip().partition(" ") for each in _BETWEEN.split(self.signature.partition(" -> ")[0]))
        return {name: facts for name, _, facts in found}


_BETWEEN = re.compile(r",(?![^\[]*\])")
"""Commas between operands, not within a shape."""


def _operation(row: dict[str, Any]) -> Operation:
    """Make a row of the table of what JSON has of it: lists of names are tuples, or sets where no order counts."""
    for field in ("dims", "options"):
        row[field] = tuple(row.get(field, ()))
    for field in ("may_overwrite", "changes"):
        row[field] = frozenset(row.get(field, ()))
    if isinstance(parts := row.get("composed_of"), list):
        row["composed_of"] = tuple(Component(**part) for part in parts)
    return Operation(**row)


_ROWS: list[dict[str, Any]] = table(__file__)
OPS: Mapping[str, Operation] = {row["name"]: _operation(row) for row in _ROWS}
"""Every operation that a set may claim, by name. What it computes is its meaning, to the tolerance of the kit."""
