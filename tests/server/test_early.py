"""The beginning of a long prompt goes to the engine while the rest is tokenized, and no reply tells the difference."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from harness import Harness
from msgspec import structs
from pydantic import SecretStr
from seeing_server import PAD, SeeingHarness, part, write_seeing_model
from server_tiny import write_model
from test_key_limits import ALICE, as_key, entry, write
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.contracts.errors import EngineDeadError
from dovetail.messages import Finish, Submit, TokenDelta
from dovetail_server.errors.catalogue import draining
from dovetail_server.http.auth import owner_name
from dovetail_server.reading.work import MOST_EARLY
from dovetail_server.serving.early import EarlyPrefill

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "some words of a text " * 5000
"""As many tokens as characters."""
CONTEXT, CHUNK = 1 << 18, 8192


def write_cuttable(folder: Path) -> Path:
    """Write a model folder whose tokenizer takes texts in pieces."""
    return cuttable(write_model(folder))


def cuttable(folder: Path) -> Path:
    """Have a model folder's tokenizer take texts in pieces."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = write_cuttable(tmp_path_factory.mktemp("cuttable"))
    harness = Harness(
        folder, context_len=CONTEXT, max_prompt_bytes=1 << 24, body_processes=1, resume_key=SecretStr("resume")
    )
    yield harness
    harness.close()


@pytest.fixture
def fresh(server: Harness) -> Harness:
    server.reset()
    return server


def say(text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def go_on(text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, **fields}


def parts(server: Harness) -> tuple[list[Submit], list[Submit]]:
    """What the engine was to compute early, and the requests."""
    submits = server.engine.submits
    return [s for s in submits if s.prefill_only], [s for s in submits if not s.prefill_only]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, say(cache_salt="s", priority=3)),
        (CHAT, say(n=2, stream=True)),
        (CHAT, say(logprobs=True, top_logprobs=2)),
        (TEXT, go_on(echo=True)),
        (TEXT, go_on([WORDS])),
        ("/v1/messages", say(max_tokens=5)),
        ("/generate", {"text": WORDS}),
    ],
    ids=["chat", "choices", "log probabilities", "text", "a list of one", "messages", "generate"],
)
def test_beginnings_are_the_prompts_own(
    path: str, body: dict[str, Any], fresh: Harness, request: pytest.FixtureRequest
) -> None:
    """Ever longer ones, up to a bound, of the same owner, salt and priority; then the request as it always is."""
    name = request.node.callspec.id.split()[0]
    text = WORDS.replace("some", name)  # no other test's: pieces that are known come at once
    body = json.loads(json.dumps(body).replace(WORDS, text))
    reply = fresh.post(path, body)
    assert reply.status_code == 200, reply.text[:300]
    early, asked = parts(fresh)
    assert asked
    for before, after in zip(early, [*early[1:], asked[0]], strict=True):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
        assert after is asked[0] or len(after.prompt_ids) >= 2 * len(before.prompt_ids)
    kept = ("cache_salt", "owner", "weight", "priority", "timeout_s")
    assert all(getattr(one, name) == getattr(asked[0], name) for one in early for name in kept)
    assert 0 < len(early[0].prompt_ids) <= len(early[-1].prompt_ids) <= MOST_EARLY
    assert not fresh.engine.live


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, say("x" * (1 << 17))),
        (CHAT, say(WORDS[:60_000])),
        (TEXT, go_on([WORDS, "b"])),
        (TEXT, go_on(WORDS, truncate_prompt_tokens=50)),
        (TEXT, go_on(WORDS, echo=True, logprobs=1)),
        (TEXT, go_on([65] * 40_000)),
        ("/generate", {"text": WORDS, "return_logprob": True, "logprob_start_len": 0}),
        ("/tokenize", go_on()),
    ],
    ids=["no cuts", "short", "two", "cut", "log probabilities", "ids", "from the start", "no generation"],
)
def test_nothing_is_computed_that_is_not_the_prompts_beginning(path: str, body: dict[str, Any], fresh: Harness) -> None:
    """Short bodies, texts in one piece, and whatever is not computed from its first token as it was tokenized."""
    reply = fresh.post(path, json.loads(json.dumps(body).replace(WORDS, f"{path} {sorted(body)} {WORDS}")))
    assert reply.status_code == 200, reply.text[:300]
    assert not parts(fresh)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_turns_out_too_long_is_refused_as_ever(stream: bool, fresh: Harness) -> None:
    """With 400 and the number of its tokens, before any event; what was computed early is aborted."""
    fresh.engine.hold.clear()
    text = f"{stream} " + "many more words " * (CONTEXT // 10)
    reply = fresh.post(TEXT, go_on(text, stream=stream))
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert (reply.json()["error"]["code"], str(len(text)) in reply.text) == ("context_length_exceeded", True)
    fresh.eventually(lambda: not fresh.engine.live)
    early, asked = parts(fresh)
    assert (len(early) > 0, asked) == (True, [])
    assert fresh.engine.aborted == [""] * len(early)


def weigh(server: Harness, monkeypatch: pytest.MonkeyPatch, weight_bytes: int) -> None:
    """Have the engine tell of steps of 8,192 tokens, each of which reads so many bytes of weights."""
    told = structs.replace(server.engine.info, chunk_size=CHUNK, weight_bytes=weight_bytes)
    monkeypatch.setattr(type(server.engine), "info", property(lambda _: told))


def test_steps_that_cost_much_are_filled(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is worth another step, the prompt takes as many as it does as ids."""
    weigh(fresh, monkeypatch, 1 << 60)
    for num in (100_000, 9 * CHUNK + 10, 9 * CHUNK - 10):  # its beginning may have what the last step lacks
        fresh.reset()
        assert fresh.post(TEXT, go_on((f"filled {num} " + WORDS)[:num])).status_code == 200
        early, [asked] = parts(fresh)
        ends = [0, *(len(one.prompt_ids) for one in early), len(asked.prompt_ids)]
        assert len(ends) > 2
        assert sum(-(-(end - start) // CHUNK) for start, end in pairwise(ends)) == -(-ends[-1] // CHUNK)


def test_one_is_computed_at_a_time(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has all that became known while the engine computed the one before."""
    weigh(fresh, monkeypatch, 0)
    fresh.engine.hold.clear()
    early = EarlyPrefill(fresh.state)

    async def begin(num_calls: int) -> None:
        for _ in range(num_calls):
            early.begin([65] * 1000, 50_000, 0.1, 0, "")

    def on_loop(call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, fresh.loop).result(60)

    on_loop(begin(1))
    fresh.eventually(lambda: len(fresh.engine.live) == 1)
    on_loop(begin(4))
    assert [len(one.prompt_ids) for one in parts(fresh)[0]] == [1000]
    fresh.engine.hold.set()
    fresh.eventually(lambda: [len(one.prompt_ids) for one in parts(fresh)[0]] == [1000, 5000])
    fresh.eventually(lambda: not fresh.engine.live)

    async def end() -> None:
        early.admitted()
        early.close()

    on_loop(end())
    assert len(parts(fresh)[0]) == 2


def test_it_waits_behind_others(fresh: Harness) -> None:
    """While a request waits for its first token, nothing is computed early."""
    fresh.engine.hold.clear()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(requests.post, f"{fresh.base}{TEXT}", json=go_on("hi"), timeout=600)
        fresh.eventually(lambda: len(fresh.engine.live) == 1)
        long = pool.submit(requests.post, f"{fresh.base}{TEXT}", json=go_on("behind " + WORDS), timeout=600)
        fresh.eventually(lambda: len(fresh.engine.live) == 2)
        assert not parts(fresh)[0]
        fresh.engine.hold.set()
        assert [held.result().status_code, long.result().status_code] == [200, 200]


def test_a_client_that_leaves_takes_it_along(fresh: Harness) -> None:
    """What is computed early ends with the connection, whether the request was submitted or not."""
    fresh.engine.hold.clear()
    body = json.dumps(go_on("leaving " + WORDS, stream=True)).encode()
    lines = [
        f"POST {TEXT} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    with socket.create_connection(("127.0.0.1", fresh.port)) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        fresh.eventually(lambda: len(parts(fresh)[1]) == 1)
        assert parts(fresh)[0]
    fresh.eventually(lambda: not fresh.engine.live)


def test_usage_tells_what_was_cached_before(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was computed early for the request itself."""
    early = EarlyPrefill(fresh.state)

    def ended(num_prompt: int, num_cached: int, reason: str = "stop") -> TokenDelta:
        finish = Finish(reason)  # type: ignore[arg-type]
        return TokenDelta(handle=1, ids=[], prompt_tokens=num_prompt, cached_tokens=num_cached, finish=finish)

    for ends, expected in (
        ([], 900),
        ([ended(64, 16)], 16),
        ([ended(64, 64), ended(128, 80)], 80),
        ([ended(64, 64), ended(128, 128)], 900),
        ([ended(64, 0, "abort"), ended(128, 80)], 900),
        ([ended(2000, 1000)], 900),
    ):
        monkeypatch.setattr(early, "_ends", ends)
        assert early.num_cached(900) == expected
    body = go_on("usage " + WORDS)
    reply = fresh.post(TEXT, body).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the scripted engine found 3, but not early
    assert parts(fresh)[0]


def test_usage_of_a_stream_that_goes_on_is_what_it_was(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first server found cached, however much the second one computed early."""
    who = {"x-dovetail-resume-key": "resume", "content-type": "application/json"}

    def body(text: str) -> bytes:  # another one each time: pieces that are known come at once
        return json.dumps(go_on(text + WORDS, stream=True, stream_options={"include_usage": True})).encode()

    def cached(reply: requests.Response) -> int:
        assert reply.status_code == 200, reply.text
        return int(reply.text.rpartition('"cached_tokens":')[2].partition("}")[0])

    with monkeypatch.context() as patch:
        patch.setattr(EarlyPrefill, "_next_end", lambda _: 0)
        first = fresh.http.post(fresh.base + TEXT, data=body("first"), headers=who, timeout=60)
        assert cached(first) == 3
    name, mark = first.headers["x-dovetail-journal"], b": dovetail "
    line = next(part.partition(mark)[2] for part in first.content.split(b"\n\n") if mark in part)
    head = json.dumps({"path": TEXT, "journal": name, "skip": 1})[:-1].encode() + b',"deltas":[' + line + b"]}\n"
    again = fresh.http.post(f"{fresh.base}/v1/resume", data=head + body("again and "), headers=who, timeout=60)
    assert cached(again) == 3
    assert parts(fresh)[0]


@pytest.mark.parametrize(("path", "body"), [(CHAT, say("shown " + WORDS)), (TEXT, go_on("shown " + WORDS))])
def test_a_prompt_that_is_only_shown_is_not_computed(path: str, body: dict[str, Any], fresh: Harness) -> None:
    """The engine hears nothing of it."""
    assert fresh.post(f"{path}/render", body).status_code == 200
    assert fresh.engine.submits == []


def test_it_ends_with_a_reply_that_cannot_be_kept(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the request is refused before it reaches the engine."""

    async def gone() -> Any:
        raise draining()

    monkeypatch.setattr(fresh.state.storage, "get", gone)
    fresh.engine.hold.clear()
    assert fresh.post(CHAT, say("kept " + WORDS, store=True)).status_code == 503
    fresh.eventually(lambda: not fresh.engine.live)
    assert fresh.engine.aborted == [""]


def test_a_keys_limit_holds_for_it(tmp_path: Path) -> None:
    """What was begun for a request that never came counts; for one that came, it does once, as do refusals."""
    keys = write(tmp_path / "keys", entry("alice", ALICE, limits={"input_tokens_per_minute": 300_000}))
    (folder := tmp_path / "model").mkdir()
    server = Harness(write_cuttable(folder), context_len=CONTEXT, max_prompt_bytes=1 << 24, keys_file=keys)
    try:
        usage = server.state.keys.tenant(owner_name(ALICE)).usage

        def status(body: dict[str, Any]) -> int:
            return server.post(TEXT, body, headers=as_key(ALICE)).status_code

        assert status(go_on("many more words " * (CONTEXT // 10))) == 400
        begun = usage.input_tokens
        assert begun == len(parts(server)[0][-1].prompt_ids) > 0
        assert status(go_on("once " + WORDS)) == 200
        assert usage.input_tokens == begun + len(parts(server)[1][0].prompt_ids)
        assert status(go_on([65] * 170_000)) == 200
        server.reset()
        assert status(go_on("over " + WORDS)) == 429
        assert (server.engine.submits, usage.rejected) == ([], {"input_tokens": 1})
    finally:
        server.close()


def test_a_conversation_with_an_image_is_not_begun(tmp_path: Path) -> None:
    """Where the text has its mark, the engine gets other ids; a text for the same model begins."""
    folder = cuttable(write_seeing_model(tmp_path))
    server = SeeingHarness(folder, context_len=CONTEXT, max_prompt_bytes=1 << 24, body_processes=1)
    try:
        for num, content in enumerate(([part()], [])):
            server.reset()
            said = [*content, {"type": "text", "text": f"{num} {WORDS}"}]
            reply = server.post(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": said}]})
            assert reply.status_code == 200, reply.text
            assert len(parts(server)[0]) == num
    finally:
        server.close()


@pytest.mark.parametrize("place", [0, len(WORDS) // 2])
def test_a_mark_that_was_typed_does_not_hide_what_comes_before(tmp_path: Path, place: int) -> None:
    """Such a text is tokenized in parts, of which the first alone is a beginning."""
    server = SeeingHarness(cuttable(write_seeing_model(tmp_path)), context_len=CONTEXT, max_prompt_bytes=1 << 24)
    try:
        assert server.post(CHAT, say(WORDS[:place] + PAD + WORDS)).status_code == 200
        early, [asked] = parts(server)
        assert len(early) == (place > 0)
        assert all(asked.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids for one in early)
    finally:
        server.close()


def test_an_engine_that_dies_is_the_requests_error(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed early fails unheard; the request tells why."""

    def submit(request: Submit, *, every: int = 1) -> Any:
        raise EngineDeadError("gone")

    monkeypatch.setattr(fresh.engine, "submit", submit)
    assert fresh.post(TEXT, go_on("dying " + WORDS)).status_code == 503


def test_without_a_prefix_cache_nothing_is_early(tmp_path: Path) -> None:
    """The request could not find it."""
    harness = Harness(write_cuttable(tmp_path), context_len=CONTEXT, max_prompt_bytes=1 << 24, disable_radix_cache=True)
    try:
        assert harness.post(TEXT, go_on()).status_code == 200
        assert len(harness.engine.submits) == 1
    finally:
        harness.close()
