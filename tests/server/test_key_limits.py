"""Keys of a file: their limits, their use, and what becomes of the file."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from exchanges import error_of
from harness import Harness

from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.messages import BACKGROUND
from dovetail_server.cli.hash_key import main as hash_key
from dovetail_server.errors.catalogue import ServiceError, to_reply
from dovetail_server.gateway.fan_out import FanOut
from dovetail_server.http.auth import CALLER, Keys, owner_name
from dovetail_server.serving.common import service_of
from dovetail_server.tenants.keys_file import KeysFileWatch, Limits, PriorityRange, key_hash, read_keys_file
from dovetail_server.tenants.tenant import Grant, Tenant, duration

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ALICE, BOB, BOSS = "sk-alice", "sk-bob", "sk-boss"


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def entry(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "hash": f"sha256:{key_hash(key)}", **more}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    """Write a file of keys: JSON is YAML, too."""
    path.write_text(json.dumps({"keys": entries}, indent=1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: expected `keys:` and a list of keys"),
        (
            "keys:\n  - name: a\n    hash: HASH\n    weight: 0\n",
            "line 4: keys[0].weight should be greater than or equal",
        ),
        ("keys:\n- name: a\n  hash: HASH\n  limits:\n    request: 3\n", "line 5: keys[0].limits.request is no field"),
        ("keys:\n- name: a\n  hash: HASH\n  limits:\n    requests: x\n", "line 5: keys[0].limits.requests should be a"),
        ("keys:\n- name: a\n  hash: HASH\n  roles: [root]\n", "line 4: keys[0].roles[0] should be 'user' or 'admin'"),
        ("keys:\n- {name: a, hash: HASH}\n- {name: b, hash: HASH}\n", "line 3: keys[1].hash another key has it, too"),
        ("keys:\n- name: a\n  name: b\n  hash: HASH\n", "line 3: 'name' is given twice"),
        ("a: &x [1]\nb: *x\n", "line 2: YAML's aliases (*name) are not taken"),
        ("keys:\n- ? [a]\n  : b\n", "line 2: the name of a field is no text"),
        ("keys:\n- {? {a: b} : c}\n", "line 2: the name of a field is no text"),
        ("keys: []\n---\nkeys: []\n", "line 2: a second document begins"),
        ('keys:\n- {name: a, hash: HASH, "\\e[1m\\n": 1}\n', r"line 2: keys[0].'\x1b[1m\n' is no field"),
        ("keys: [" + "x," * 100_000 + "]", "line 1: keys[0] should be a valid dictionary"),
        ("keys:\n  - name: [\n", "line 3: not valid YAML"),
        ("keys:\n- hash: abc\n", "line 2: keys[0].name field required"),
        ("keys:\n- name: a\n  hash: sk-secret\n", "line 3: keys[0].hash string should match pattern"),
        ("[" * 100_000, "line 1: is nested too deeply"),
    ],
)
def test_a_fault_of_the_file_is_told_by_line_and_field(tmp_path: Path, text: str, why: str) -> None:
    """In one line, which repeats no value: it may be a key."""
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("HASH", f"sha256:{key_hash(ALICE)}"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_keys_file(path)
    assert why in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever opens one waits for somebody who writes: a start, or for ever the thread that reads a changed file."""
    path = tmp_path / "keys.yaml"
    os.mkfifo(path, 0o600)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read_keys_file, path)
        try:
            error = reading.exception(timeout=30)
        finally:
            os.close(os.open(path, os.O_RDWR))  # lets a reader go that waits
    assert "is no file" in str(error)


def test_ten_thousand_keys_are_read_within_two_seconds(tmp_path: Path) -> None:
    """As the page says of a changed file; one that is as long and at fault is, too."""
    entries = [{"name": f"k{i}", "hash": f"sha256:{i:064x}", "limits": {"requests": 3}} for i in range(10_000)]
    path = write(tmp_path / "keys.yaml", *entries)
    began = time.process_time()
    assert len(read_keys_file(path)) == 10_000
    assert time.process_time() - began < 2


def test_a_file_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    """Whoever may write to it could give themselves a key."""
    path = write(tmp_path / "keys.yaml", entry("a", ALICE))
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        read_keys_file(path)


def test_the_command_prints_what_the_file_has(monkeypatch: Any, capsys: Any) -> None:
    """The hash of a key on standard input, or of a new one; files follow a key from --api-key into the file."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ALICE}\n"))
    assert hash_key([]) == 0
    assert capsys.readouterr().out == f"hash: sha256:{key_hash(ALICE)}\n"
    assert owner_name(ALICE) == "key-" + key_hash(ALICE)[:40]
    assert hash_key(["--new"]) == 0
    key, digest = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert digest == f"sha256:{key_hash(key)}"
    assert hash_key(["sk-on-a-command-line"]) == 2
    assert "sk-on" not in capsys.readouterr().err


def test_a_changed_file_holds_and_a_broken_one_does_not(tmp_path: Path, caplog: Any) -> None:
    """Keys come, go and change without a restart; what cannot be read is logged, counted, and changes nothing."""
    path = write(tmp_path / "keys.yaml", entry("a", ALICE))
    keys = Keys(file=path)
    assert keys.watch is not None
    keys.watch = watch = KeysFileWatch(path, keys._use, every_s=0.001)

    async def changed(change: Callable[[], object], until: Callable[[], bool]) -> None:
        following = asyncio.create_task(watch.follow())
        change()
        async with asyncio.timeout(30):
            while not until():
                await asyncio.sleep(0.001)
        following.cancel()

    def knows(key: str) -> bool:
        return keys.identify(key.encode()) is not None

    tenant = keys.tenant(owner_name(ALICE))
    more = entry("a", ALICE, limits={"requests": 3}), entry("b", BOB)
    asyncio.run(changed(lambda: write(path, *more), lambda: knows(BOB)))
    assert tenant.grant.limits.requests == 3
    asyncio.run(changed(lambda: path.write_text("keys: 3"), lambda: watch.num_failures == 1))
    assert not watch.is_current
    assert "stay in force" in caplog.text
    assert knows(ALICE)
    assert knows(BOB)
    asyncio.run(changed(lambda: write(path, entry("b", BOB)), lambda: watch.is_current))
    assert not knows(ALICE)
    assert knows(BOB)


def test_roles_say_who_is_an_admin(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """With a file, admin routes are for its admins; everything else is for all its keys, and for nobody else."""
    file = write(tmp_path / "keys.yaml", entry("a", ALICE), entry("boss", BOSS, roles=["user", "admin"]))
    harness = make_harness(keys_file=file)
    assert harness.get("/v1/models").status_code == 401
    codes = {key: harness.post("/flush_cache", headers=as_key(key)).status_code for key in (ALICE, BOSS)}
    assert codes == {ALICE: 403, BOSS: 200}
    assert harness.post(CHAT, BODY, headers=as_key(ALICE)).status_code == 200


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def refusal(tenant: Tenant, *args: int) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        tenant.check(*args)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_tokens_of_a_minute_come_back_little_by_little() -> None:
    """Input is charged before, output as it comes; a request larger than a minute's waits until all are there."""
    clock = Clock()
    tenant = Tenant(owner_name(ALICE), clock)
    limits = Limits(input_tokens_per_minute=600, output_tokens_per_minute=60)
    tenant.take(Grant(name="alice", limits=limits))
    tenant.check(1, 500)
    tenant.began(1, 500)
    assert refusal(tenant, 1, 200).retry_after_s == 10
    assert "input tokens a minute, and has 100 left of 200 needed" in str(refusal(tenant, 1, 200))
    clock.now += 10
    tenant.check(1, 200)
    tenant.generated(90)
    assert refusal(tenant, 1, 1).retry_after_s == 31
    clock.now += 31
    tenant.check(1, 1)
    assert (refusal(tenant, 1, 5000).retry_after_s or 0) > 1
    clock.now += 60
    tenant.check(1, 5000)
    tenant.began(1, 5000)
    assert dict(tenant.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    assert tenant.usage.rejected == {"input_tokens": 3, "output_tokens": 1}
    tenant.take(Grant(limits=Limits(input_tokens_per_minute=60_000)))
    tenant.check(1, 50_000)  # what was used before stays used, of the new limit


def test_output_beyond_a_minutes_is_a_debt() -> None:
    """What runs when nothing is left goes on; nothing new begins until it is paid back: the rate is kept on average."""
    now = [0.0]
    tenant = Tenant("key-0", lambda: now[0])
    tenant.take(Grant(limits=Limits(output_tokens_per_minute=60)))
    num_generated = 0
    for second in range(3600):
        now[0] = float(second)
        try:
            tenant.check()
        except ServiceError:
            continue
        for _ in range(4):  # at once, each as long as it may be
            tenant.check()
            tenant.began(1, 1)
        for _ in range(4):
            tenant.generated(100)
            tenant.ended(1, 1)
            num_generated += 100
    assert num_generated <= 60 * 60 + 60 + 4 * 100
    assert num_generated >= 60 * 60 - 4 * 100


def test_times_are_written_as_openai_writes_them() -> None:
    """Of `x-ratelimit-reset-*`."""
    assert [duration(s) for s in (0, 0.0005, 0.85, 1, 6.5, 60, 60.5)] == [
        "0s",
        "1ms",
        "850ms",
        "1s",
        "6.5s",
        "1m0s",
        "1m0.5s",
    ]


def test_a_key_with_limits_is_told_what_it_has_left(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """In headers of each reply; beyond, 429 with the time to wait, before the body is read. Others are served."""
    limits = {"requests": 2, "input_tokens_per_minute": 40, "output_tokens_per_minute": 1000}
    harness = make_harness(keys_file=write(tmp_path / "keys.yaml", entry("a", ALICE, limits=limits), entry("b", BOB)))
    reply = harness.post(CHAT, BODY, headers=as_key(ALICE))
    assert reply.status_code == 200
    num = reply.json()["usage"]["prompt_tokens"]
    found = {name: value for name, value in reply.headers.items() if name.startswith("x-ratelimit")}
    assert found.pop("x-ratelimit-reset-tokens").endswith("s")
    assert found.pop("x-ratelimit-remaining-requests") in ("1", "2")
    assert int(found.pop("x-ratelimit-remaining-tokens")) in (40 - num, 41 - num)
    assert found == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-reset-requests": "0s",
        "x-ratelimit-limit-tokens": "40",
    }
    while (reply := harness.post(CHAT, BODY, headers=as_key(ALICE))).status_code == 200:
        pass
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert "the key 'a' may use 40 input tokens a minute" in error["message"]
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    reply = harness.post(CHAT, BODY, headers=as_key(BOB))
    assert reply.status_code == 200
    assert not any(name.startswith("x-ratelimit") for name in reply.headers)


def test_requests_at_once_and_use_are_counted_by_key(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """`/v1/usage` tells a key its own, the admin's everybody's; metrics name a key by the beginning of its hash."""
    limited = entry("a", ALICE, limits={"requests": 2})
    file = write(tmp_path / "keys.yaml", limited, entry("b", BOB), entry("boss", BOSS, roles=["admin"]))
    harness = make_harness(keys_file=file)
    assert harness.post(CHAT, BODY, headers=as_key(BOB)).status_code == 200
    harness.engine.hold.clear()
    threads = [
        threading.Thread(target=harness.post, args=(CHAT, BODY), kwargs={"headers": as_key(ALICE)}) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    harness.eventually(lambda: harness.state.num_live == 2)
    reply = harness.post(CHAT, BODY, headers=as_key(ALICE))
    assert reply.status_code == 429
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    harness.engine.hold.set()
    for thread in threads:
        thread.join(60)
    harness.eventually(lambda: harness.state.num_live == 0)
    (own,) = harness.get("/v1/usage", headers=as_key(ALICE)).json()["data"]
    assert (own["name"], own["key"]) == ("a", owner_name(ALICE)[:16])
    assert (own["requests"], own["rejected"], own["limits"]["requests"]) == (2, {"requests": 1}, 2)
    assert own["input_tokens"] > 0
    assert own["output_tokens"] > 0
    rows = harness.get("/v1/usage", headers=as_key(BOSS)).json()["data"]
    assert {row["name"] for row in rows} == {"a", "b", "boss"}
    text = harness.get("/metrics", headers=as_key(BOSS)).text
    assert f'dovetail_key_requests_total{{key="{owner_name(ALICE)[:16]}"}} 2.0' in text
    assert f'dovetail_key_rejected_requests_total{{key="{owner_name(ALICE)[:16]}",limit="requests"}} 1.0' in text
    assert "dovetail_keys_file_current 1.0" in text


@pytest.mark.parametrize("prompts", [["hi"], ["hi"] * 2])
def test_choices_of_one_request_are_within_its_keys_limit(
    make_harness: Callable[..., Harness], tmp_path: Path, prompts: list[str]
) -> None:
    """It took any number while the key had nothing else running. Other keys take as many as before."""
    limited = entry("a", ALICE, limits={"requests": 2})
    harness = make_harness(keys_file=write(tmp_path / "keys.yaml", limited, entry("b", BOB)))
    body = {"prompt": prompts, "max_tokens": 1}
    fits = {**body, "n": 2 // len(prompts)}
    assert harness.post("/v1/completions", fits, headers=as_key(ALICE)).status_code == 200
    more = {**body, "n": 3}
    reply = harness.post("/v1/completions", more, headers=as_key(ALICE))
    assert (reply.status_code, error_of(reply)["param"]) == (400, "n")
    assert "the key 'a' may have 2 requests at once" in reply.text
    assert harness.post("/v1/completions", more, headers=as_key(BOB)).status_code == 200


def test_reasons_that_name_places_are_for_admins(make_harness: Callable[..., Harness]) -> None:
    """Others are told what does not work, not where: by probes and by errors alike."""
    harness = make_harness(api_key=[ALICE], admin_api_key=BOSS)
    harness.engine.dead = "killed in /srv/models"
    found = {key: harness.get("/readyz", headers=as_key(key)).json()["reason"] for key in (ALICE, BOSS)}
    assert found == {ALICE: "engine dead", BOSS: "engine dead: killed in /srv/models"}
    error = ServiceError("no worker is ready", code="no_worker", detail="http://10.0.0.1 is away")
    told = [bytes(to_reply(error, is_admin=is_admin).body) for is_admin in (False, True)]
    assert [b"10.0.0.1" in body for body in told] == [False, True]
    assert "10.0.0.1" in str(error)


def test_a_gateway_adds_up_what_its_workers_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's use is that of all workers; a refusal of one is the answer."""

    def row(key: str, num: int, **rejected: int) -> dict[str, Any]:
        counts = dict.fromkeys(("requests", "running_requests", "input_tokens", "output_tokens"), num)
        return {"key": key, "name": key, **counts, "rejected": rejected, "limits": {"requests": 9}}

    replies: dict[int, tuple[int, bytes, str]] = {
        i: (200, json.dumps({"data": rows}).encode(), "application/json")
        for i, rows in enumerate(([row("a", 1, requests=2), row("b", 5)], [row("a", 10, requests=3, input_tokens=1)]))
    }
    fan = FanOut(SimpleNamespace(fleet=SimpleNamespace(ready=list)))  # type: ignore[arg-type]

    async def ask_all(*_: Any) -> Any:
        return replies

    monkeypatch.setattr(fan, "_ask_all", ask_all)
    found = json.loads(bytes(asyncio.run(fan.usage(SimpleNamespace())).body))  # type: ignore[arg-type]
    assert found["data"] == [row("a", 11, requests=5, input_tokens=1), row("b", 5)]
    replies[2] = (401, b"no", "text/plain")
    assert asyncio.run(fan.usage(SimpleNamespace())).status_code == 401  # type: ignore[arg-type]


def test_a_full_queue_has_room_for_each_keys_share(make_harness: Callable[..., Harness]) -> None:
    """One key fills it, another is served all the same, up to its half; then it is full for both."""
    harness = make_harness(api_key=[ALICE, BOB], max_running_requests=1, max_queued_requests=3)
    harness.engine.hold.clear()

    def send(key: str) -> threading.Thread:
        before = harness.state.num_live
        thread = threading.Thread(target=harness.post, args=(CHAT, BODY), kwargs={"headers": as_key(key)})
        thread.start()
        harness.eventually(lambda: harness.state.num_live == before + 1)
        return thread

    threads = [send(ALICE) for _ in range(4)]
    assert harness.post(CHAT, BODY, headers=as_key(ALICE)).status_code == 429
    threads += [send(BOB) for _ in range(2)]
    codes = [harness.post(CHAT, BODY, headers=as_key(key)).status_code for key in (ALICE, BOB)]
    assert codes == [429, 429]
    harness.engine.hold.set()
    for thread in threads:
        thread.join(60)


def test_priority_is_a_right_of_the_key(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """With several keys nobody passes others by it, but whom the file allows to; work in no hurry is everybody's."""
    high = entry("b", BOB, limits={"priority": {"max": 5}})
    harness = make_harness(keys_file=write(tmp_path / "keys.yaml", entry("a", ALICE), high))
    codes = {
        (key, priority): harness.post(CHAT, {**BODY, "priority": priority}, headers=as_key(key)).status_code
        for key, priority in ((ALICE, 1), (ALICE, 0), (ALICE, -3), (ALICE, BACKGROUND), (BOB, 5), (BOB, 6))
    }
    assert list(codes.values()) == [403, 200, 200, 200, 200, 403]
    reply = harness.post("/v1/embeddings", {"model": "tiny", "input": "a", "priority": 100}, headers=as_key(ALICE))
    assert error_of(reply)["code"] == "priority_not_allowed"
    assert make_harness(api_key=[ALICE]).post(CHAT, {**BODY, "priority": 9}, headers=as_key(ALICE)).status_code == 200
    two = make_harness(api_key=[ALICE, BOB], admin_api_key=BOSS)
    codes_of_two = [two.post(CHAT, {**BODY, "priority": 9}, headers=as_key(k)).status_code for k in (ALICE, BOSS)]
    assert codes_of_two == [403, 200]


def test_a_key_is_told_its_own_use_when_there_is_no_room(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """The 507 names what the key's own files hold, of its limit and of the server's, never what others have."""
    file = write(tmp_path / "keys.yaml", entry("a", ALICE, limits={"file_bytes": 1000}), entry("b", BOB))
    harness = make_harness(
        keys_file=file, file_storage_path=tmp_path / "files", min_free_disk_bytes=0, max_storage_bytes=3000
    )

    def upload(key: str, num: int) -> Any:
        data = {"file": ("in.txt", b"x" * num)}
        return harness.post("/v1/files", None, files=data, data={"purpose": "user_data"}, headers=as_key(key))

    assert upload(ALICE, 400).status_code == 200
    reply = upload(ALICE, 900)
    assert reply.status_code == 507
    assert "your files hold 400 of the 1000 bytes" in error_of(reply)["message"]
    assert upload(BOB, 1700).status_code == 200
    reply = upload(BOB, 1200)
    assert reply.status_code == 507
    assert "your files hold 1700 bytes" in error_of(reply)["message"]
    assert not any(number in reply.text for number in ("2100", "3000", "400 "))


def test_what_comes_at_once_is_within_a_keys_limits_together(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    """Of eight files and eight batches that are sent side by side as many are taken as of eight one by one."""
    file = write(tmp_path / "keys.yaml", entry("a", ALICE, limits={"file_bytes": 100_000, "batch_lines": 3}))
    storage = tmp_path / "files"
    harness = make_harness(keys_file=file, file_storage_path=storage, min_free_disk_bytes=0)
    harness.engine.hold.clear()

    def send(path: str, **form: Any) -> requests.Response:
        return requests.post(harness.base + path, headers=as_key(ALICE), timeout=60, **form)

    def upload(data: bytes) -> requests.Response:
        return send("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})

    with ThreadPoolExecutor(8) as threads:
        statuses = [reply.status_code for reply in threads.map(upload, [b"x" * 60_000] * 8)]
        assert sorted(statuses) == [200, *[507] * 7]
        assert len(list((storage / "files").iterdir())) == 1
        line = {"method": "POST", "url": CHAT, "body": BODY}
        data = "".join(json.dumps({**line, "custom_id": str(i)}) + "\n" for i in range(2)).encode()
        asked = {"input_file_id": upload(data).json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        made = [reply.json()["id"] for reply in threads.map(lambda _: send("/v1/batches", json=asked), range(8))]

    def states() -> list[str]:
        found = harness.get("/v1/batches", headers=as_key(ALICE)).json()["data"]
        return sorted(each["status"] for each in found if each["id"] in made)

    harness.eventually(lambda: "validating" not in states())
    assert states() == [*["failed"] * 7, "in_progress"]
    harness.engine.hold.set()


def test_lines_of_batches_and_stored_responses_are_bounded_by_key(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    """A batch beyond a key's lines fails with the reason; of responses the newest stay."""
    limits = {"batch_lines": 3, "stored_responses": 4, "requests": 1}
    file = write(tmp_path / "keys.yaml", entry("a", ALICE, limits=limits), entry("b", BOB))
    harness = make_harness(keys_file=file, file_storage_path=tmp_path / "files", min_free_disk_bytes=0)
    line = {"method": "POST", "url": CHAT, "body": BODY}

    def batch(key: str, num: int) -> dict[str, Any]:
        data = "".join(json.dumps({**line, "custom_id": str(i)}) + "\n" for i in range(num)).encode()
        form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        file_id = harness.post("/v1/files", None, headers=as_key(key), **form).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        made = harness.post("/v1/batches", asked, headers=as_key(key)).json()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found: dict[str, Any] = harness.get(f"/v1/batches/{made['id']}", headers=as_key(key)).json()
            if found["status"] in ("completed", "failed"):
                return found
            time.sleep(0.02)
        raise AssertionError(found)

    assert batch(ALICE, 3)["request_counts"]["completed"] == 3  # side by side, whatever the limit on requests at once
    failed = batch(ALICE, 4)
    assert failed["errors"]["data"][0]["code"] == "too_many_tasks"
    assert "the 3 requests that your key may add" in failed["errors"]["data"][0]["message"]
    assert batch(BOB, 4)["status"] == "completed"
    asked = {"model": "tiny", "input": "hi", "store": True}
    made = {
        key: [harness.post("/v1/responses", asked, headers=as_key(key)).json()["id"] for _ in range(7)]
        for key in (ALICE, BOB)
    }
    left = {
        key: [i for i in ids if harness.get(f"/v1/responses/{i}", headers=as_key(key)).status_code == 200]
        for key, ids in made.items()
    }
    assert left == {ALICE: made[ALICE][-4:], BOB: made[BOB]}


def test_a_background_response_that_runs_is_not_given_up(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Beyond the key's limit of stored responses the oldest went, those that were still generated, too."""
    file = write(tmp_path / "keys.yaml", entry("a", ALICE, limits={"stored_responses": 3}), entry("b", BOB))
    harness = make_harness(keys_file=file, file_storage_path=tmp_path / "files", min_free_disk_bytes=0)
    asked = {"model": "tiny", "input": "hi", "background": True}
    harness.engine.hold.clear()
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda _: harness.post("/v1/responses", asked, headers=as_key(ALICE)), range(5)))
    made = [reply.json()["id"] for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert (len(made), len(refused)) == (3, 2)
    assert "has 3 responses in the background that have not ended, and may store 3" in error_of(refused[0])["message"]
    assert refused[0].headers["retry-after"] == "1"
    assert harness.post("/v1/responses", asked, headers=as_key(BOB)).status_code == 200
    harness.engine.hold.set()

    def states() -> set[str]:
        found = [harness.get(f"/v1/responses/{each}", headers=as_key(ALICE)) for each in made]
        return {each.json().get("status", str(each.status_code)) for each in found}

    harness.eventually(lambda: states() == {"completed"})
    assert harness.post("/v1/responses", asked, headers=as_key(ALICE)).status_code == 200


def test_time_that_a_client_gives_is_up(make_harness: Callable[..., Harness]) -> None:
    """A request with `x-request-timeout` ends then with a 504, and the engine is told before."""
    harness = make_harness()
    harness.engine.hold.clear()
    reply = harness.post(CHAT, BODY, headers={"x-request-timeout": "0.2"})
    assert (reply.status_code, error_of(reply)["code"]) == (504, "timeout")
    harness.engine.hold.set()
    assert harness.post(CHAT, BODY, headers={"x-request-timeout": "60"}).status_code == 200
    for wrong in ("0", "soon", "-1", "1e3"):
        reply = harness.post(CHAT, BODY, headers={"x-request-timeout": wrong})
        assert (reply.status_code, error_of(reply)["param"]) == (400, "x-request-timeout")


def test_no_salt_reaches_another_keys_prefixes() -> None:
    """With `--isolate-prefix-cache key` a request's salt begins with whose it is, whatever the request says."""

    alone, shared = Keys([], isolates=True), Keys([])
    salts = {}
    for keys in (alone, shared):
        for owner in ("", owner_name(ALICE)):
            for salt in ("", "x", f"{owner_name(ALICE)} x", f"{owner_name(ALICE)} "):
                task = copy_context()  # a caller that stayed set would be every later test's
                task.run(CALLER.set, keys.caller(owner))
                salts[keys is alone, owner, salt] = task.run(service_of, 0, salt)["cache_salt"]
    isolated = [salt for (is_alone, _, _), salt in salts.items() if is_alone]
    assert len(set(isolated)) == len(isolated) == 8
    assert salts[False, "", ""] == salts[False, owner_name(ALICE), ""] == ""


def test_a_range_has_the_priority_of_who_asks_for_none() -> None:
    """So no key is shut out by it."""
    tenant = Tenant("")
    tenant.take(Grant(name="x", limits=Limits(priority=PriorityRange(min=-2, max=3))))
    assert [tenant.allowed(p) for p in (-2, 0, 3, BACKGROUND)] == [-2, 0, 3, BACKGROUND]
    with pytest.raises(RequestError, match="the key 'x' may set -2 to 3"):
        tenant.allowed(4)
