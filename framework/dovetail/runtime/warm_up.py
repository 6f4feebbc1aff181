"""Steps with made-up requests, run before real ones come: what compiles or loads kernels then holds nobody up.

Steps that no graph serves run eagerly, and a kernel is compiled the first time that a step needs a variant of it: by
the number of rows or tokens, for instance, or by whether a number is 1 or a multiple of 16. That takes a second or two,
in which every stream stands still. So each step of a list is run once through the code of real eager steps.

The list knows nothing of any backend. Its numbers are 1, multiples of 16, and others, so that all kinds of integers on
which Triton specialises occur; numbers of decode rows are at most 1.5 times apart, chunks are from one token to
thousands of tokens long, and alone or several.

Made-up requests stand in the spare rows and in the null page, which nobody's tokens are in: all of them write to the
same few slots and read what happens to be there. Both are zeroed again before anything else runs. The slots are not
negative as those of a graph's padding are, since a backend has to know of these only if it can be captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from dovetail.cache.pool import KVCache
from dovetail.messages import SamplerParams
from dovetail.messages.step import AT_DEVICE, SAMPLE, Admit, Ints, StepInput
from dovetail.runtime.device.device_state import DeviceState
from dovetail.runtime.kernels.repeats import Repeats
from dovetail.runtime.memory.plan import NUM_PADDING_ROWS
from dovetail.runtime.step import InFlightStep
from dovetail.runtime.stepper import Stepper

logger = logging.getLogger(__name__)

SHORT, LONG = 40, 2048
"""Tokens of a usual short prompt, and of a chunk that is long for any kernel."""
LENGTHS = (1, 16, 128, 600, 1500, LONG, SHORT)
CHUNKS = (5, 1, 16)
NUM_DECODE = 3
"""Decode rows beside prefill chunks; other numbers are run beside short prompts only."""
KV_LEN = 100
"""Tokens that a decode row has, and that stand before a chunk in steps with a prefix."""
NUM_WHOLE = 4
"""The first steps go through all layers: what a layer makes at its first call is there then."""
PARAMS = (
    SamplerParams(max_tokens=1, temperature=0.0),
    SamplerParams(max_tokens=1, temperature=1.0),
    SamplerParams(max_tokens=1, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
)
"""How the rows of a step are sampled, in turn: one for each spare row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpLimits:
    """Bounds of real steps, in requests and tokens. `graph_rows`: most decode rows without chunks that graphs serve.

    `tiles_by_tokens`: kernels choose tiles by all tokens of a step, as those of experts and of packed weights do.
    """

    max_requests: int
    max_prefill_tokens: int
    context_len: int
    graph_rows: int
    tiles_by_tokens: bool = True


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step: decode rows, and prefill chunks of `num_new` tokens each after `prefix_len` cached ones."""

    num_decode: int
    num_chunks: int = 0
    num_new: int = 0
    prefix_len: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decode + self.num_chunks * self.num_new

    def within(self, limits: WarmUpLimits) -> StepShape:
        """Return the same, or what is left of it where a real step could not be as large."""
        if not self.num_chunks:
            return StepShape(min(self.num_decode, limits.max_requests))
        num_decode = min(self.num_decode, limits.max_requests - 1)
        num_chunks = min(self.num_chunks, limits.max_requests - num_decode, limits.max_prefill_tokens)
        num_new = min(self.num_new, limits.max_prefill_tokens // num_chunks, limits.context_len)
        return StepShape(num_decode, num_chunks, num_new, min(self.prefix_len, limits.context_len - num_new))

    def __str__(self) -> str:
        decode = f"{self.num_decode} decode rows"
        if not self.num_chunks:
            return decode
        return f"{decode} and {self.num_chunks} chunks of {self.num_new} tokens after {self.prefix_len}"


def shapes(limits: WarmUpLimits) -> list[StepShape]:
    """Return the steps to run, each once, the likely ones first."""
    return list(dict.fromkeys(shape.within(limits) for shape in _wanted(limits)))


def _wanted(limits: WarmUpLimits) -> Iterator[StepShape]:
    """Short prompts at once, a long one, both beside decode rows; then all numbers of rows; then all lengths."""
    few = (0, NUM_DECODE)
    for num_decode in few:
        yield StepShape(num_decode, CHUNKS[0], SHORT)
        yield StepShape(num_decode, 1, LONG)
    counts = list(_counts(limits.max_requests))
    for num_decode in counts:
        yield StepShape(num_decode, CHUNKS[0], SHORT)
    for num_decode in counts:
        if num_decode > limits.graph_rows:
            yield StepShape(num_decode)
    for num_new, num_chunks, num_decode in product(LENGTHS, CHUNKS, few):
        yield StepShape(num_decode, num_chunks, num_new)
    powers = range(limits.max_prefill_tokens.bit_length() if limits.tiles_by_tokens else 0)  # about twice as many
    for power, num_decode in product(powers, few):
        yield StepShape(num_decode, 1, 1 << power)
    for num_decode in few:
        yield StepShape(num_decode, 2, LONG)
    for num_new, num_decode in product((SHORT, LONG), few):
        yield StepShape(num_decode, 1, num_new, KV_LEN)


def _counts(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 … and `most`."""
    power = 1
    while power < most:
        yield power
        if power > 1 and power + power // 2 < most:
            yield power + power // 2
        power *= 2
    yield most


class EagerWarmUp:
    """Runs the steps of the list, one at a time, while no step is in flight."""

    def __init__(
        self,
        stepper: Stepper,
        state: DeviceState,
        pool: KVCache,
        vocab_size: int,
        limits: WarmUpLimits,
        repeats: Repeats | None = None,
    ) -> None:
        """Nothing is run yet. `repeats`: layers that all but the first steps leave out."""
        self._repeats, self._num_whole = repeats or Repeats(None), NUM_WHOLE
        self._stepper, self._state, self._pool = stepper, state, pool
        self._vocab_size, self._limits = vocab_size, limits
        self._waiting = shapes(limits)
        for i, params in enumerate(PARAMS):
            state.params.admit(Admit(row=state.padding_row + i, seed=i, num_prompt=0, params=params))

    @property
    def num_left(self) -> int:
        """Steps of the list that have neither been run nor left out for want of memory."""
        return len(self._waiting)

    @property
    def max_prefill_tokens(self) -> int:
        """Most prompt tokens of a step, as far as it is known that memory suffices for no more."""
        return self._limits.max_prefill_tokens

    @torch.inference_mode()
    def rehearse(self) -> None:
        """See `CaptureTask.rehearse`."""
        for shape in self._waiting:
            self._run(shape)
        self._clear()

    @torch.inference_mode()
    def run_next(self) -> None:
        """Run the next step and wait for the device.

        Where memory does not suffice for a step, half as many prompt tokens are the bound from then on, and steps of as
        many tokens are left out. Whatever else is raised would be raised by a real step, and is passed on.
        """
        shape = self._waiting.pop(0)
        self._num_whole -= 1
        try:
            with self._repeats.left_out() if self._num_whole < 0 else contextlib.nullcontext():
                launched = self._run(shape)
            launched.start_copy(self._state.device)
            launched.wait()
        except torch.OutOfMemoryError as error:
            self._bound(shape)
            logger.warning(
                "Out of memory in a trial step of %s: steps will have at most %d prompt tokens; to choose otherwise, "
                "lower --chunked-prefill-size, --max-running-requests or --mem-fraction-static (%s)",
                shape,
                self.max_prefill_tokens,
                str(error).splitlines()[0],
            )
        except Exception:
            logger.error("A trial step of %s failed, before any request came that would have needed it.", shape)
            raise
        finally:
            self._clear()

    def _bound(self, shape: StepShape) -> None:
        """Leave out steps as large as one that did not fit; try next what the bound is lowered to."""
        self._waiting = [other for other in self._waiting if other.num_tokens < shape.num_tokens]
        num_prompt = shape.num_chunks * shape.num_new
        if num_prompt <= self._pool.page_size:
            return
        num_prompt = max(self._pool.page_size, num_prompt // 2)
        self._limits = dataclasses.replace(self._limits, max_prefill_tokens=num_prompt)
        bounded = [StepShape(shape.num_decode, 1, num_prompt).within(self._limits)]
        bounded += [other.within(self._limits) for other in self._waiting]
        self._waiting = [other for other in dict.fromkeys(bounded) if other.num_tokens < shape.num_tokens]

    def _run(self, shape: StepShape) -> InFlightStep:
        """Start a step of made-up requests, which stand in the spare rows and in no page but the null page."""
        num = shape.num_decode + shape.num_chunks
        self._state.lens[self._state.padding_row :] = min(KV_LEN, self._limits.context_len) - 1
        self._state.flush()
        step = StepInput(
            step=0,
            rows=(self._state.padding_row + np.arange(num) % NUM_PADDING_ROWS).astype(np.int32),
            start=_ints([AT_DEVICE] * shape.num_decode + [shape.prefix_len] * shape.num_chunks),
            num_new=_ints([1] * shape.num_decode + [shape.num_new] * shape.num_chunks),
            task=np.full(num, SAMPLE, dtype=np.int32),
            waits=np.zeros(num, dtype=np.bool_),
            ids=(np.arange(shape.num_chunks * shape.num_new) % self._vocab_size).astype(np.int32),
        )
        return self._stepper.run_eagerly(step)

    def _clear(self) -> None:
        """Leave nothing of the made-up requests behind."""
        self._pool.zero_null_page()
        self._state.clear_padding()


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
