"""Decoded images on their way: bounds of memory, files that go, and turns while images are fetched."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from pathlib import Path

import pytest
from PIL import Image
from seeing_server import (
    CAT,
    SeeingHarness,
    ask,
    data_url,
    files_in,
    part,
    submitted,
)

from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.media import folder as media_folder
from dovetail_server.media.folder import MediaFiles, MediaFolder
from dovetail_server.media.rules import MediaAnswer, MediaFetched, MediaQuestion
from dovetail_server.reading.media import MAX_WAITING_FETCHES, MediaExchange
from dovetail_server.reading.turns import Turns


def test_a_large_image(server: SeeingHarness) -> None:
    """A body that goes to another process at once; many pixels become few."""
    noise = io.BytesIO()
    Image.effect_noise((700, 500), 80).convert("RGB").save(noise, "PNG")
    reply = ask(server, part(data_url(noise.getvalue())))
    assert reply.status_code == 200, reply.text
    assert submitted(server).media[0].num <= 100


def test_a_bomb(server: SeeingHarness) -> None:
    """Pixels beyond the limit are refused, and what fits the limit fits the process's memory."""
    file = io.BytesIO()
    Image.new("RGBA", (8192, 8192), (1, 2, 3, 4)).save(file, "PNG", compress_level=1)
    assert ask(server, part(data_url(file.getvalue()))).status_code == 200
    file = io.BytesIO()
    Image.new("1", (16384, 8192)).save(file, "PNG")
    error = ask(server, part(data_url(file.getvalue()))).json()["error"]
    assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[0]")


def test_a_client_that_leaves(server: SeeingHarness) -> None:
    """No file stays of what nobody waits for."""
    server.engine.delay_s = 5.0
    with pytest.raises(Exception, match="timed out"):
        server.http.post(
            f"{server.base}/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": [part(CAT)]}]},
            timeout=1.0,
        )
    server.eventually(lambda: files_in(server) == [])


def test_a_folder_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    """The next one does it; a living server's stays."""
    living, other = MediaFolder(tmp_path), tmp_path / "dovetail-media-old"
    other.mkdir()
    (other / "lock").touch()
    (other / "1-0").write_bytes(b"x")
    third = MediaFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, third.path])
    assert living.path.stat().st_mode & 0o777 == 0o700
    living.close()
    third.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("least", "writable", "is_memory"), [(0, True, True), (1 << 62, True, False), (0, False, False)]
)
def test_arrays_lie_in_memory_where_they_may(
    least: int, writable: bool, is_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory file system that is small, or may not be written, is left to others."""
    memory, other = tmp_path / "memory", tmp_path / "other"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(media_folder, "MEMORY", memory)
    monkeypatch.setattr(media_folder, "MIN_BYTES", least + 1)
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    monkeypatch.setattr(os, "access", lambda path, mode: writable)  # whoever is root may write everywhere
    folder = MediaFolder()
    assert folder.path.parent == (memory if is_memory else other)
    folder.close()


def test_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    """A request's files stay for as long as it does; what is left behind goes later."""
    folder = MediaFolder(tmp_path)
    held, left = folder.path / "1-0", folder.path / "1-1"
    held.touch()
    left.touch()
    files = MediaFiles([str(held)])
    folder.sweep()
    assert left.exists()
    folder.sweep(age_s=-1)
    assert (held.exists(), left.exists()) == (True, False)
    files.close()
    assert not held.exists()
    folder.close()


def test_fetching_takes_no_turn() -> None:
    """While images are fetched others compute; so many fetch, and beyond those of an owner that wait it is a 429."""

    async def run() -> None:
        turns, fetches = Turns(1), Turns(1)
        question = MediaQuestion(files=[], fetches=True)
        async with turns.turn("a", is_background=False) as turn:
            exchange = MediaExchange(fetches, turn, None)
            assert await exchange.answer(question) == MediaAnswer([])
            async with turns.turn("b", is_background=False) as other:
                second = MediaExchange(fetches, other, None)
                waits = asyncio.create_task(second.answer(question))
                await asyncio.sleep(0)
                assert not waits.done()
                assert await exchange.answer(MediaFetched()) == MediaAnswer([])
                await waits
                second.close()
            exchange.close()
        async with turns.turn("c", is_background=False) as turn:
            crowd = [asyncio.create_task(fetches.turn("c", is_background=False).__aenter__()) for _ in range(100)]
            await asyncio.sleep(0)
            with pytest.raises(ServiceError, match="try again later") as found:
                await MediaExchange(fetches, turn, None).answer(question)
            assert found.value.status == 429
            assert fetches.has_room("d", MAX_WAITING_FETCHES)  # another's may wait all the same
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(run())
