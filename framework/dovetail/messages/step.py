"""What goes between an engine and its devices: a step as plain arrays, and what came of it.

An engine says once, in `Admit`, what a request in a device row needs. From then on a step names rows, and what is new:
token ids that only the host knows, page table entries that have changed. Two messages go down, as masks depend on the
token before: `StepInput` when a step is launched, and `StepLate` once the step before it has been read, if a row waits
for that. One comes back, `StepOutput`.

B rows of a step, in its order; R of them get a token: the first R. T tokens whose ids come from the host. P positions
at which a token is sampled: one for each of the R rows, and one more behind each of its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.contracts.cache import Reach
from dovetail.messages import Pool, SamplerParams, ServedModel, TokenLogprob
from dovetail.messages.media import MediaSpan

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

AT_DEVICE = -1
"""In place of a start: behind what the device has of the row, from the token sampled there last."""
NONE, SAMPLE, POOL = 0, 1, 2
"""Tasks of a row: only its keys and values are computed, or a token is sampled too, or hidden states are returned."""
MAX_IMAGE_BYTES = 256 << 20
"""Tower output that is kept, or that of one image where it is more."""
MAX_STEP_PATCHES = 8192
"""Patches that the vision tower reads before a step, or those of one image where it has more: one after another."""
MAX_SAVES = 10
"""Copies that a step takes at most of a row's states of a group."""


def no_ints() -> Ints:
    """Return an empty array."""
    return np.empty(0, dtype=np.int32)


class DecodeGraph(msgspec.Struct, frozen=True, gc=False):
    """A captured decode step of `rows` rows. With `shares`, it reads a prefix that neighbouring rows share once."""

    rows: int
    shares: bool = False

    def __str__(self) -> str:
        return f"decode graph of {self.rows} rows"


class PrefillGraph(msgspec.Struct, frozen=True, order=True, gc=False):
    """Captured prefill chunks: at most `tokens` tokens in `chunks` chunks."""

    tokens: int
    chunks: int

    def __str__(self) -> str:
        return f"prefill graph of {self.tokens} tokens in {self.chunks} chunks"


GraphKey = DecodeGraph | PrefillGraph
MOST_VERIFIED = 512
"""Tokens of the largest prefill graph that can verify drafts."""


class Admit(msgspec.Struct, frozen=True, gc=False):
    """A request takes a device row: new, after it was retracted, or from an engine before this one.

    `stop_ids` are those that `params.min_tokens` bans. `history` are its ids so far, prompt and output, where sampling
    looks back (`SamplerParams.looks_back`); empty otherwise. With `pool`, the row samples nothing: it gathers
    hidden states, from position 0 on where all of them count. `second` and `media` are as in `Submit`.
    """

    row: int
    seed: int
    num_prompt: int
    params: SamplerParams
    stop_ids: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    pool: Pool | None = None
    second: int = 0
    media: tuple[MediaSpan, ...] = ()


class Want(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities of a prompt's tokens: `ids[i]` follows the token at `first + i` of row `at`'s new ones.

    Beside each, those of the `num_top` most likely tokens, and of the `named` ones.
    """

    at: int
    first: int
    ids: tuple[int, ...]
    num_top: int
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step; with its number alone, one that computes nothing.

    A batch that is what it was has the same array objects again: nothing of them is sent twice.

    Rows stand in this order: those that decode, chunks that end what is known of their request, other chunks.

    Attributes:
        step: Its number, from 1.
        decode_graph: What is replayed for the rows that decode, …
        prefill_graph: … and for the chunks. With neither, the step runs eagerly.
        zeroed: `[2, n]` group and page: to be zeroed first.
        cleared: `[n]` rows whose requests have left, then.
        admit: Who takes rows, then.
        tables: `[4, n]` group, row, column and page: page table entries that have changed.
        loads: `[3, n]` group, copy and row: recurrent states that come into rows before the step, copy 0 for zeros.
        saves: `[4, n]` group, row, length and copy: states to be copied in this step's chunks, after that length;
            at most `MAX_SAVES` of a row and group.
        rows: `[B]` device rows.
        start: `[B]` place of the row's first new token, over whatever a step in flight wrote; or `AT_DEVICE`.
        num_new: `[B]` new tokens; with `AT_DEVICE` one.
        task: `[B]` `NONE`, `SAMPLE` or `POOL`.
        waits: `[B]` bool: the token is sampled once a `StepLate` came.
        ids: `[T]` ids of the rows with a start of their own.
        prompt_logprobs: Which log probabilities of prompts are wanted.
        num_drafts: `[B]` how many of the row's new tokens, its last ones, are drafts. A token is sampled
            behind what is known and behind each draft, at every position as without drafts. Those count up to the
            first that differs from the draft. So a row gets 1 to `num_drafts + 1` tokens. It has a start of its
            own and task `SAMPLE`, and is in no other step until this one is read. None: no row has drafts.
        encode: Images that the vision tower encodes before the step, one span of each; their output is kept, …
        dropped: … until its digest stands here.
    """

    step: int
    decode_graph: DecodeGraph | None = None
    prefill_graph: PrefillGraph | None = None
    zeroed: Ints = field(default_factory=lambda: np.empty((2, 0), dtype=np.int32))
    cleared: Ints = field(default_factory=no_ints)
    admit: tuple[Admit, ...] = ()
    tables: Ints = field(default_factory=no_ints)
    rows: Ints = field(default_factory=no_ints)
    start: Ints = field(default_factory=no_ints)
    num_new: Ints = field(default_factory=no_ints)
    task: Ints = field(default_factory=no_ints)
    waits: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    ids: Ints = field(default_factory=no_ints)
    prompt_logprobs: tuple[Want, ...] = ()
    loads: Ints = field(default_factory=no_ints)
    saves: Ints = field(default_factory=no_ints)
    num_drafts: Ints | None = None
    encode: tuple[MediaSpan, ...] = ()
    dropped: tuple[bytes, ...] = ()

    @property
    def num_decode(self) -> int:
        """Rows that decode."""
        return int(np.count_nonzero(self.start < 0))

    @property
    def num_sampled(self) -> int:
        """R."""
        return int(np.count_nonzero(self.task == SAMPLE))

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """`[P]` the row of each position at which a token is sampled, ascending."""
        rows = np.arange(self.num_sampled)
        return rows if self.num_drafts is None else np.repeat(rows, self.num_drafts[: len(rows)] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLate:
    """What a launched step has waited for.

    Attributes:
        step: Its number.
        mask_of: `[P]` which row of `Executor.masks` says what may be said there, ascending; -1: anything;
            below: the mask that is kept in slot `-2 - mask_of`.
        skip: `[R]` bool: it is still not known what the row may say, so it gets no token.
        ends_only: `[P]` bool: the mask allows nothing but ends, so a minimum length gives way.
        keep: `[N, 2]`: a row of `Executor.masks` and the slot in which it is kept from the next step on.
    """

    step: int
    mask_of: Ints
    skip: npt.NDArray[np.bool_]
    ends_only: npt.NDArray[np.bool_]
    keep: Ints = field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What came of a step, by its rows and in their order, not by device rows: those may have new owners.

    Attributes:
        step: Its number.
        num: `[B]` tokens that the row got.
        tokens: `[sum of num]`.
        finite: `[B]` bool: all that was computed for the row is finite. If not, it got nothing.
        logprobs: Of `tokens`, where asked for; None where no row did.
        prompt_logprobs: Of prompts, by row, as `StepInput.prompt_logprobs` wanted them.
        pooled: `[H]` of each finite row whose task was `POOL`, by row.
    """

    step: int
    num: Ints
    tokens: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: tuple[tuple[int, list[TokenLogprob]], ...] = ()
    pooled: tuple[tuple[int, Floats], ...] = ()


class PrepareResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of `Executor.prepare`.

    `captured` are graphs that are there now and were not before. `num_left` pieces are left to prepare.
    `max_prefill_tokens` is what memory was found to suffice for; None where nothing was tried.
    """

    captured: tuple[GraphKey, ...] = ()
    num_left: int = 0
    max_prefill_tokens: int | None = None


class ExecutorInfo(ServedModel, frozen=True, kw_only=True):
    """Facts of a started executor. Lengths in tokens.

    `num_pages` are those that requests can have of each cache group, and `reaches` say how far back its layers see; of
    a recurrent group they are the copies of its states. Both are empty where nothing is cached.
    `kept_masks`: slots in which masks are kept on the device, for steps to name.
    `prefix_group` is as in the attention contract.
    `graphs` are those that may be captured, in the order in which they are; `prepared` says how far that has come.
    `image_token_bytes` are those of the tower's output for a token of an image; 0: the model reads text only.
    `cuts_images`: chunks may end within an image; not where its tokens see both ways.
    """

    num_pages: tuple[int, ...]
    reaches: tuple[Reach, ...]
    prefix_group: int
    graphs: tuple[GraphKey, ...]
    prepared: PrepareResult
    kept_masks: int = 0
    image_token_bytes: int = 0
    cuts_images: bool = True
