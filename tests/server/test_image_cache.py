"""Images that are kept: decoded once, within bytes, in equal shares, and never in the place of another."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from seeing_server import CAT, DOG, SeeingHarness, data_url, part, write_seeing_model

from dovetail.processing.images import PreparedImage
from dovetail_server.media import cache as module
from dovetail_server.media.cache import ImageCache
from dovetail_server.media.folder import KEPT, MediaFolder

A, B, C = (("", bytes([name])) for name in b"abc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "ENTRY_BYTES", 0)
    return tmp_path


def make(folder: Path, name: str, size: int = 100) -> PreparedImage:
    (folder / name).write_bytes(name.encode()[:1] * size)
    return PreparedImage(width=1, height=1, digest=b"d" * 32, file=str(folder / name), arrays=())


def kept(folder: Path) -> int:
    return len(list((folder / KEPT).iterdir()))


def test_what_was_made_is_found_under_names_of_its_own(folder: Path) -> None:
    """A request's file is its own to remove; what is kept and what others found stay."""

    async def run() -> None:
        cache = ImageCache(folder, 1000)
        assert await cache.find(A, "1-") is None
        cache.end(A, "x", image := make(folder, "1-0"))
        Path(image.file).unlink()
        found = [await cache.find(A, "2-"), await cache.find(A, "3-")]
        paths = [Path(each.file) for each in found if each is not None]
        assert [path.name[:2] for path in paths] == ["2-", "3-"]
        paths[0].unlink()
        assert paths[1].read_bytes() == b"1" * 100
        assert await cache.find(A, "4-") is not None
        assert await cache.find(("root", A[1]), "5-") is None  # of a caller that shares nothing
        assert cache.num_found == 3

    asyncio.run(run())


def test_one_makes_what_many_want(folder: Path) -> None:
    """Whoever comes meanwhile waits; where it fails, or its client leaves, exactly one other tries."""

    async def run() -> None:
        cache = ImageCache(folder, 1000)
        assert await cache.find(A, "1-") is None
        others = [asyncio.create_task(cache.find(A, f"{at}-")) for at in range(2, 12)]
        await asyncio.sleep(0)
        others[0].cancel()
        cache.end(A, "x", None)
        done, pending = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        while not any(not task.cancelled() and task.result() is None for task in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        cache.end(A, "y", make(folder, "2-0"))
        await asyncio.gather(*pending)
        assert sum(task.result() is None for task in others[1:]) == 1
        assert cache.num_found == 8
        assert await cache.find(B, "1-") is None  # another image is no matter of theirs

    asyncio.run(run())


def test_who_brings_much_pushes_out_images_of_its_own(folder: Path) -> None:
    """Bytes are bounded, and the images of an owner that is quiet stay."""

    async def run() -> None:
        cache = ImageCache(folder, 1000)

        async def brings(owner: str, name: int, size: int = 100) -> bool:
            key = ("", b"%d" % name)
            if await cache.find(key, "j-") is not None:
                return False
            cache.end(key, owner, make(folder, f"m{name}", size))
            return True

        assert await brings("quiet", 0)
        assert await brings("quiet", 1)
        for name in range(2, 40):
            assert await brings("loud", name)
            assert kept(folder) <= 10
        assert kept(folder) == 10  # to the last byte
        assert not await brings("quiet", 0)
        assert not await brings("quiet", 1)
        assert not await brings("loud", 39)
        assert await brings("loud", 2)
        before = kept(folder)
        assert await brings("loud", 99, size=2000)  # is not kept, and nothing went for it
        assert kept(folder) == before

    asyncio.run(run())


def test_a_file_that_is_gone_is_made_again(folder: Path) -> None:
    """What somebody removed from the folder is no entry any more."""

    async def run() -> None:
        cache = ImageCache(folder, 150)
        for name in ("1-0", "2-0"):
            assert await cache.find(A, "1-") is None
            cache.end(A, "x", make(folder, name))
            next(folder.glob(f"{KEPT}/*")).unlink()
        assert await cache.find(A, "1-") is None
        cache.end(A, "x", make(folder, "3-0"))
        assert await cache.find(A, "4-") is not None

    asyncio.run(run())


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingHarness]:
    harness = SeeingHarness(write_seeing_model(tmp_path_factory.mktemp("sees")), context_len=4096)
    yield harness
    harness.close()


def ask(server: SeeingHarness, *content: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(content)}], **fields}
    return server.post("/v1/chat/completions", body)


def square(colour: int) -> str:
    """The URL of an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (colour, 1, 2)).save(file, "PNG")
    return data_url(file.getvalue())


def num_found(server: SeeingHarness) -> int:
    assert server.state.image_cache is not None
    return server.state.image_cache.num_found


def test_many_requests_at_once_decode_an_image_once(seeing: SeeingHarness) -> None:
    """24 requests with one image: one process decodes it, all get the same digest in files of their own."""
    seeing.reset()
    before = num_found(seeing)
    with ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(lambda at: ask(seeing, {"type": "text", "text": f"{at}"}, part()), range(24)))
    assert [reply.status_code for reply in replies] == [200] * 24
    assert num_found(seeing) - before == 23
    spans = [submit.media[0] for submit in seeing.engine.submits]
    assert len({span.digest for span in spans}) == 1
    assert len({span.file for span in spans}) == 24


def test_a_later_turn_decodes_nothing(seeing: SeeingHarness) -> None:
    """The images of a conversation are found, also where a body names one twice; a salt and other bytes are others."""
    seeing.reset()
    assert ask(seeing, part(CAT), part(DOG)).status_code == 200
    before = num_found(seeing)
    assert ask(seeing, part(DOG), part(CAT), part(DOG)).status_code == 200
    assert num_found(seeing) - before == 2
    again = seeing.engine.submits[-1].media
    assert ["found-" in span.file for span in again] == [True] * 3  # what was found is what the engine gets
    assert ask(seeing, part(CAT), cache_salt="mine").status_code == 200
    assert ask(seeing, part(CAT), cache_salt="yours").status_code == 200
    assert num_found(seeing) - before == 2
    assert ask(seeing, part(CAT), cache_salt="mine").status_code == 200
    assert num_found(seeing) - before == 3
    first, *_, last = (submit.media for submit in seeing.engine.submits)
    assert first[0].digest == last[0].digest


def test_a_request_finds_an_image_and_makes_two_hundred(tmp_path: Path) -> None:
    """No file of what it finds has the name of one that it makes, whatever their numbers."""
    server = SeeingHarness(write_seeing_model(tmp_path), context_len=4096, limit_mm_per_prompt={"image": 500})
    try:
        assert ask(server, part()).status_code == 200
        reply = ask(server, part(), *(part(square(at)) for at in range(200)))
        assert reply.status_code == 200, reply.text
    finally:
        server.close()


def test_what_cannot_be_decoded_is_not_kept(seeing: SeeingHarness) -> None:
    """A broken image is refused each time, and nobody waits for it."""
    broken = {"type": "image_url", "image_url": {"url": CAT[:60]}}
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: ask(seeing, broken), range(6)))
    assert [reply.status_code for reply in replies] == [400] * 6


def test_nothing_is_kept_where_nothing_may_be(tmp_path: Path) -> None:
    """With 0 bytes each request decodes its images."""
    server = SeeingHarness(write_seeing_model(tmp_path / "sees"), context_len=4096, image_cache_bytes=0)
    try:
        assert [ask(server, part()).status_code for _ in range(2)] == [200, 200]
        assert server.state.image_cache is None
    finally:
        server.close()


def test_a_job_looks_through_no_kept_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tens of thousands it would hold up the event loop; their folder stays, however long nothing is kept."""
    monkeypatch.setattr(module, "ENTRY_BYTES", 0)
    folder = MediaFolder(tmp_path)

    async def run() -> None:
        cache = ImageCache(folder.path, 1000)
        assert await cache.find(A, "1-") is None
        cache.end(A, "x", make(folder.path, "1-0"))
        folder.forget("1-")
        assert sorted(path.name for path in folder.path.iterdir()) == [KEPT, "lock"]
        os.utime(folder.path / KEPT, (0, 0))
        folder.sweep()
        assert await cache.find(A, "2-") is not None

    asyncio.run(run())
    folder.close()
