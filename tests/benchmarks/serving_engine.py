"""A scripted engine in a process of its own, behind the real transport: what the HTTP side costs without a model."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import fields
from pathlib import Path

from dovetail.base.settings import EngineSettings
from dovetail.demo import MODEL_DIR
from dovetail.engine.loop import ClosedError, Transport
from dovetail.engine.wire import SocketTransport
from dovetail.messages import (
    Abort,
    Control,
    ControlReply,
    EngineInfo,
    Finish,
    Ready,
    Stats,
    StepDeltas,
    Submit,
    ToEngine,
    TokenDelta,
)
from dovetail.plugins import PluginPlan
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.supervision.engine_process import ProcessClient

TEXT = "The quick brown fox jumps over the lazy dog; 42 élèves comptent 1, 2, 3 and then some more.\n"


def script() -> list[int]:
    """Return the ids that every reply repeats."""
    return Tokenizer.load(MODEL_DIR).encode(TEXT, add_special_tokens=False)


class ScriptedCore:
    """Gives every live request one token per step, at a fixed pace or as fast as the reader takes them.

    `cached_tokens` carries the clock in microseconds, so that a client can tell how long a token was under way.
    """

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.ids = script()
        self.live: dict[int, list[int]] = {}
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
            self.live[message.handle] = [0, message.params.max_tokens]
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
        for handle, place in list(self.live.items()):
            at, end = place
            place[0] = at + 1
            finish = Finish("length") if at + 1 == end else None
            ids = [self.ids[at % len(self.ids)]]
            deltas.append(TokenDelta(handle=handle, ids=ids, prompt_tokens=9, cached_tokens=clock, finish=finish))
            if finish is not None:
                del self.live[handle]
        return StepDeltas(step=self.steps, deltas=deltas)


class ScriptedProcess(ProcessClient):
    """Starts this file where `ProcessClient` starts the engine."""

    def __init__(self, settings: EngineSettings, plan: PluginPlan, tick_s: float, folder: Path = MODEL_DIR) -> None:
        super().__init__(settings, plan)
        self.command = (__file__, str(tick_s), str(folder))


def main() -> None:
    """Connect and serve."""
    tick_s, folder, path = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
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
    core = ScriptedCore(tick_s)
    with contextlib.suppress(ClosedError):
        core.run(transport)


if __name__ == "__main__":
    main()
