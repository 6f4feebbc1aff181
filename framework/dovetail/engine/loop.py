"""The engine's loop: drain messages, step, send; the same over any transport."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from dovetail.messages import Control, FromEngine, ToEngine

if TYPE_CHECKING:
    from dovetail.engine.core import EngineCore  # imports what the client's side of a socket does not need

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0
IDLE_TASK_POLL_S = 0.2
"""Idle time before a task of its own: a client that sends requests one by one must not wait for it in between."""
EARLY = 0.75
"""The part of the client's limit after which a stall is said: the engine does not live to say it later."""


class ClosedError(Exception):
    """The other end of a transport is gone."""


class Transport(Protocol):
    """Carries messages between the loop and its client."""

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """Return what has arrived; wait up to `timeout_s` for the first message, not at all for 0.

        Raises:
            ClosedError: The client is gone.
        """
        ...

    def send(self, message: FromEngine) -> None:
        """Send one message.

        Raises:
            ClosedError: The client is gone.
        """


def run_loop(core: EngineCore, transport: Transport) -> None:
    """Serve until a `shutdown` message or until the client is gone."""
    core.send = transport.send
    try:
        while True:
            wait_s = core.throttle_s if core.has_work else IDLE_TASK_POLL_S if core.has_idle_tasks else IDLE_POLL_S
            messages = transport.poll(wait_s)
            for message in messages:
                if isinstance(message, Control) and message.op == "shutdown":
                    return
                reply = core.handle(message)
                if reply is not None:
                    transport.send(reply)
            if core.has_work:
                transport.send(core.step())
            elif core.has_idle_tasks and not messages:
                core.run_idle_task()
            else:
                core.executor.check()
    except ClosedError:
        logger.debug("the engine's client is gone; stopping")
    finally:
        core.close()
