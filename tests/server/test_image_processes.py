"""Processes that have decoded an image: their owner's further requests go to them, nobody else's, and not for ever."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from socket import socketpair

import numpy as np
import pytest
import requests
from PIL import Image
from seeing_server import SeeingHarness, data_url, part, png, write_seeing_model
from seeing_server import ask as images_asked

from dovetail.base.forks import ForkServer
from dovetail.messages import Submit
from dovetail.messages.media import read_arrays
from dovetail.sdk.pixels import MANY_THREADS
from dovetail_server.reading.child import MAX_IMAGE_JOBS

KEYS = ("first-key-of-a-user", "other-key-of-a-user")


class Pids(set[int]):
    """Processes that read bodies now; remembers all that did."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[int] = []

    def add(self, pid: int) -> None:
        self.all.append(pid)
        super().add(pid)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SeeingHarness]:
    made = SeeingHarness(write_seeing_model(tmp_path), context_len=4096, body_processes=2, api_key=list(KEYS))
    made.state.bodies.pids = Pids()
    yield made
    made.close()


def ask(server: SeeingHarness, key: str, url: str) -> tuple[int, int]:
    """Return the status of a request with an image, and the process that read it."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part(url)]}], "max_tokens": 1}
    reply = requests.post(
        f"{server.base}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    pids = server.state.bodies.pids
    assert isinstance(pids, Pids)
    return reply.status_code, pids.all[-1]


def picture(number: int) -> str:
    return data_url(png(56 + number, 28, (number, 30, 30)))


def test_an_owner_keeps_its_process_and_no_other_gets_it(server: SeeingHarness) -> None:
    """Neither key's requests go to a process that decoded an image of the other's."""
    found = [ask(server, KEYS[at % 2], picture(at)) for at in range(6)]
    assert [status for status, _ in found] == [200] * 6
    first, other = {pid for _, pid in found[::2]}, {pid for _, pid in found[1::2]}
    assert (len(first), len(other)) == (1, 1)
    assert first != other


def test_a_process_that_met_a_broken_image_or_was_killed_is_replaced(server: SeeingHarness) -> None:
    """The next request finds another one."""
    _, first = ask(server, KEYS[0], picture(0))
    status, second = ask(server, KEYS[0], picture(1)[:60])
    assert (status, second) == (400, first)
    status, third = ask(server, KEYS[0], picture(2))
    assert status == 200
    assert third != first
    os.kill(third, 9)
    status, fourth = ask(server, KEYS[0], picture(3))
    assert status == 200
    assert fourth != third


def test_a_process_decodes_a_bounded_number_of_requests(server: SeeingHarness) -> None:
    """What a crafted image may have done to it ends at some time, with it."""
    pids = [ask(server, KEYS[0], picture(at))[1] for at in range(MAX_IMAGE_JOBS + 2)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [MAX_IMAGE_JOBS, 2]


def test_several_threads_make_what_one_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with many cores has the same digest and arrays of an image as another.

    It has them where its tokenizer may have one thread, too: their number says nothing of images.
    """
    folder, found = write_seeing_model(tmp_path), []
    noise = np.random.default_rng(3).integers(0, 256, (400, 500, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for number in (1, MANY_THREADS):
        monkeypatch.setattr("dovetail_server.reading.context.num_cores", lambda number=number: number)
        server = SeeingHarness(folder, context_len=4096)
        server.state.bodies.pids = pids = Pids()
        try:

            def watch(submit: Submit, server: SeeingHarness = server) -> list[int]:
                [span] = submit.media
                arrays = read_arrays(span.file, span.arrays)
                found.append((span.digest, {name: array.tobytes() for name, array in arrays.items()}))
                return server.tokenizer.encode("A cat", add_special_tokens=False)

            server.engine.script = watch
            assert images_asked(server, part(data_url(file.getvalue()))).status_code == 200
            assert (len(os.listdir(f"/proc/{pids.all[-1]}/task")) > MANY_THREADS - 1) is (number > 1)
        finally:
            server.close()
    assert found[0] == found[1]
    assert len(found[0][1]["patches"]) > 10_000


def test_so_many_processes_wait_for_owners_as_may_work() -> None:
    """The longest waiting one ends for the next; those for anyone are counted apart, and go to any owner."""
    server = object.__new__(ForkServer)
    server._waiting = deque()
    server._end = type("", (), {"alive": True})()  # type: ignore[assignment]
    ends = {owner: socketpair() for owner in (None, "a", "b", "c")}
    for owner, (ours, _) in ends.items():
        server.put_back(ours, 2, owner)
    assert [owner for owner, _ in server._waiting] == [None, "b", "c"]
    assert ends["a"][1].recv(1) == b""
    assert server.take_waiting("b") is ends["b"][0]
    assert server.take_waiting("a") is ends[None][0]
    assert server.take_waiting("a") is None
    assert server.take_waiting("c") is ends["c"][0]
    for pair in ends.values():
        for each in pair:
            each.close()
