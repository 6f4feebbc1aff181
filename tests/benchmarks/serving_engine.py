"""A scripted engine in a process of its own, behind the real transport: what the HTTP side costs without a model."""

from __future__ import annotations

import contextlib
import sys
import time
from array import array
from dataclasses import fields
from pathlib import Path

from dovetail.base.settings import EngineSettings
from dovetail.contracts.replies import TopLogprob
from dovetail.demo import MODEL_DIR
from dovetail.engine.loop import ClosedError, Transport
from dovetail.messages import (
    Abort,
    Control,
    ControlReply,
    EngineInfo,
    Finish,
    Ready,
    SamplerParams,
    Stats,
    StepDeltas,
    Submit,
    ToEngine,
    TokenDelta,
    TokenLogprob,
)
from dovetail.plugins import PluginPlan
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.supervision.engine_process import ProcessClient
from dovetail_server.supervision.wire import SocketTransport

TEXT = "The quick brown fox jumps over the lazy dog; 42 élèves comptent 1, 2, 3 and then some more.\n"
ROWS = '{"name": "Rhône", "kind": "river", "year": 1842}, {"name": "Mont-Blanc", "kind": "mountain", "year": 1786}, '
OPENED = {"schema": '{"rows": [', "tools": '<tool_call>\n{"name": "store", "arguments": {"rows": ['}
"""What a reply of a kind begins with, before it repeats `ROWS`; others repeat `TEXT` alone."""


def script(kind: str = "plain") -> tuple[list[int], list[int]]:
    """Return the ids that every reply of a kind begins with, and those that it repeats."""
    encode = Tokenizer.load(MODEL_DIR).encode
    opened = encode(OPENED.get(kind, ""), add_special_tokens=False)
    return opened, encode(ROWS if kind in OPENED else TEXT, add_special_tokens=False)


class ScriptedCore:
    """Gives every live request one token per step, at a fixed pace or as fast as the reader takes them.

    `cached_tokens` carries the clock in microseconds, so that a client can tell how long a token was under way.
    Log probabilities are those of tokens that follow one another in the vocabulary, and differ from step to step.
    """

    def __init__(self, tick_s: float, kind: str = "plain") -> None:
        self.tick_s = tick_s
        self.first, self.ids = script(kind)
        self.grammar_option = 0 if kind in OPENED else None
        self.vocab_size = Tokenizer.load(MODEL_DIR).vocab_size
        self.live: dict[int, tuple[list[int], SamplerParams]] = {}
        self.ended: list[TokenDelta] = []
        self.steps = 0
        self.due = 0.0

    def run(self, transport: Transport) -> None:
        """Serve as the engine's loop does, until told to stop."""
        while True:
            for message in transport.poll(0 if self.live or self.ended else 1.0):
                if isinstance(message, Control) and message.op == "shutdown":
                    return
                if (reply := self.handle(message)) is not None:
                    transport.send(reply)
            if self.live or self.ended:
                transport.send(self.step())

    def handle(self, message: ToEngine) -> ControlReply | None:
        """Take one message."""
        if isinstance(message, Submit):
            self.live[message.handle] = [0], message.params
        elif isinstance(message, Abort):
            if self.live.pop(message.handle, None) is not None:
                self.ended.append(TokenDelta(handle=message.handle, ids=[], finish=Finish("abort", None, "aborted")))
        else:
            held = len(self.live)
            stats = dict.fromkeys((field.name for field in fields(Stats)), 0) | {
                "num_running": held,
                "num_used_tokens": held,
            }
            return ControlReply(id=message.id, result=stats)
        return None

    def step(self) -> StepDeltas:
        """Make one step, when its time has come."""
        now = time.monotonic()
        if self.due > now:
            time.sleep(self.due - now)
        self.due = max(self.due, now - self.tick_s) + self.tick_s
        self.steps += 1
        deltas, self.ended = self.ended, []
        clock = int(time.monotonic() * 1e6)
        for handle, (place, params) in list(self.live.items()):
            at = place[0]
            place[0] = at + 1
            finish = Finish("length") if at + 1 == params.max_tokens else None
            behind = at - len(self.first)
            token = self.first[at] if behind < 0 else self.ids[behind % len(self.ids)]
            delta = TokenDelta(handle=handle, ids=[token], prompt_tokens=9, cached_tokens=clock, finish=finish)
            delta.grammar_option = self.grammar_option
            if params.logprobs is not None:
                delta.logprobs = [self.row(token, params.logprobs, handle * at)]
            deltas.append(delta)
            if finish is not None:
                del self.live[handle]
        return StepDeltas(step=self.steps, deltas=deltas)

    def row(self, token: int, num_top: int, at: int) -> TokenLogprob:
        """Make up a token's log probabilities: float32 numbers, as a sampler's are."""
        values = array("f", [-0.1234567 - (at % 977) / 311 - 1.7 * rank for rank in range(num_top)])
        top = [TopLogprob((token + 7 * i * at) % self.vocab_size, value) for i, value in enumerate(values)]
        return TokenLogprob(token, values[0] if values else -0.5, top)


class ScriptedProcess(ProcessClient):
    """Starts this file where `ProcessClient` starts the engine."""

    def __init__(
        self, settings: EngineSettings, plan: PluginPlan, tick_s: float, folder: Path = MODEL_DIR, kind: str = "plain"
    ) -> None:
        super().__init__(settings, plan)
        self.command = (__file__, str(tick_s), str(folder), kind)


def main() -> None:
    """Connect and serve."""
    tick_s, folder, kind, path = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    transport = SocketTransport(path)
    transport.receive_start()
    vocab_size = Tokenizer.load(folder).vocab_size
    info = EngineInfo(
        architecture="Scripted",
        dtype="float32",
        device="cpu",
        vocab_size=vocab_size,
        hidden_size=1,
        context_len=1 << 20,
        max_total_tokens=1 << 20,
        max_running_requests=4096,
        page_size=1,
        attention_backend="none",
        weight_bytes=0,
        kv_bytes=0,
        load_s=0.0,
    )
    transport.send(Ready(info))
    core = ScriptedCore(tick_s, kind)
    with contextlib.suppress(ClosedError):
        core.run(transport)


if __name__ == "__main__":
    main()
