"""What every logits processor must do: change whom it was asked for, alike in every batch, and take back nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRows
from dovetail.processing.sampling import LogitsRequests
from dovetail_testing.checks import check, fail, no_error, raised
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.growth import bytes_kept
from dovetail_testing.conformance.host_sync import HostSyncs

NUM_ROWS = 300
VOCAB = 67
NUMS = (1, 7, 33, 256)
STEPS = 8


class LogitsRequest:
    """A request: its device row, what it says to the processor, its tokens, and the logits of its steps."""

    def __init__(self, row: int, params: Any, ids: list[int], num_prompt: int, seed: int) -> None:
        """The logits of step n are those of `seed` and n."""
        self.row, self.params, self.ids, self.num_prompt, self.seed = row, params, ids, num_prompt, seed

    def logits(self) -> torch.Tensor:
        """Those behind its tokens so far, `[V]`."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + len(self.ids))
        return 4 * torch.randn(VOCAB, generator=generator)


class LogitsProcessorConformance(Conformance):
    """What every logits processor must do.

    Attributes:
        params: What requests say to it, one of these each; each is valid.
        wrong_params: What must be refused, beside a name that it does not declare.
        seed: Of the requests that are made up.
    """

    kind = "logits_processor"
    params: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    wrong_params: ClassVar[Sequence[Mapping[str, Any]]] = ()
    seed: ClassVar[int] = 7

    def processor(self) -> LogitsProcessor:
        """Make the plugin as an engine does."""
        with no_error("making it"), torch.inference_mode():
            made: LogitsProcessor = self.plugin()(VOCAB, NUM_ROWS, torch.device("cpu"))
        return made

    def requests_of(self, num: int, rng: random.Random) -> list[LogitsRequest]:
        """Make up requests in rows of their own; some go on behind what they have said."""
        made = []
        for row in rng.sample(range(NUM_ROWS), num):
            length = rng.choice((1, 2, 15, 16, 40, 300))
            ids = [rng.randrange(rng.choice((3, VOCAB))) for _ in range(length)]
            num_prompt = rng.randrange(1, length + 1)
            made.append(
                LogitsRequest(row, self._made(rng.choice(self.params)), ids, num_prompt, rng.randrange(1 << 20))
            )
        return made

    def admit(self, processor: LogitsProcessor, requests: Sequence[LogitsRequest]) -> None:
        """Let requests take their rows."""
        for request in requests:
            with no_error("admit", f" for a request of {len(request.ids)} tokens"), torch.inference_mode():
                processor.admit(request.row, request.params, tuple(request.ids), request.num_prompt)

    def step(self, processor: LogitsProcessor, requests: Sequence[LogitsRequest]) -> torch.Tensor:
        """One step: the logits `[K, V]` after the processor, and the best token of each row said."""
        before = torch.stack([request.logits() for request in requests])
        batch = self._batch(requests)
        after = before.clone()
        with no_error(f"a step of {len(requests)} rows"), torch.inference_mode():
            given: object = processor.apply(after, batch)
            check(given is None, "apply returned something; logits are changed in place")
            said = torch.where(after.isnan(), -torch.inf, after).argmax(dim=-1)
            processor.drawn(batch, said.clone())
        for request, token in zip(requests, said.tolist(), strict=True):
            request.ids.append(token)
        return after

    def test_declares_what_requests_say(self) -> None:
        """`Params` takes what is valid, by a request's JSON, and refuses unknown names and what is wrong."""
        plugin = self.plugin()
        requests = LogitsRequests({"it": plugin})
        for params in self.params:
            try:
                again = requests.read({"it": params})
                check(requests.read(again) == again, f"{dict(params)!r} reads back as {again!r}, which reads otherwise")
            except RequestError as error:
                fail(f"{dict(params)!r} is refused: {error}")
        for wrong in (*self.wrong_params, {**self.params[0], "no_such_parameter": 1}):
            try:
                requests.read({"it": wrong})
            except RequestError:
                continue
            fail(f"{dict(wrong)!r} is not refused")

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """In batches of 1 to 256 rows, in any order, each row gets what it gets alone, bit by bit, step after step."""
        for num in NUMS:
            rng = random.Random(self.seed + num)
            together, shuffled = self.processor(), random.Random(num)
            requests = self.requests_of(num, rng)
            alone = [LogitsRequest(r.row, r.params, list(r.ids), r.num_prompt, r.seed) for r in requests[:8]]
            self.admit(together, requests)
            lone = self.processor()
            self.admit(lone, alone)
            for _ in range(STEPS):
                order = shuffled.sample(requests, num)
                found = self.step(together, order)
                for request in alone:
                    expected = self.step(lone, [request])[0]
                    row = found[[other.row for other in order].index(request.row)]
                    same = torch.equal(row.nan_to_num(123.0), expected.nan_to_num(123.0))
                    check(same, f"a row among {num} is not what it is alone, behind {len(request.ids) - 1} tokens")

    def test_history_is_all_that_there_is(self) -> None:
        """Who is admitted again, in another row, with what was said goes on as if nothing had happened."""
        rng = random.Random(self.seed)
        processor, requests = self.processor(), self.requests_of(9, rng)
        self.admit(processor, requests)
        for _ in range(STEPS):
            self.step(processor, requests)
        again = self.processor()
        moved = [LogitsRequest((r.row + 1) % NUM_ROWS, r.params, list(r.ids), r.num_prompt, r.seed) for r in requests]
        moved.sort(key=lambda request: request.row)
        requests.sort(key=lambda request: (request.row + 1) % NUM_ROWS)
        self.admit(again, moved)
        for _ in range(STEPS):
            same = torch.equal(self.step(processor, requests).nan_to_num(9.0), self.step(again, moved).nan_to_num(9.0))
            check(same, "a request that was admitted again does not go on as it would have")

    def test_rows_are_new_with_each_request(self) -> None:
        """A row that had another request before gives what a fresh one does, released or not."""
        rng = random.Random(self.seed)
        processor, requests = self.processor(), self.requests_of(9, rng)
        self.admit(processor, requests)
        for _ in range(STEPS):
            self.step(processor, requests)
        for request in requests[:4]:
            processor.release(request.row)
        rows = [request.row for request in requests]
        fresh = self.requests_of(9, rng)
        for request, row in zip(fresh, rows, strict=True):
            request.row = row
        expected = [LogitsRequest(r.row, r.params, list(r.ids), r.num_prompt, r.seed) for r in fresh]
        other = self.processor()
        self.admit(processor, fresh)
        self.admit(other, expected)
        for _ in range(STEPS):
            same = torch.equal(self.step(processor, fresh).nan_to_num(9.0), self.step(other, expected).nan_to_num(9.0))
            check(same, "a row remembers the request that had it before")

    def test_gives_no_nan(self) -> None:
        """Logits that are finite or `-inf` stay so: a step of NaN or `+inf` ends its request."""
        rng = random.Random(self.seed)
        processor, requests = self.processor(), self.requests_of(33, rng)
        self.admit(processor, requests)
        for _ in range(STEPS):
            after = self.step(processor, requests)
            wrong = after.isnan() | (after == torch.inf)
            check(not bool(wrong.any()), "a step gave NaN or +inf")

    def test_what_is_capturable_reads_nothing_on_the_host(self) -> None:
        """A processor that says that a graph can record it waits for no tensor's values in `apply` and `drawn`."""
        processor, requests = self.processor(), self.requests_of(7, random.Random(self.seed))
        if not type(processor).capturable:
            return
        self.admit(processor, requests)
        logits = torch.stack([request.logits() for request in requests])
        batch, said = self._batch(requests), torch.zeros(7, dtype=torch.int64)
        with torch.inference_mode(), HostSyncs() as syncs:
            processor.apply(logits, batch)
            processor.drawn(batch, said)
        check(not syncs.found, f"it says that it is capturable, and reads a tensor: {'; '.join(syncs.found[:2])}")

    def test_keeps_nothing_of_requests_that_left(self) -> None:
        """Requests that come and go leave nothing behind."""
        processor, rng = self.processor(), random.Random(self.seed)

        def serve() -> None:
            requests = self.requests_of(16, rng)
            for row, request in enumerate(requests):  # what is kept by rows is no more than there are of them
                request.row = row
            self.admit(processor, requests)
            self.step(processor, requests)
            for request in requests:
                processor.release(request.row)

        kept = bytes_kept(serve, 6, each=16)
        check(not kept, f"{kept} bytes more for every request that left; forget in release what admit has noted")

    def test_imports_no_torch(self) -> None:
        """Loading the processor imports neither torch nor transformers: the HTTP server loads it for its `Params`."""
        heavy = [name for name in self._child().heavy_alone if name in ("torch", "transformers")]
        check(not heavy, f"loading it imports {', '.join(heavy)}, which takes seconds; import that where it is used")

    def _made(self, params: Mapping[str, Any]) -> Any:
        try:
            return self.plugin().Params(**LogitsRequests({"it": self.plugin()}).read({"it": params})["it"])
        except Exception as error:  # a stranger's class; the message says what it did
            fail(f"Params of {dict(params)!r} raised {raised(error)}")

    def _batch(self, requests: Sequence[LogitsRequest]) -> LogitsRows:
        rows = torch.tensor([request.row for request in requests])
        return LogitsRows(rows, torch.tensor([len(request.ids) - request.num_prompt for request in requests]))
