"""Kind `kernels`: what computes a model's operations, chosen once for each place while the model is built.

`OPS` of `dovetail.contracts.operations` is the table of operations: operands, letters of their shapes, and what each
means in plain torch. A `KernelSet` claims rows of it for a device, a dtype and widths, and makes a function for each. A
layer binds the operation when it is built, `norm = ctx.operation("rms_norm", H=hidden)`, and calls what it got; nothing
is chosen per call.

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
this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from dovetail.contracts.device import DeviceView
from dovetail.contracts.errors import PluginError
from dovetail.contracts.operations import OPS as OPS
from dovetail.contracts.operations import PARTS, Component
from dovetail.contracts.options import Configurable
from dovetail.contracts.ranks import PeerMemory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kernel = Callable[..., Any]
"""Computes an operation: takes and returns what its row of `OPS` says."""


class PackedKernel(Protocol):
    """Kernel of an operation that `packs`: it decides how the matrices that it reads are laid out.

    A form says which tensors a checkpoint has for a matrix; see `dovetail.sdk.quantization.forms`. None: it is plain, a
    tensor `weight` in the model's dtype. An operation has one matrix, or two, of experts: `half` is `gate_up` or `down`
    then.
    """

    def keeps(self, half: str = "") -> bool:
        """Whether `pack` returns the tensors as they are, so that a layer need not free its own."""
        ...

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> Any:
        """Return a matrix `[N, …]`, or those of experts `[E, N, …]`, as calls take it; called once, before any step.

        Args:
            tensors: By the names of the form; valid during this call, unless `keeps`.
            half: See above.

        Raises:
            ValueError: Its numbers cannot be packed so.
        """
        ...

    def __call__(self, *operands: Any) -> Any:
        """Compute the operation."""
        ...


ANY_ROWS = (0, (1 << 31) - 1)
"""Fewest and most rows of a call where a place of the model may get any number."""


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
        peers: Of an operation over ranks: how many ranks may see each other's memory; 0: they share none.
    """

    op: str
    device: DeviceView
    dtype: str
    dims: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...] = ()
    rows: tuple[int, int] = ANY_ROWS
    invariant: bool = False
    captured: bool = False
    peers: int = 0

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
    """Kinds of devices that it has kernels for; on others it is not asked, and a start that names it fails."""
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

    def keeps_packed(self, ask: Ask) -> bool:
        """Whether a checkpoint's matrix stays packed for this set; one that no set keeps is written out as it is read.

        What it serves it keeps. A set may keep more, where memory matters more than time: a product that no set serves
        writes the matrix out for each call.

        Args:
            ask: For `packed_linear`, with the widths of the whole model. Experts' matrices are asked for so, too.
        """
        return isinstance(self.serves(ask), Claim)

    @classmethod
    def library(cls) -> str:
        """Return the version of the library that its kernels come from: what was measured of another is forgotten."""
        return ""

    def trial(self, ask: Ask, rows: int, device: torch.device) -> Sequence[Any] | None:
        """Return operands like those of a step with `rows` rows, by which `auto` times kernels of an operation.

        It does where several sets claim it. A packed matrix is a mapping of its form's tensors. None: there are none,
        and users say which set goes first. This makes floats, numbers and packed matrices. A set whose
        operations have operands that must mean something makes those.
        """
        made: Sequence[Any] | None = named("dovetail.sdk.trials:operands")(ask, rows, device)
        return made

    def peer_bytes(self, ranks: int) -> int:
        """Return how many bytes each of some ranks shares with the others, for its operations over ranks."""
        return 0

    def connect(self, memory: PeerMemory) -> None:
        """Take the memory, of `peer_bytes`, that operations over ranks read and write from now on.

        Called with memory of a rank that stands for all once the model is built, and again once the ranks have met. If
        they find that they share none, it is not called again, and no operation over ranks either.
        """


class Kernels(Protocol):
    """Finds what computes an operation."""

    def bind(self, ask: Ask) -> Kernel:
        """Return the kernel for an operation at a place.

        Raises:
            PluginError: There is no such operation, or a set that claims it cannot make it.
        """
        ...

    def serves(self, ask: Ask) -> bool:
        """Whether a kernel set serves an operation at a place, for any number of rows. Nothing is bound."""
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

    def serves(self, ask: Ask) -> bool:
        """See `Kernels.serves`: plain torch does."""
        return False

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
    peers: int = 0,
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
    over = peers if row.over_ranks else 0
    return Ask(op, device, dtype, *in_order, invariant=invariant, captured=captured, peers=over)


def repacks(linear: Ask, serves: Callable[[Ask], bool]) -> bool:
    """Whether a plain matrix is repacked where it is loaded: a set serves it so, and none reads it as it stands.

    Args:
        linear: The question for `linear` at its place.
        serves: Whether a set serves an operation, as `Kernels.serves`.
    """
    return serves(linear._replace(op="packed_linear", options=(("form", None),))) and not serves(linear)


def meaning(ask: Ask) -> Kernel:
    """Return the function of plain torch that says what an operation computes; the same object for equal options."""
    row = OPS[ask.op]
    target = row.invariant_meaning if row.invariant_meaning and ask.invariant else row.meaning
    parts = tuple(meaning(part) for part in parts_of(ask)) if target == PARTS else ()
    key = (target, row.name, parts, ask.options, row.is_row_by_row and ask.invariant and ask.device.kind == "cpu")
    if key not in _MEANINGS:
        if target == PARTS:
            made = composed(ask, parts)
        else:
            made = named(target)
            made = (
                made(**dict(ask.options)) if row.packs else partial(made, **dict(ask.options)) if ask.options else made
            )
        _MEANINGS[key] = partial(named(f"{_PLAIN}:row_by_row"), made) if key[-1] else made
    return _MEANINGS[key]


_MEANINGS: dict[tuple[Any, ...], Kernel] = {}
_PLAIN = "dovetail.sdk.layers.ops.reference"


def parts_of(ask: Ask) -> tuple[Ask, ...]:
    """Return the questions for the operations that one can be put together of."""
    given = OPS[ask.op].composed_of
    return tuple(_part(ask, part) for part in (named(given)(ask) if isinstance(given, str) else given))


def _part(ask: Ask, part: Component) -> Ask:
    numbers = {
        letter: of if isinstance(of, int) else 2 * ask.dim(of[1:]) if of[0] == "2" else ask.dim(of)
        for letter, of in part.dims.items()
    }
    found = make_ask(part.op, ask.device, ask.dtype, numbers, part.options, invariant=ask.invariant, peers=ask.peers)
    return found._replace(rows=ask.rows, captured=ask.captured)


def composed(ask: Ask, kernels: Sequence[Kernel]) -> Kernel:
    """Return an operation put together of the kernels of its parts."""
    made: Kernel = named(OPS[ask.op].composition)(*kernels, **dict(ask.options))
    return made


def named(target: str) -> Kernel:
    """Return what `module:attr` names."""
    module, attr = target.split(":")
    found: Kernel = getattr(import_module(module), attr)
    return found
