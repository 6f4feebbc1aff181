"""`--plugin kv-events`: tells routers over ZMQ what the prefix cache holds, as vLLM's and SGLang's engines do.

Batches go out on a PUB socket as (topic, sequence number of 8 bytes, payload). Who has missed some asks the replay
socket, a ROUTER, for all from a number on: it gets (topic, number, payload) for each that is still known, and at last
(empty, -1, empty).
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
from pydantic import BaseModel, ConfigDict, Field

from dovetail.contracts import CacheEvent, CacheObserver, ProcessContext, hookimpl
from dovetail.contracts.errors import ConfigError
from dovetail_backends.kv_events.blocks import AllBlocksCleared, BlockNames, EventBatch

logger = logging.getLogger("dovetail.kv_events")
plugin = sys.modules[__name__]
END = (-1).to_bytes(8, "big", signed=True)
POLL_MS = 200
LINGER_MS = 500


class KvEventsOptions(BaseModel):
    """Settings: `--kv-events.endpoint` and so on, under the names of vLLM's `--kv-events-config`."""

    model_config = ConfigDict(extra="forbid")

    endpoint: str = Field("tcp://*:5557", description="Where batches go out; an address without * is connected to.")
    replay_endpoint: str | None = Field(None, description="Where missed batches are asked for.")
    topic: str = Field("", description="What each message begins with.")
    buffer_steps: int = Field(10_000, ge=1, le=1 << 24, description="Batches that can be asked for again.")
    hwm: int = Field(100_000, ge=0, description="Messages that wait for a slow subscriber; then it loses some.")


class Publisher(CacheObserver):
    """Publishes what the server tells it, in the thread that tells; a second thread answers who asks again."""

    def __init__(self, options: KvEventsOptions) -> None:
        """Open the sockets.

        Raises:
            ConfigError: An address cannot be used.
        """
        self._topic = options.topic.encode()
        self._names = BlockNames()
        self._numbers = itertools.count()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_closing = threading.Event()
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(options.hwm)
        self._out.setsockopt(zmq.LINGER, LINGER_MS)
        self._replay: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        try:
            self._open(options)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"kv-events: {error}; see --kv-events.endpoint and --kv-events.replay-endpoint") from None

    def _open(self, options: KvEventsOptions) -> None:
        if "*" in options.endpoint or "::" in options.endpoint or options.endpoint.startswith(("ipc://", "inproc://")):
            self._out.bind(options.endpoint)
        else:
            self._out.connect(options.endpoint)
        if options.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.LINGER, 0)
            self._replay.setsockopt(zmq.SNDHWM, options.buffer_steps + 1)
            self._replay.bind(options.replay_endpoint)
            self._thread = threading.Thread(target=self._answer, args=(self._replay,), name="kv-events replay")
            self._thread.daemon = True
            self._thread.start()

    def cache_changed(self, events: Sequence[CacheEvent]) -> None:
        """Publish what came and went."""
        translated = self._names.translate(events)
        if translated:
            self._publish(EventBatch(time.time(), translated))

    def cache_cleared(self, num_restarts: int) -> None:
        """Publish that nothing is cached."""
        self._names.clear()
        self._publish(EventBatch(time.time(), [AllBlocksCleared()]))

    def events_lost(self, num_events: int) -> None:
        """Take everything back: what is cached is not known any more; what comes from now on is."""
        logger.warning("kv-events lost %d batches; subscribers receive a reset of all blocks.", num_events)
        self.cache_cleared(0)

    def _publish(self, batch: EventBatch) -> None:
        payload, number = self._encode(batch), next(self._numbers)
        with self._lock:
            self._kept.append((number, payload))
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        while not self._is_closing.is_set():
            if not socket.poll(POLL_MS):
                continue
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("kv-events: a question of %d frames; send an empty one and 8 bytes.", len(frames) - 1)
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            with self._lock:
                kept = list(self._kept)
            for number, payload in kept:
                if number >= first:
                    socket.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            socket.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        """Close the sockets."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(2)
        self._out.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()


_publishers: list[Publisher] = []


@hookimpl
def dovetail_settings() -> type:
    """Return the class of the settings."""
    return KvEventsOptions


@hookimpl
def dovetail_cache_observers(ctx: ProcessContext) -> Publisher:
    """Open the sockets, before the engine begins."""
    _publishers.append(Publisher(ctx.settings))
    return _publishers[-1]


@hookimpl
def dovetail_process_stop(ctx: ProcessContext) -> None:
    """Close them."""
    while _publishers:
        _publishers.pop().close()
