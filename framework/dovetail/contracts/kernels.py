"""Kind `kernels`: what computes a model's operations, chosen once for each place while the model is built.

`OPS` is the table of operations: operands, letters of their shapes, and what each means in plain torch. A `KernelSet`
claims rows of it for a device, a dtype and widths, and makes a function for each. A layer binds the operation when it
is built, `norm = ctx.operation("rms_norm", H=hidden)`, and calls what it got; nothing is chosen per call.

```python
class Acme(KernelSet):
    devices = frozenset({"cuda"})

    def serves(self, ask):
        if ask.op != "rms_norm" or ask.dtype != "bfloat16":
            return f"no {ask.op} of {ask.dtype}"
        return Claim(ask.rows, capturable=True, row_independent=True)

    def make(self, ask):
        from acme_kernels import rms_norm  # not earlier: nothing is imported for what is not used
        return rms_norm
```

The class is named in the entry-point group `dovetail.kernels.v1`; `--kernels acme,triton` asks `acme` first. Importing
this module does not import torch. Letters: T rows of a step (tokens), H and F widths, N heads, D head dim, R rank,
V vocabulary size, S device rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Protocol

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import PluginError
from dovetail.contracts.options import Configurable

Kernel = Callable[..., Any]
"""Computes an operation: takes and returns what its row of `OPS` says."""

ANY_ROWS = (0, (1 << 31) - 1)
"""Fewest and most rows of a call where a place of the model may get any number."""


class Part(NamedTuple):
    """An operation that another can be put together of.

    Attributes:
        op: Its name.
        dims: Its letters, each with that of the whole whose number it has; `2F`: twice the number of `F`.
        options: Its options.
    """

    op: str
    dims: Mapping[str, str]
    options: Mapping[str, Any] = {}


class Operation(NamedTuple):
    """A row of `OPS`.

    Attributes:
        name: As an `Ask` names it.
        signature: Operands with their shapes, in order, and what comes back.
        dims: Letters of the shapes that are known when the model is built; an `Ask` holds each.
        meaning: `module:attr` of the function of plain torch that says what it computes, on any device.
        options: What else is known then; the meaning takes them as keywords, a kernel has them in its `Ask`.
        may_overwrite: Operands that a claim may say it overwrites.
        changes: Operands that it changes: that is what it is for.
        apart: `module:attr` of the meaning where rows must not depend on each other, if it is another function.
        composed_of: Operations of which it can be put together, if a set serves one of those and none serves this.
        composition: `module:attr` of the function that does: it takes their kernels and returns a kernel.
        is_row_by_row: Where rows must not depend on each other, the meaning is applied to each row by itself on a CPU:
            torch computes the ends of its loops by other instructions. All its operands are by row.
    """

    name: str
    signature: str
    dims: tuple[str, ...]
    meaning: str
    options: tuple[str, ...] = ()
    may_overwrite: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    apart: str = ""
    composed_of: tuple[Part, ...] = ()
    composition: str = ""
    is_row_by_row: bool = False


_PLAIN = "dovetail.sdk.layers.ops.reference"
_NORM, _LINEAR = Part("rms_norm", {"H": "K"}), Part("linear", {"N": "N", "K": "K"})
_STEP = "dovetail.sdk.step"
_DRAWS = "dovetail.sdk.draws"
_ROWS = "floats [F, S], numbers [N, S]"

OPS: Mapping[str, Operation] = {
    row.name: row
    for row in (
        Operation("rms_norm", "x [T, H], weight [H], eps -> [T, H]", ("H",), f"{_PLAIN}:rms_norm"),
        Operation(
            "add_rms_norm",
            "x [T, H], residual [T, H], weight [H], eps -> norm of the sum [T, H], sum [T, H]",
            ("H",),
            f"{_PLAIN}:add_rms_norm",
            may_overwrite=frozenset({"x", "residual"}),
            composed_of=(Part("rms_norm", {"H": "H"}),),
            composition=f"{_PLAIN}:added_rms_norm",
        ),
        Operation("wide_rms_norm", "x [T, H], weight [H] float32, eps -> [T, H]", ("H",), f"{_PLAIN}:wide_rms_norm"),
        Operation("layer_norm", "x [T, H], weight [H], bias [H] | None, eps -> [T, H]", ("H",), f"{_PLAIN}:layer_norm"),
        Operation(
            "rotations",
            "positions [T], freqs [D / 2] float32, factor [] or [F] -> cos [T, 1, D], sin [T, 1, D]",
            ("D", "F"),  # F factors: 1, a number, or D / 2, a tensor
            f"{_PLAIN}:rotations",
            options=("dtype",),
        ),
        Operation(
            "norm_rotate",
            "x [T, N, D], weight [N, D] or None, eps, cos [T, 1, D], sin [T, 1, D] -> [T, N, D]",
            ("D",),
            f"{_PLAIN}:norm_rotate",
        ),
        Operation(
            "latent_rows",
            "q [T, N, nope + D], kv_a [T, R + D], weight [R], eps, cos [T, 1, D], sin [T, 1, D] -> "
            "queries [T, N, R + D], rows [T, 1, R + D]",
            ("R", "D"),
            f"{_PLAIN}:latent_rows",
        ),
        Operation(
            "act_and_mul",
            "gate_up [T, 2F] -> [T, F]",
            ("F",),
            f"{_PLAIN}:act_and_mul",
            options=("act",),
            is_row_by_row=True,
        ),
        Operation(
            "linear",
            "x [T, K], weight [N, K], bias [N] | None -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:linear",
            apart="dovetail.sdk.layers.ops.invariant:linear",
        ),
        Operation(
            "wide_linear",
            "x [T, K], weight [N, K], bias [N] | None -> [T, N] float32",
            ("N", "K"),
            f"{_PLAIN}:wide_linear",
            apart=f"{_PLAIN}:invariant_wide_linear",
        ),
        Operation(
            "linear_add",
            "x [T, K], weight [N, K], bias [N] | None, residual [T, N] -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:linear_add",
            may_overwrite=frozenset({"residual"}),
            apart=f"{_PLAIN}:invariant_linear_add",
            composed_of=(_LINEAR,),
            composition=f"{_PLAIN}:added_linear",
        ),
        Operation(
            "norm_linear",
            "x [T, K], norm [K], eps, weight [N, K], bias [N] | None -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:norm_linear",
            composed_of=(_NORM, _LINEAR),
            composition=f"{_PLAIN}:normed_linear",
        ),
        Operation(
            "norm_gate",  # silu
            "x [T, K], norm [K], eps, weight [2F, K], bias [2F] | None -> [T, F]",
            ("F", "K"),
            f"{_PLAIN}:norm_gate",
            composed_of=(
                _NORM,
                Part("linear", {"N": "2F", "K": "K"}),
                Part("act_and_mul", {"F": "F"}, {"act": "silu_and_mul"}),
            ),
            composition=f"{_PLAIN}:normed_gate",
        ),
        Operation(
            "mask_logits",
            "logits [T, V] float32, mask [K, W] int32, rows [K] -> None",
            ("V",),
            f"{_STEP}:mask_logits",
            changes=frozenset({"logits"}),
        ),
        Operation(
            "draw",
            "logits [T, V], greedy [T], temperature [T], top_p [T], min_p [T], top_k [T], seeds [T], positions [T] -> "
            "tokens [T]",
            ("V",),
            f"{_DRAWS}:draw",
            is_row_by_row=True,
        ),
        Operation(
            "draw_plainly",
            f"logits [T, V], greedy [T], rows [T], next_ids [S], seq_lens [S], {_ROWS} -> tokens [T]",
            ("V",),
            f"{_DRAWS}:draw_plainly",
            changes=frozenset({"next_ids"}),
        ),
        Operation(
            "draw_adjusted",
            "logits [T, V], rows [T], lines [T], masks [K, W], next_ids [S], seq_lens [S], "
            f"{_ROWS}, stops [S, A], bias_ids [S, B], bias [S, B], said [N, V], read [N, V], spare -> "
            "tokens [T], told [T, P]",
            ("V",),
            f"{_DRAWS}:draw_adjusted",
            changes=frozenset({"next_ids", "said"}),
        ),
        Operation(
            "begin_step",
            "rows [T], next_ids [S], seq_lens [S], page_table [S, P], page_size, spare -> "
            "tokens [T], positions [T], slots [T], lens [T]",
            (),
            f"{_STEP}:begin_step",
        ),
        Operation(
            "finish_step",
            "logits [T, V], rows [T], lens [T], next_ids [S], seq_lens [S], spare -> tokens [T], non_finite [T]",
            ("V",),
            f"{_STEP}:finish_step",
            changes=frozenset({"next_ids", "seq_lens"}),
        ),
        Operation(
            "check_finite",
            "hidden [T, H], starts [B], non_finite [B] -> None",
            ("H",),
            f"{_STEP}:check_finite",
            changes=frozenset({"non_finite"}),
        ),
        Operation(
            "write_changes",
            f"sent [E], tables [G, S, P], next_ids [S], seq_lens [S], {_ROWS}, num_entries, num_cleared, num_admits -> "
            "None",
            (),
            f"{_STEP}:write_changes",
            changes=frozenset({"tables", "next_ids", "seq_lens", "floats", "numbers"}),
        ),
    )
}
"""Every operation that a set may claim, by name. What it computes is its meaning, to the tolerance of the kit."""


class Ask(NamedTuple):
    """An operation at a place of the model; equal places are asked for once.

    Attributes:
        op: A key of `OPS`.
        device: Where.
        dtype: The model's, as torch names it: `bfloat16`.
        dims: (letter, number) of each of the operation's `dims`, in their order.
        options: (name, value) of each of its options, in their order.
        rows: Fewest and most rows T of a call.
        invariant: A row's bits must not depend on the other rows, or on how many there are.
        captured: Steps may be recorded in a graph.
    """

    op: str
    device: DeviceView
    dtype: str
    dims: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...] = ()
    rows: tuple[int, int] = ANY_ROWS
    invariant: bool = False
    captured: bool = False

    def dim(self, letter: str) -> int:
        """Return one of `dims`."""
        return dict(self.dims)[letter]

    def option(self, name: str) -> Any:
        """Return one of `options`."""
        return dict(self.options)[name]

    @property
    def place(self) -> str:
        """The operation with widths and options, as tables and errors show it: `act_and_mul F=96 act=silu_and_mul`."""
        return " ".join([self.op, *(f"{name}={value}" for name, value in (*self.dims, *self.options))])


class Claim(NamedTuple):
    """What holds for a kernel; the conformance kit checks every word.

    Attributes:
        rows: Fewest and most rows that it takes, within those asked for. Other rows go on down the list of sets.
        overwrites: Operands whose memory it writes to, of the operation's `may_overwrite`.
        capturable: A CUDA graph can record it: it reads nothing on the host, and its memory comes from torch.
        row_independent: A row's bits depend neither on other rows nor on how many there are.
    """

    rows: tuple[int, int]
    overwrites: frozenset[str] = frozenset()
    capturable: bool = False
    row_independent: bool = False


class KernelSet(Configurable, ABC):
    """Kernels for some operations on some devices. One object serves a process."""

    devices: ClassVar[frozenset[str]] = frozenset()
    """Kinds of devices that it has kernels for; on others it is not asked."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Those of kernels that Triton compiles: a worker that compiles ahead imports them early, as that takes seconds."""

    @abstractmethod
    def serves(self, ask: Ask) -> Claim | str:
        """Return what holds for the kernel of an operation, or in a line why there is none. Imports no kernel."""

    @abstractmethod
    def make(self, ask: Ask) -> Kernel:
        """Return the kernel of an operation that it has claimed: a function of the operands in `OPS`.

        Called while the model is built, before its weights are read. The function is shared by all equal places of the
        model, and called for every step; it may be given tensors that are not contiguous.
        """


class Kernels(Protocol):
    """Finds what computes an operation."""

    def bind(self, ask: Ask) -> Kernel:
        """Return the kernel for an operation at a place.

        Raises:
            PluginError: There is no such operation, or a set that claims it cannot make it.
        """
        ...

    def ask(self, op: str, dtype: str, dims: Mapping[str, int], options: Mapping[str, Any], *, invariant: bool) -> Ask:
        """Return the question for an operation on this device.

        Raises:
            PluginError: There is no such operation, or other dims or options than it has were given.
        """
        ...


class PlainKernels:
    """Binds every operation to its meaning in plain torch."""

    def __init__(self, device: DeviceView = DeviceView("cpu")) -> None:  # noqa: B008 - an immutable tuple
        """Plain torch runs on any device; `device` is what an `Ask` will say."""
        self.device = device

    def __repr__(self) -> str:
        """As signatures show it."""
        return f"PlainKernels({self.device.kind})"

    def bind(self, ask: Ask) -> Kernel:
        """See `Kernels.bind`."""
        return meaning(ask)

    def ask(self, op: str, dtype: str, dims: Mapping[str, int], options: Mapping[str, Any], *, invariant: bool) -> Ask:
        """See `Kernels.ask`."""
        return make_ask(op, self.device, dtype, dims, options, invariant=invariant)


PLAIN_KERNELS = PlainKernels()


def make_ask(
    op: str,
    device: DeviceView,
    dtype: str,
    dims: Mapping[str, int],
    options: Mapping[str, Any],
    *,
    invariant: bool = False,
    captured: bool = False,
) -> Ask:
    """Return the question for an operation.

    Raises:
        PluginError: There is no such operation, or other dims or options than it has were given.
    """
    row = OPS.get(op)
    if row is None:
        raise PluginError(f"operation {op!r}: unknown; possible: {', '.join(OPS)}")
    for what, given, wanted in (("widths", dims, row.dims), ("options", options, row.options)):
        if sorted(given) != sorted(wanted):
            raise PluginError(f"operation {op!r}: {what} {sorted(given)} were given, it has {sorted(wanted)}")
    in_order = tuple((name, dims[name]) for name in row.dims), tuple((name, options[name]) for name in row.options)
    return Ask(op, device, dtype, *in_order, invariant=invariant, captured=captured)


def meaning(ask: Ask) -> Kernel:
    """Return the function of plain torch that says what an operation computes; the same object for equal options."""
    row = OPS[ask.op]
    target = row.apart if row.apart and ask.invariant else row.meaning
    key = (target, ask.options, row.is_row_by_row and ask.invariant and ask.device.kind == "cpu")
    if key not in _MEANINGS:
        made = named(target)
        made = partial(made, **dict(ask.options)) if ask.options else made
        _MEANINGS[key] = partial(named(f"{_PLAIN}:row_by_row"), made) if key[2] else made
    return _MEANINGS[key]


_MEANINGS: dict[tuple[Any, ...], Kernel] = {}


def named(target: str) -> Kernel:
    """Return what `module:attr` names."""
    module, attr = target.split(":")
    found: Kernel = getattr(import_module(module), attr)
    return found
