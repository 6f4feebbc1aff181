"""Images of stored responses, conversations and completions: kept once for their owner, whole when they are read."""

from __future__ import annotations

import base64
import io
import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from seeing_server import SeeingHarness, data_url, part, write_seeing_model

from dovetail_server.storage.images import MIN_BYTES, digests_in, packed, unpacked

KEYS = ["sk-alice-1f6c", "sk-bob-77aa"]
ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS)


def noise(seed: int) -> str:
    """A PNG that does not compress, as a URL."""
    file = io.BytesIO()
    Image.frombytes("RGB", (56, 56), random.Random(seed).randbytes(56 * 56 * 3)).save(file, "PNG")
    return data_url(file.getvalue())


CAT, DOG = noise(1), noise(2)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingHarness]:
    harness = SeeingHarness(
        write_seeing_model(tmp_path_factory.mktemp("sees")),
        context_len=4096,
        api_key=KEYS,
        file_storage_path=tmp_path_factory.mktemp("files"),
        min_free_disk_bytes=0,
    )
    yield harness
    harness.close()


def rows(server: Harness, query: str) -> list[tuple[Any, ...]]:
    assert server.settings.file_storage_path is not None
    with sqlite3.connect(server.settings.file_storage_path / "dovetail.db") as db:
        return db.execute(query).fetchall()


def num_kept(server: Harness) -> tuple[int, int]:
    [(images,)], [(uses,)] = (rows(server, f"SELECT count(*) FROM {name}") for name in ("stored_images", "image_uses"))
    return images, uses


def said(*urls: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url} for url in urls]}]


def respond(server: Harness, given: Any, who: dict[str, str], **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/responses", {"model": "tiny", "input": given, **fields}, headers=who)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def delete(server: Harness, path: str, who: dict[str, str]) -> None:
    assert server.http.delete(f"{server.base}{path}", headers=who).status_code == 200


def test_a_response_holds_an_image_once_however_often_it_is_sent(seeing: SeeingHarness) -> None:
    """Turns that send it again store no more of it; each owner has its own; it goes with the last that has it."""
    first = respond(seeing, said(CAT, CAT), ALICE)
    second = respond(seeing, said(CAT, DOG), ALICE, previous_response_id=first["id"])
    other = respond(seeing, said(CAT), BOB)
    assert num_kept(seeing) == (3, 4)
    assert all(len(items) < MIN_BYTES for (items,) in rows(seeing, "SELECT items FROM responses"))
    assert len(seeing.engine.submits[-2].media) == 4  # what the second one continues has its images
    page = seeing.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}, headers=ALICE).json()
    urls = [[part.get("image_url") for part in item["content"]] for item in page["data"] if item["role"] == "user"]
    assert urls == [[CAT, CAT], [CAT, DOG]]
    item = {"type": "item_reference", "id": page["data"][0]["id"]}
    assert len(respond(seeing, [item], ALICE, store=False)["output"]) == 1
    assert len(seeing.engine.submits[-1].media) == 2
    delete(seeing, f"/v1/responses/{first['id']}", ALICE)
    assert num_kept(seeing) == (3, 3)
    delete(seeing, f"/v1/responses/{second['id']}", ALICE)
    assert num_kept(seeing) == (1, 1)
    third = respond(seeing, "more", BOB, previous_response_id=other["id"])
    assert len(seeing.engine.submits[-1].media) == 1
    for each in (other, third):
        delete(seeing, f"/v1/responses/{each['id']}", BOB)
    assert num_kept(seeing) == (0, 0)


def test_a_conversation_holds_an_image_once(seeing: SeeingHarness) -> None:
    """Items are shown as they came; an item that goes takes its use, and the last one the image."""
    made = seeing.post("/v1/conversations", {"items": [*said(CAT), *said(CAT, DOG)]}, headers=ALICE).json()["id"]
    path = f"/v1/conversations/{made}"
    [(before,)] = rows(seeing, "SELECT bytes FROM conversations")
    respond(seeing, "which?", ALICE, conversation=made, store=False)
    assert len(seeing.engine.submits[-1].media) == 3
    assert num_kept(seeing) == (2, 3)
    found = seeing.get(f"{path}/items", params={"order": "asc"}, headers=ALICE).json()["data"]
    assert [[p.get("image_url") for p in item["content"]] for item in found[:2]] == [[CAT], [CAT, DOG]]
    assert seeing.get(f"{path}/items/{found[1]['id']}", headers=ALICE).json() == found[1]
    [(whole,)] = rows(seeing, "SELECT bytes FROM conversations")
    delete(seeing, f"{path}/items/{found[1]['id']}", ALICE)
    assert num_kept(seeing) == (1, 1)
    [(after,)] = rows(seeing, "SELECT bytes FROM conversations")
    assert whole > before
    assert whole - after == len(json.dumps(found[1], separators=(",", ":")))
    delete(seeing, path, ALICE)
    assert num_kept(seeing) == (0, 0)


def test_a_stored_completion_shows_its_image(seeing: SeeingHarness) -> None:
    """Its messages come back as they were sent."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part(CAT), part(CAT)]}], "store": True}
    made = seeing.post("/v1/chat/completions", body, headers=ALICE).json()["id"]
    assert num_kept(seeing) == (1, 1)
    path = f"/v1/chat/completions/{made}"
    [message] = seeing.get(f"{path}/messages", headers=ALICE).json()["data"]
    assert message["content_parts"] == body["messages"][0]["content"]  # type: ignore[index]
    assert seeing.get(f"{path}/messages", headers=BOB).status_code == 404
    delete(seeing, path, ALICE)
    assert num_kept(seeing) == (0, 0)


def test_a_background_response_keeps_its_image(seeing: SeeingHarness) -> None:
    """It is written twice, and has one use of it, which goes with it."""
    made = respond(seeing, said(CAT), ALICE, background=True)["id"]
    path = f"/v1/responses/{made}"
    seeing.eventually(lambda: seeing.get(path, headers=ALICE).json()["status"] == "completed")
    assert num_kept(seeing) == (1, 1)
    delete(seeing, path, ALICE)
    assert num_kept(seeing) == (0, 0)


def test_what_is_given_up_takes_its_images(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """The oldest conversations and responses beyond the limits go with what they alone had."""
    server = SeeingHarness(
        write_seeing_model(tmp_path / "sees"),
        context_len=4096,
        max_stored_responses=2,
        file_storage_path=tmp_path / "files",
        min_free_disk_bytes=0,
    )
    try:
        for seed in range(6):
            respond(server, said(CAT, noise(seed + 10)), {})
            server.post("/v1/conversations", {"items": said(noise(seed + 10))})
        [(num,)] = rows(server, "SELECT count(*) FROM responses")
        assert num <= 3
        images, uses = num_kept(server)
        assert uses == 2 * num + 2
        assert images == num + 1
    finally:
        server.close()


@given(
    st.lists(st.one_of(st.text(max_size=9), st.just("u" * 2000), st.just('data:"\\'), st.integers(0, 2)), max_size=9)
)
def test_packing_is_undone_whatever_stands_around(parts: list[Any]) -> None:
    """JSON with images, texts that look like them, and escapes is what it was; what was packed is short."""
    urls = [f"data:image/png;base64,{base64.b64encode(bytes([at]) * 900).decode()}" for at in range(3)]
    value = [
        {"url": urls[each], "said": json.dumps({"x": urls[each]})} if isinstance(each, int) else each for each in parts
    ]
    for ascii_only in (False, True):
        data = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        short, found = packed(data)
        assert unpacked(short, found) == data
        assert digests_in(short) == set(found)
        assert bool(found) == any(isinstance(each, int) for each in parts)
        assert len(short) < len(data) or not found
