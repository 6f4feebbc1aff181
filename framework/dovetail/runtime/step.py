"""A step on its way through the device: launched, sampled, read.

Only reading waits for the device, so that the next step can be launched before this one's tokens are known. B rows of
the step, R rows of a part, V vocabulary size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dovetail.contracts.device import Device, DeviceEvent
from dovetail.messages import TokenLogprob
from dovetail.messages.step import StepInput, StepOutput
from dovetail.runtime.device.device_state import SampleRow
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.device.upload import to_device, to_host
from dovetail.runtime.graphs.batch import drafts_behind, place_in_row
from dovetail.runtime.graphs.decode import Decoded
from dovetail.runtime.kernels.repeats import outermost_lists
from dovetail.runtime.sampling.ranked import RankedLogprobs
from dovetail.runtime.sampling.sampler import Sampled

# Progress within a step: counts the layers that the device has computed, so that a long step is no hang.

LONG = 1024
"""New tokens from which on a GPU's eager step is watched by layers. Shorter ones, and graphs, have no hook or event."""


class LayerEvents:
    """Events behind the layers of one step, in order."""

    def __init__(self, device: Device, count: Callable[[], object]) -> None:
        """None is recorded yet; `count` is called for each that the device passes."""
        self._events: deque[DeviceEvent] = deque()
        self._device, self._count = device, count

    def record(self, *_: object) -> None:
        """Put an event behind what was launched so far."""
        if (event := self._device.mark()) is not None:
            self._events.append(event)

    def passed(self, *, wait: bool) -> None:
        """Count what the device has passed by now, or `wait` and count all."""
        while self._events:
            if wait:
                self._events[0].synchronize()
            elif not self._events[0].query():
                return
            self._events.popleft()
            self._count()


class LayerProgress:
    """Counts layers. The engine's thread counts, any thread may read.

    A CPU computes a layer while its `forward` runs, so a hook counts. A GPU gets all layers at once: a hook records an
    event behind each layer of a long step, and whoever waits for that step counts the events that pass.

    Attributes:
        num: Layers that were computed since the start.
    """

    def __init__(self, model: object, device: torch.device) -> None:
        """Watch a model; one that is no module of torch has no layers."""
        self.num = 0
        self._layers = layers_of(model) if isinstance(model, nn.Module) else []
        self._device = device_of(device)
        for layer in self._layers if self._device.is_host else ():
            layer.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        """Something was computed."""
        self.num += 1

    @contextmanager
    def recording(self, num_tokens: int) -> Iterator[LayerEvents | None]:
        """Inside, the layers of a step of so many new tokens are launched; yields the events of one that has some."""
        if self._device.is_host or num_tokens < LONG:
            yield None
            return
        events = LayerEvents(self._device, self.count)
        hooks = [layer.register_forward_hook(events.record) for layer in self._layers]
        try:
            yield events
        finally:
            for hook in hooks:
                hook.remove()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers: the items of its outermost module lists, or its parts where it has no list."""
    return [layer for layers in outermost_lists(model, 1) for layer in layers] or [*model.children()]


# Which of a step's drafts hold: those that were drawn, up to the first that was not.
#
# At every place a token is drawn as it would be without drafts, with that place's own key, so what a request says does
# not depend on what was guessed. Device and host come to the same answer from the same tokens, each by itself: the
# device goes on from it at once, the host learns it when it reads them.
#
# R rows with P places, W most places of a row; a row's first place is behind what is known, each other behind a draft.


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is to be compared.

    Attributes:
        at: `[R]` which of the step's rows these are.
        behind: `[P]` int64, the draft that stands behind each place, `NO_DRAFT` for none.
        places: `[R, W]` int64, the places of each row; its last one again where it has fewer.
        num: `[R]` int64, drafts of each row.
    """

    at: npt.NDArray[np.int64]
    behind: Tensor
    places: Tensor
    num: Tensor

    @classmethod
    def of(cls, step: StepInput, rows: npt.NDArray[np.int64], device: torch.device | None = None) -> Drafts:
        """Look them up in a step, for the places of these rows `[P]`; ascending, with all places of each row."""
        num_drafts = np.zeros(len(step.rows), np.int32) if step.num_drafts is None else step.num_drafts
        at, first = np.unique(rows, return_index=True)
        num = num_drafts[at].astype(np.int64)
        behind = drafts_behind(step, rows)
        places = first[:, None] + np.minimum(np.arange(int(num.max(initial=0)) + 1), num[:, None])
        sent = [torch.from_numpy(array) for array in (behind, places, num)]
        if device is not None:
            sent = [to_device(tensor, device) for tensor in sent]
        return cls(at, *sent)

    def num_held(self, drawn: Tensor) -> Tensor:
        """Return how many drafts of each row hold, `[R]` int64, by the tokens drawn at all places `[P]`."""
        held = (drawn == self.behind)[self.places]
        return held.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def last(self, drawn: Tensor, held: Tensor) -> Tensor:
        """Return the last token that each row gets, `[R]`: the one behind its last draft that holds."""
        return drawn[self.places.gather(1, held[:, None])[:, 0]]


BROKEN = -1


@dataclass(slots=True, eq=False)
class StepPart:
    """Rows of a step whose logits come from one forward pass.

    Attributes:
        at: `[R]` which of the step's rows they are; a row with drafts stands here once for each place of it.
        places: `[R]` which of the step's places they are.
        rows: `[R]` int64, their device rows.
        params: What the host knows of them.
        is_banning: Whether any of them may be before its minimum length.
        positions: `[R]` int64, where some rows have drafts: the place of each token among those that its row generates.
        non_finite: `[R]` bool where more than the logits was looked at: something computed for the row is not finite.
        logits: `[R, V]`; kept only while the part waits for what the host has yet to say (grammar masks).
        decoded: The decode step that gave the logits, where a graph draws from them; they are put back before, where
            a prefill's graph came between.
        tokens: `[R]` int64 on the device once chosen; `BROKEN` where what was computed is not finite.
        logprobs: Of the chosen tokens, where asked for.
    """

    at: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    rows: Tensor
    params: list[SampleRow]
    is_banning: bool
    logits: Tensor | None = None
    tokens: Tensor | None = None
    logprobs: RankedLogprobs | None = None
    non_finite: Tensor | None = None
    positions: Tensor | None = None
    decoded: Decoded | None = None

    def choose(self, sampled: Sampled) -> None:
        """Take the sampler's outcome as copies: tensors of a graph are overwritten by the next replay."""
        non_finite = sampled.non_finite if self.non_finite is None else sampled.non_finite | self.non_finite
        self.tokens = torch.where(non_finite, BROKEN, sampled.ids)
        self.logprobs = sampled.logprobs
        self.logits = self.decoded = None


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that the device is computing, or has computed.

    Attributes:
        step: What it computes.
        parts: Of the rows that get tokens.
        tokenless: Rows that get no token, with `BROKEN` or 0 for each in an int64 tensor on the device.
        prompt_logprobs: Of prompt chunks, by row.
        pooled: `[H]` float32 of rows whose hidden states are told; such a row is silent.
        layers: Behind the layers of a step that may take long on a GPU.
    """

    step: StepInput
    parts: list[StepPart]
    tokenless: list[tuple[npt.NDArray[np.int64], Tensor]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, RankedLogprobs]] = field(default_factory=list)
    pooled: list[tuple[int, Tensor]] = field(default_factory=list)
    layers: LayerEvents | None = None
    _host: Tensor | None = None
    _pooled: Tensor | None = None
    _copied: DeviceEvent | None = None

    def add_tokenless(self, at: npt.NDArray[np.int64], non_finite: Tensor) -> None:
        """Note rows that get no token; `non_finite` `[S]` bool may be overwritten by the next step."""
        self.tokenless.append((at, torch.where(non_finite, BROKEN, 0)))

    def start_copy(self, device: torch.device) -> None:
        """Send the tokens to the host, and behind them what is told of the silent; every part has been sampled."""
        chosen = [part.tokens for part in self.parts if part.tokens is not None]
        chosen += [flags for _, flags in self.tokenless]
        if chosen:
            self._host = to_host(chosen[0] if len(chosen) == 1 else torch.cat(chosen))
        if self.pooled:
            self._pooled = to_host(torch.stack([state for _, state in self.pooled]))
        self._copied = device_of(device).mark()

    @property
    def is_computed(self) -> bool:
        """Whether the device has come to the end of it."""
        if self.layers is not None:
            self.layers.passed(wait=False)
        return self._copied is None or bool(self._copied.query())

    def wait(self) -> npt.NDArray[np.int64]:
        """Wait for the device; return what `start_copy` sent."""
        if self.layers is not None:
            self.layers.passed(wait=True)
        if self._copied is not None:
            self._copied.synchronize()
        found: npt.NDArray[np.int64] = np.empty(0, np.int64) if self._host is None else self._host.numpy()
        return found

    def read(self) -> StepOutput:
        """Wait for the device; return what came of the step, in the order of its rows."""
        found, num_rows = self.wait(), len(self.step.rows)
        rows = [part.at for part in self.parts] + [tokenless for tokenless, _ in self.tokenless]
        rows_of = np.concatenate(rows) if rows else found
        finite = np.ones(num_rows, dtype=np.bool_)
        finite[rows_of[found == BROKEN]] = False
        num_token_rows = sum(len(part.at) for part in self.parts)
        token_rows = rows_of[:num_token_rows]
        counts = finite[token_rows] if self.step.num_drafts is None else finite[token_rows] & self._held(found)
        order = np.flatnonzero(counts)
        if len(self.parts) > 1:
            order = order[np.argsort(token_rows[order], kind="stable")]
        pooled = () if self._pooled is None else zip(self.pooled, self._pooled.numpy(), strict=True)
        return StepOutput(
            step=self.step.step,
            num=np.bincount(token_rows[order], minlength=num_rows).astype(np.int32),
            tokens=found[order],
            finite=finite,
            logprobs=self._logprobs(order),
            prompt_logprobs=tuple((row, ranked.read()) for row, ranked in self.prompt_logprobs),
            pooled=tuple((at, row) for (at, _), row in pooled if finite[at]),
        )

    def _held(self, found: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of the tokens that were drawn count: those of each row up to the first that is not its draft."""
        held, first = [], 0
        for part in self.parts:
            drafts = Drafts.of(self.step, part.at)
            num = drafts.num_held(torch.from_numpy(found[first : first + len(part.at)])).numpy()
            held.append(place_in_row(part.at) <= np.repeat(num, np.unique(part.at, return_counts=True)[1]))
            first += len(part.at)
        return np.concatenate(held) if held else np.empty(0, dtype=np.bool_)

    def _logprobs(self, order: npt.NDArray[np.int64]) -> list[TokenLogprob | None] | None:
        """Those of the tokens that count, of all that were drawn; None where no row asked for any."""
        if all(part.logprobs is None for part in self.parts):
            return None
        found: list[TokenLogprob | None] = []
        for part in self.parts:
            mine: list[TokenLogprob | None] = [None] * len(part.at)
            if part.logprobs is not None:
                for row, item in zip(part.logprobs.rows, part.logprobs.read(), strict=True):
                    mine[row] = item
            found += mine
        return [found[i] for i in order.tolist()]
