"""The plugin `kv-events`: what a subscriber learns of the prefix cache, and that it is true."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import requests

from dovetail.cache.radix import RadixTree
from dovetail.contracts import CacheEvent
from dovetail.contracts.errors import ConfigError
from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server
from dovetail_backends.kv_events.blocks import BlockNames, BlockRemoved, BlockStored, block_hash
from dovetail_server.compat.arguments import ArgumentTranslation
from dovetail_testing import HooksConformance

pytestmark = pytest.mark.usefixtures("light_servers")

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

END = (1 << 64) - 1


class Index:
    """What a router builds from events: blocks by hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.last = -1

    def take(self, number: int, payload: bytes) -> None:
        assert number == self.last + 1, (number, self.last)
        self.last = number
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert (isinstance(stamp, float), rank) == (True, 0)
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks = {}
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU"
            for name in event["block_hashes"]:
                del self.blocks[name]
        else:
            assert (event["lora_id"], event["lora_name"], event["medium"]) == (None, None, "GPU")
            size, before = event["block_size"], event["parent_block_hash"]
            assert before is None or before in self.blocks
            for at, name in enumerate(event["block_hashes"]):
                assert name not in self.blocks
                self.blocks[name] = before, tuple(event["token_ids"][at * size : (at + 1) * size])
                before = name

    def cached_len(self, ids: list[int], size: int) -> int:
        """Walk down as a router does that makes the names itself."""
        before, num = None, 0
        for at in range(0, len(ids) - size + 1, size):
            before = block_hash(before, ids[at : at + size], "")
            if before not in self.blocks:
                break
            num += size
        return num


def test_the_journal_is_what_the_tree_holds() -> None:
    """After any mix of insertions, evictions, cuts and splits, the events add up to the pages that are cached."""
    rng = random.Random(1)
    journal: list[CacheEvent] = []
    tree = RadixTree(2, journal=journal)
    pages, names, index = itertools.count(), BlockNames(), Index()
    free: list[int] = []
    for _ in range(400):
        salt = rng.choice(["", "", "a"])
        ids = [rng.randrange(3) for _ in range(2 * rng.randint(1, 6))]
        fresh = [free.pop() if free else next(pages) for _ in range(len(ids) // 2)]
        [have], _ = tree.insert(ids, [fresh], salt)
        free += sorted(set(fresh) - set(have))
        if rng.random() < 0.3:
            free += tree.evict([rng.randint(1, 5)])[0]
        if rng.random() < 0.05 and tree.num_pages():
            free += tree.discard_nodes([{rng.choice([page for node in tree.nodes() for page in node.pages[0]])}])[0]
        for event in names.translate(journal):
            index._apply(msgspec.to_builtins(event) | {"type": type(event).__name__})
        journal.clear()
        assert len(index.blocks) == tree.num_pages()
    everything = sorted(tokens for _, tokens in index.blocks.values())
    keys = [tuple(node.key[i : i + 2]) for node in tree.nodes() for i in range(0, len(node.key), 2)]
    assert everything == sorted(keys)


def test_names_follow_prefix_and_salt() -> None:
    """Equal prefixes have equal names in every process; another salt, another name; a number fits both signs."""
    names = BlockNames()
    event = CacheEvent(pages=[7, 9], token_ids=[1, 2, 3, 4], cache_salt="s")
    [told] = names.translate([event])
    assert isinstance(told, BlockStored)
    assert told.extra_keys == [("s",), None]
    assert told.block_hashes[0] == block_hash(None, [1, 2], "s") != block_hash(None, [1, 2], "")
    assert block_hash(None, [1, 2], "") == 7658797960376853358
    assert all(0 <= name < 1 << 63 for name in told.block_hashes)
    [gone] = names.translate([CacheEvent(pages=[9, 7]), CacheEvent(pages=[7])])
    assert isinstance(gone, BlockRemoved)
    assert gone.block_hashes == told.block_hashes[::-1]
    orphan = CacheEvent(pages=[3], token_ids=[5, 6], parent=9)
    assert names.translate([orphan]) == []  # what it follows was lost


class Listener:
    """A router's side of the two sockets."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.events, self.replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.sub.connect(self.events)
        self.index = Index()

    def take(self, seconds: float = 20.0) -> None:
        """Take messages until none has come for a moment."""
        deadline = time.monotonic() + seconds
        while self.sub.poll(250 if self.index.last >= 0 else 5000) and time.monotonic() < deadline:
            topic, number, payload = self.sub.recv_multipart()
            assert topic == b"kv@1"
            self.index.take(struct.unpack(">Q", number)[0], payload)

    def ask(self, first: int) -> list[tuple[int, bytes]]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.replay)
        try:
            dealer.send_multipart([b"", b"no number"])
            dealer.send_multipart([b"", struct.pack(">Q", first)])
            found: list[tuple[int, bytes]] = []
            while dealer.poll(10_000):
                empty, _, number, payload = dealer.recv_multipart()
                assert empty == b""
                if struct.unpack(">Q", number)[0] == END:
                    return found
                found.append((struct.unpack(">Q", number)[0], payload))
            raise AssertionError(f"no end after {len(found)} messages")
        finally:
            dealer.close(0)

    def close(self) -> None:
        self.sub.close(0)
        self.context.term()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Listener]]:
    """A small server of the demo model with the plugin, configured by vLLM's flag, and a listener from the start."""
    folder = tmp_path_factory.mktemp("kv")
    listener = Listener(folder)
    config = msgspec.json.encode(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": listener.events,
         "replay_endpoint": listener.replay, "topic": "kv@1", "buffer_steps": 1000}
    ).decode()  # fmt: skip
    process, port = launch_server_cmd(
        f"dovetail serve --num-threads 1 --log-level warning --max-total-tokens 1024 --kv-events-config '{config}'"
    )
    base = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(base, timeout=120)
        yield base, listener
    finally:
        listener.close()
        terminate_process(process, timeout=60)


def post(base: str, path: str, **body: Any) -> dict[str, Any]:
    reply = requests.post(base + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_a_subscriber_knows_what_a_server_has_cached(server: tuple[str, Listener]) -> None:
    """Prompts come and push each other out; at every moment the index says what the server then finds cached."""
    base, listener = server
    prompts = [f"Rule {n}: " + " ".join(f"word{n * k}" for k in range(60)) for n in range(6)]
    size = 0
    for turn in range(10):
        text = prompts[turn % 6]
        ids = post(base, "/tokenize", prompt=text)["tokens"]
        listener.take()
        sizes = {len(tokens) for _, tokens in listener.index.blocks.values()}
        size = sizes.pop() if sizes else 16
        expected = min(listener.index.cached_len(ids, size), (len(ids) - 1) // size * size)
        meta = post(base, "/generate", input_ids=ids, sampling_params={"max_new_tokens": 4})["meta_info"]
        assert meta["cached_tokens"] == expected, turn
    listener.take()
    assert listener.index.blocks
    assert size > 1
    kept = listener.ask(0)
    assert [number for number, _ in kept] == list(range(listener.index.last + 1))
    again = Index()
    for number, payload in kept:
        again.take(number, payload)
    assert again.blocks == listener.index.blocks
    assert listener.ask(listener.index.last)[0][0] == listener.index.last
    post(base, "/flush_cache")
    listener.take()
    assert listener.index.blocks == {}


def test_an_engine_that_begins_again_has_nothing_cached(server: tuple[str, Listener]) -> None:
    """When the engine dies, subscribers hear that all blocks are gone before anything new is stored."""
    base, listener = server
    post(base, "/generate", text="word " * 60, sampling_params={"max_new_tokens": 2})
    listener.take()
    assert listener.index.blocks
    engines = engines_of(base)
    assert len(engines) == 1
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    found = post(base, "/generate", text="other " * 60, sampling_params={"max_new_tokens": 2})
    assert found["meta_info"]["cached_tokens"] == 0
    listener.take()
    assert all("other" not in str(tokens) for _, tokens in listener.index.blocks.values())
    ids = post(base, "/tokenize", prompt="word " * 60)["tokens"]
    assert listener.index.cached_len(ids, 16) == 0


def engines_of(base: str) -> list[int]:
    """Process ids of the engines below the server at this address."""
    port = base.rsplit(":", 1)[1]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"dovetail_server.supervision.engine_main" in words:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                line = Path(f"/proc/{parent}/cmdline").read_bytes()
                if port.encode() in line:
                    found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"publisher": "null"}', []),
        ("{}", []),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', []),
        ('{"publisher": "zmq"}', ["--plugin", "kv-events"]),
        ('{"enable_kv_cache_events": true}', ["--plugin", "kv-events"]),
        (
            '{"publisher": "zmq", "replay_endpoint": "tcp://*:1", "hwm": 5, "max_queue_size": 3}',
            ["--plugin", "kv-events", "--kv-events.replay-endpoint", "tcp://*:1", "--kv-events.hwm", "5"],
        ),
    ],
)
def test_the_peers_flag_becomes_the_plugin(value: str, expected: list[str]) -> None:
    """vLLM's and SGLang's `--kv-events-config` enable it with their names."""
    assert ArgumentTranslation(["--kv-events-config", value, "--port", "1"], {"--port"}).argv == [
        *expected,
        "--port",
        "1",
    ]
    assert ArgumentTranslation([f"--kv-events-config={value}"], set()).argv == expected


@pytest.mark.parametrize(
    ("value", "part"),
    [("zmq", "no JSON"), ("[]", "JSON object"), ('{"publisher": "nats"}', "possible: zmq"),
     ('{"publisher": "zmq", "end_point": 1}', "'end_point' is unknown"),
     ('{"publisher": "zmq", "format": "dynamo"}', "vLLM's form")],
)  # fmt: skip
def test_a_wrong_value_of_the_flag_says_why(value: str, part: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=part):
        ArgumentTranslation(["--kv-events-config", value], set())


def test_an_address_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    """One line names the settings."""
    from dovetail_backends.kv_events.publisher import KvEventsOptions, Publisher

    with pytest.raises(ConfigError, match=r"kv-events\.endpoint"):
        Publisher(KvEventsOptions(endpoint=f"ipc://{tmp_path}/missing/e*"))


def test_a_plugin_that_falls_behind_takes_everything_back(tmp_path: Path) -> None:
    """After lost events subscribers start anew; what follows lost pages is left out."""
    from dovetail_backends.kv_events.publisher import KvEventsOptions, Publisher

    publisher = Publisher(KvEventsOptions(endpoint=f"ipc://{tmp_path}/e"))
    try:
        publisher.cache_changed([CacheEvent(pages=[1], token_ids=[1, 2])])
        publisher.events_lost(3)
        publisher.cache_changed([CacheEvent(pages=[2], token_ids=[3, 4], parent=1), CacheEvent(pages=[1])])
        kinds = [[e["type"] for e in msgspec.msgpack.decode(payload)[1]] for _, payload in publisher._kept]
        assert kinds == [["BlockStored"], ["AllBlocksCleared"]]
    finally:
        publisher.close()


class TestKit(HooksConformance):
    """The conformance kit of hook plugins."""

    name = "kv-events"
    options: ClassVar[dict[str, str]] = {"endpoint": "inproc://kit"}

    @pytest.fixture(autouse=True)
    def closed(self) -> Iterator[None]:
        """Nobody else stops what the kit starts."""
        from dovetail_backends.kv_events import publisher as kv_events

        yield
        while kv_events._publishers:
            kv_events._publishers.pop().close()
