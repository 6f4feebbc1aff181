"""An engine without a model, behind the real transport: it starts in a moment, and dies when a request says so.

A token depends on the prompt and its position, as with a model. A request called `deadly-WAY…` ends the process in
that way at its eighth token, one called `prompt-WAY…` in its first step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from dovetail.engine.loop import ClosedError
from dovetail.messages import (
    Abort,
    Admitted,
    Control,
    ControlReply,
    EngineInfo,
    Finish,
    Ready,
    Stats,
    StepDeltas,
    Submit,
    TokenDelta,
)
from dovetail_server.supervision.wire import SocketTransport

WAYS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(0),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(600),
}
TICK_S = 0.002
MAX_RUNNING = 24


class Core:
    """Requests in order, so many at once, a token each per step."""

    def __init__(self, transport: SocketTransport) -> None:
        self.transport = transport
        self.live: dict[int, tuple[Submit, list[int]]] = {}
        self.admitted: set[int] = set()
        self.step = 0

    def run(self) -> None:
        """Serve until told to stop."""
        while True:
            for message in self.transport.poll(0 if self.live else 1.0):
                if isinstance(message, Submit):
                    self.live[message.handle] = message, list(message.output_ids)
                elif isinstance(message, Abort):
                    if self.live.pop(message.handle, None) is not None:
                        last = TokenDelta(handle=message.handle, ids=[], finish=Finish("abort", None, "aborted"))
                        self.transport.send(StepDeltas(step=self.step, deltas=[last]))
                elif isinstance(message, Control):
                    if message.op == "shutdown":
                        return
                    self.transport.send(ControlReply(id=message.id, result=self.stats()))
            if self.live:
                self.transport.send(self.make_step())

    def stats(self) -> dict[str, float]:
        """Everything is nothing but what runs."""
        return dict.fromkeys((field.name for field in fields(Stats)), 0) | {"num_running": len(self.live)}

    def make_step(self) -> StepDeltas:
        time.sleep(TICK_S)
        running = dict(list(self.live.items())[:MAX_RUNNING])
        if fresh := [handle for handle in running if handle not in self.admitted]:
            self.admitted.update(fresh)
            self.transport.send(Admitted(fresh))
        deltas = []
        for handle, (submit, output) in running.items():
            kind, _, way = submit.rid.partition("-")
            if (kind == "deadly" and len(output) == 7) or kind == "prompt":
                WAYS[way.partition("-")[0]]()
            output.append(hash((tuple(submit.prompt_ids), len(output))) % 10_000)
            finish = Finish("length") if len(output) >= submit.params.max_tokens else None
            deltas.append(
                TokenDelta(handle=handle, ids=output[-1:], prompt_tokens=len(submit.prompt_ids), finish=finish)
            )
            if finish is not None:
                del self.live[handle]
        self.step += 1
        return StepDeltas(step=self.step, deltas=deltas)


def main() -> None:
    """Connect and serve."""
    transport = SocketTransport(Path(sys.argv[1]))
    transport.exit_without_client()
    transport.receive_start()
    facts = {"architecture": "Scripted", "dtype": "float32", "device": "cpu", "attention_backend": "none"}
    sizes = {
        "vocab_size": 10_000,
        "hidden_size": 8,
        "context_len": 1 << 20,
        "max_total_tokens": 1 << 20,
        "page_size": 1,
    }
    limits = {"max_running_requests": MAX_RUNNING, "weight_bytes": 0, "kv_bytes": 0, "load_s": 0.0}
    transport.send(Ready(EngineInfo(**facts, **sizes, **limits)))  # type: ignore[arg-type]  # names to mixed types
    with contextlib.suppress(ClosedError):
        Core(transport).run()


if __name__ == "__main__":
    main()
