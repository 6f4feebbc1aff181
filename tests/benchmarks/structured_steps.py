"""What a step of structured replies costs an engine's host, and how much of it the device hides.

    python tests/benchmarks/structured_steps.py TOKENIZER_FOLDER [--streams 1 64] [--profile]

The engine, its scheduler, grammars, late masks, loop and socket are the real ones. The device is a model of one: it
takes a given time for a forward pass, a draw and a mask's way, one after the other, and draws tokens that the mask
allows: of a text by the schema, or any of those allowed, as random weights do. Its own work is not counted: the
engine's thread is timed by the processor time it takes, and where it waits for the device the clock is set forward.
So the figures hold on a busy machine, too, as far as its caches do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import statistics
import struct
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from grammar_rows import CALL
from structured_tools import EOS, VOCAB, Profile, Row, Texts, grammars

from dovetail.base.frames import frame
from dovetail.base.settings import EngineSettings
from dovetail.client.launch import _preload_grammars
from dovetail.contracts.cache import FULL
from dovetail.engine.core import EngineCore
from dovetail.engine.loop import run_loop
from dovetail.grammar.matching.bitmask import FREE
from dovetail.messages import Control, GrammarOption, SamplerParams, Submit, ToEngine
from dovetail.messages.step import (
    AT_DEVICE,
    DecodeGraph,
    ExecutorInfo,
    GraphKey,
    PrefillGraph,
    PrepareResult,
    StepInput,
    StepLate,
    StepOutput,
)
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.sampling.masks import num_kept
from dovetail.sdk.masks import has_bit
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.supervision import imports
from dovetail_server.supervision.wire import SocketTransport

MAX_TOKENS = 256
GRAPHS: tuple[GraphKey, ...] = (*map(DecodeGraph, (1, 8, 64)), PrefillGraph(64, 1), PrefillGraph(512, 8))


@dataclass(frozen=True)
class Device:
    """Milliseconds of a device, and of the host that starts its work.

    Attributes:
        forward: A decode step, from tokens to logits and the best token.
        draw: The draw behind it, where it is one of its own.
        launch, choose: What the host takes to start a step, and its draw.
    """

    forward: float
    draw: float
    launch: float
    choose: float


class Clock:
    """The engine thread's processor time, without what is done `free`, and with what it waited."""

    def __init__(self) -> None:
        self._added = self.waited = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() + self._added

    def wait_until(self, moment: float) -> None:
        """Let the device come so far."""
        waits = max(0.0, moment - self.now())
        self._added += waits
        self.waited += waits

    def spend(self, seconds: float) -> None:
        """The host works for so long."""
        self._added += seconds

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """Do what no host would do."""
        began = time.thread_time()
        yield
        self._added -= time.thread_time() - began


class TimedExecutor:
    """See the module. One step is in flight beside the one that is launched, as with a device."""

    def __init__(self, device: Device, clock: Clock, texts: Texts | None, num_rows: int, sends_all: bool) -> None:
        self.device, self.clock, self.texts = device, clock, texts
        self.rows: dict[int, Row] = {}
        self.ends: list[tuple[float, int]] = []
        self.late_s: list[float] = []
        self.num_sent = self.num_masks = 0
        self._free_at = self._due = 0.0
        self._open: tuple[StepInput, list[int]] | None = None
        self._flying: deque[tuple[float, StepInput, list[int], StepLate | None]] = deque()
        words, self._num_lent = (VOCAB + 31) // 32, 2 * num_rows
        self._masks = np.zeros((2 * num_rows + num_kept(words), words), dtype=np.int32)
        self.info = ExecutorInfo(
            architecture="None", dtype="bfloat16", device="cpu", vocab_size=VOCAB, hidden_size=8,
            context_len=4096, page_size=16, num_pages=(8192,), reaches=(FULL,), chunk_size=2048,
            attention_backend="none", prefix_group=0, weight_bytes=0, kv_bytes=0, load_s=0.0, graphs=GRAPHS,
            prepared=PrepareResult(captured=GRAPHS), kept_masks=0 if sends_all else num_kept(words),
        )  # fmt: skip

    def device_memory(self) -> tuple[int, int]:
        return 0, 0

    def launch(self, step: StepInput) -> None:
        """Start the forward pass."""
        self.clock.spend(self.device.launch / 1e3)
        with self.clock.free():
            places = self._take(step)
        passes = (step.start == AT_DEVICE).any() + (step.start != AT_DEVICE).any()
        began = max(self._free_at, self.clock.now())
        self._due = self._free_at = began + passes * self.device.forward / 1e3
        if step.waits.any():
            self._open = step, places
        else:
            self._flying.append((self._free_at, step, places, None))

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """See `Executor`."""
        return self._masks[:num]

    def choose(self, late: StepLate) -> None:
        """Draw behind the forward pass, once the masks are there."""
        assert self._open is not None
        (step, places), self._open = self._open, None
        with self.clock.free():
            for line, slot in late.keep.tolist():
                self._masks[self._num_lent + slot] = self._masks[line]
            self.num_sent += int((late.mask_of >= 0).sum())
            self.num_masks += int((late.mask_of != FREE).sum())
        self.clock.spend(self.device.choose / 1e3)
        self.late_s.append(self.clock.now() - self._due)
        self._free_at = max(self._free_at, self.clock.now()) + self.device.draw / 1e3
        self._flying.append((self._free_at, step, places, late))

    def read(self) -> StepOutput:
        """Wait for the oldest step, and draw its tokens in no time."""
        done, step, places, late = self._flying.popleft()
        self.clock.wait_until(done)
        with self.clock.free():
            skip = np.zeros(step.num_sampled, np.bool_) if late is None else late.skip
            tokens = [
                self._draw(int(step.rows[at]), places[at], None if late is None else self._mask(int(late.mask_of[at])))
                for at in np.flatnonzero(~skip).tolist()
            ]
            num = np.zeros(len(step.rows), dtype=np.int32)
            num[: len(skip)] = ~skip
            self.ends.append((self.clock.now(), int(np.count_nonzero(step.start == AT_DEVICE))))
            finite = np.ones(len(step.rows), dtype=np.bool_)
            return StepOutput(step=step.step, num=num, tokens=np.array(tokens, dtype=np.int64), finite=finite)

    def _mask(self, number: int) -> npt.NDArray[np.int32]:
        """A mask of a step, or one that is kept."""
        return self._masks[number if number >= 0 else self._num_lent - 2 - number]

    def _take(self, step: StepInput) -> list[int]:
        """Note who came, and what tokens the host alone knows; returns which token each row draws."""
        for admit in step.admit:
            self.rows[admit.row] = Row(admit.seed, random.Random(admit.seed))
        at, places = 0, []
        for row, start, num in zip(step.rows.tolist(), step.start.tolist(), step.num_new.tolist(), strict=True):
            if start != AT_DEVICE:
                ids = step.ids[at : at + num].tolist()
                at += num
                self.rows[row].said[max(0, start - PROMPT) :] = ids[max(0, PROMPT - start) :]
                self.rows[row].num_launched = max(0, start + num - PROMPT)
            places.append(self.rows[row].num_launched)
            self.rows[row].num_launched += 1
        return places

    def _draw(self, row: int, place: int, mask: npt.NDArray[np.int32] | None) -> int:
        """The token that goes on with the text, if the mask allows it; else any that it allows."""
        mine = self.rows[row]
        if len(mine.said) != place:
            return 0  # forced tokens came in between: nobody will be sent this one
        token = None if self.texts is None else self.texts.following(mine)
        if mask is None:
            token = mine.rng.randrange(EOS)
        elif token is None or not has_bit(mask, token):
            token = mine.any_of(mask)
        mine.said.append(token)
        return token

    def is_computing(self) -> bool:
        """See `Executor`."""
        return self._due > self.clock.now()

    def prepare(self, key: GraphKey | None = None) -> PrepareResult:
        """Nothing is captured here."""
        raise AssertionError("there is nothing to prepare")

    def check(self) -> None:
        """There is nothing to look after."""

    def close(self) -> None:
        """Nothing runs beside it."""


PROMPT = 24


def client(listener: socket.socket, submits: list[Submit], streams: int) -> None:
    """Send requests, so many at a time, and read what comes; in a process of its own."""
    link, _ = listener.accept()
    encoder, left, running = msgspec.msgpack.Encoder(), deque(submits), 0
    message: ToEngine
    head = struct.Struct(">I")
    source, reasons = link.makefile("rb"), Counter[str]()
    while left or running:
        while left and running < streams:
            message = left.popleft()
            link.sendall(frame(encoder.encode(message)))
            running += 1
        (length,) = head.unpack(source.read(4))
        found = msgspec.msgpack.decode(source.read(length))
        for delta in found.get("deltas", ()):
            if delta.get("finish"):
                running -= 1
                reasons[delta["finish"][0]] += 1
    if reasons["abort"]:
        print(f"  {reasons['abort']} requests failed", flush=True)
    link.sendall(frame(encoder.encode(Control(id=1, op="shutdown"))))


@dataclass
class Outcome:
    """Of a run: steps, tokens a second, how late masks came, how long the host waited, and the part of masks sent."""

    step_ms: float
    mean_ms: float
    slow_ms: float
    rate: float
    late_ms: float
    waited_ms: float
    sent: float


def run(
    folder: Path,
    grammar: tuple[GrammarOption, ...],
    streams: int,
    device: Device,
    texts: Texts | None,
    profile: Profile | None,
    sends_all: bool,
) -> Outcome:
    """Serve some rounds of requests."""
    settings = EngineSettings(
        model_path=str(folder), device="cpu", overlap_on_cpu=True, max_running_requests=max(streams, 8)
    )
    plan = make_plan(Registry.scan(), grammar_backend="auto", schedule_policy="fcfs")
    plugins = load(plan, "engine")
    clock = Clock()
    executor = TimedExecutor(device, clock, texts, streams, sends_all)
    rounds = max(3, 8 // streams)
    submits = [
        Submit(
            rid="", handle=at, prompt_ids=[at % 1000 + 5] * PROMPT, grammar=grammar,
            params=SamplerParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9, seed=at, ignore_eos=True),
        )
        for at in range(rounds * streams)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        address = Path(scratch) / "engine"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(address))
        listener.listen()
        core = EngineCore(settings, plugins, executor, eos_ids=(EOS,))
        assert core.grammars is not None
        core.grammars.service.warm_up().wait(60)
        imports.started()  # as an engine's process does
        counted = Counted(core, executor)
        if profile is not None:
            profile.watch(core, executor)
        transport = SocketTransport(address)
        if not (child := os.fork()):
            transport._socket.close()  # so that it reads an end where the engine fails
            with contextlib.suppress(BrokenPipeError, ConnectionError, struct.error):
                client(listener, submits, streams)
            os._exit(0)
        run_loop(core, transport)
        os.waitpid(child, 0)
    return counted.outcome(streams, clock)


class Counted:
    """Counts what an engine's steps brought while all streams ran; the first round, which learns, is left out."""

    def __init__(self, core: EngineCore, executor: TimedExecutor) -> None:
        self._executor, self._step = executor, core.step
        self.ticks: list[tuple[float, int, float]] = []
        core.step = self._counting  # type: ignore[method-assign]

    def _counting(self) -> Any:
        tick = self._step()
        with self._executor.clock.free():
            clock = self._executor.clock
            self.ticks.append((clock.now(), sum(len(delta.ids) for delta in tick.deltas), clock.waited))
        return tick

    def outcome(self, streams: int, clock: Clock) -> Outcome:
        """Of the run."""
        ticks = self.ticks[len(self.ticks) // 3 :]
        times = np.diff([began for began, _, _ in ticks])
        tokens = sum(num for _, num, _ in ticks[1:])
        late = self._executor.late_s[len(self._executor.late_s) // 3 :]
        return Outcome(
            1e3 * float(np.median(times)),
            1e3 * float(np.mean(times)),
            1e3 * float(np.quantile(times, 0.95)),
            tokens / float(times.sum()),
            1e3 * statistics.median(late) if late else 0.0,
            1e3 * (ticks[-1][2] - ticks[0][2]) / len(times),
            self._executor.num_sent / max(1, self._executor.num_masks),
        )


def main() -> None:
    """Print a table, and where the host's time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--forward", type=float, nargs="+", default=[0.55, 1.45], help="ms, for each of --streams")
    parser.add_argument("--draw", type=float, default=0.05, help="ms")
    parser.add_argument("--launch", type=float, default=0.08, help="ms of the host for a step")
    parser.add_argument("--choose", type=float, default=0.05, help="ms of the host for a late draw")
    parser.add_argument("--only", nargs="+", help="of: free schema-random schema-text tools-random tools-text")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sends-all", action="store_true", help="the device keeps no masks")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.folder)
    schema, tools = grammars(tokenizer)
    cases: list[tuple[str, tuple[GrammarOption, ...], Texts | None]] = [
        ("free", (), None),
        ("schema-random", schema, None),
        ("schema-text", schema, Texts(tokenizer, "")),
        ("tools-random", tools, None),
        ("tools-text", tools, Texts(tokenizer, CALL)),
    ]
    _preload_grammars(load(make_plan(Registry.scan(), grammar_backend="auto"), "engine"))
    for streams, forward in zip(options.streams, options.forward, strict=True):
        print(f"{streams} streams: forward {forward} ms, draw {options.draw}, launch {options.launch}", flush=True)
        print(f"  {'ms of a step':14}  median    mean     p95    tok/s  of it  masks at  host waits  masks sent")
        base = 0.0
        for name, grammar, texts in cases:
            if options.only and name not in options.only:
                continue
            device = Device(forward, options.draw, options.launch, options.choose if grammar else 0.0)
            profile = Profile() if options.profile else None
            found = run(options.folder, grammar, streams, device, texts, profile, options.sends_all)
            base = base or found.rate
            print(
                f"  {name:14}{found.step_ms:8.3f}{found.mean_ms:8.3f}{found.slow_ms:8.3f}{found.rate:9.0f}"
                f"{found.rate / base:7.2f}{found.late_ms:+10.3f}{found.waited_ms:10.3f}{found.sent:12.2f}",
                flush=True,
            )
            if profile is not None:
                profile.tell()


if __name__ == "__main__":
    main()
