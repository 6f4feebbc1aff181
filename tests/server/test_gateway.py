"""The gateway's parts: what a worker is started with, what is read of a body, one log, one page of metrics."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.gateway import main as gateway_command
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.gateway.child import reserve_port
from dovetail_server.gateway.fan_out import merged
from dovetail_server.gateway.fleet import Fleet, Worker
from dovetail_server.gateway.relayed_log import WorkerLog, tagged
from dovetail_server.gateway.server import GatewayServer
from dovetail_server.gateway.worker_settings import divide, worker_config, worker_environment
from dovetail_server.relay.places import MAX_TEXT_BYTES, beginning
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.lifecycle import DrainingServer
from dovetail_server.start.preflight import bind, with_model


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)


def settings_of(*flags: str) -> ServeSettings:
    parsed = parse_flags(flags)
    assert isinstance(parsed, dict)
    return load_settings(parsed)


def test_gpus_are_divided_in_order() -> None:
    """Each worker gets as many as it has ranks, of those that are named or of the first."""
    assert [share["devices"] for share in divide(settings_of("--dp", "2", "--tp", "2"), 8, 4)] == [[0, 1], [2, 3]]
    chosen = settings_of("--dp", "2", "--devices", "3,1", "--random-seed", "7")
    assert divide(chosen, 4, 4) == [{"devices": [3], "random_seed": 7}, {"devices": [1], "random_seed": 8}]
    chosen = settings_of("--dp", "2", "--tp", "2", "--devices", "3,2,1,0")
    assert [share["devices"] for share in divide(chosen, 4, 4)] == [[3, 2], [1, 0]]
    assert divide(settings_of("--dp", "2"), 0, 5) == [{"num_threads": 2}] * 2


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        ("--dp 3", 2, "--data-parallel-size 3: 3 GPUs are needed, and this process sees 2; give at most 2"),
        ("--dp 2 --tp 2", 2, "with --tensor-parallel-size 2: 4 GPUs are needed, .* give at most 1"),
        ("--dp 2 --devices 0,1,2", 4, "2 GPUs are needed, and --devices 0,1,2 names 3; give 2 devices"),
        ("--dp 2 --devices 1,1", 4, "one is given twice"),
        ("--dp 2 --devices 0,9", 4, "there is no device 9; 4 are here"),
        ("--dp 2 --devices 0,1", 0, "there is no GPU here; leave it out"),
        ("--dp 64", 0, "64: 4 cores are here; give at most 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(flags: str, gpus: int, said: str) -> None:
    """In one line, with what there is and what to give."""
    with pytest.raises(ConfigError, match=said):
        divide(settings_of(*flags.split()), gpus, 4)


def test_a_workers_file_gives_the_settings_it_was_made_of(tmp_path: Path) -> None:
    """Everything that was given arrives, keys and plugins' options too, but for what belongs to the address."""
    given = settings_of(
        *("--dp", "2", "--api-key", "a,b", "--admin-api-key", "c", "--port", "4000", "--host", "0.0.0.0"),
        *("--root-path", "/llm", "--allowed-hosts", "x.org"),
        *("--reasoning-parser", "qwen3", "--max-running-requests", "7", "--drain-timeout", "9", "--disable-cuda-graph"),
        *("--file-storage-path", str(tmp_path), "--database-url", "postgresql+psycopg://me:secret@host/name"),
        *("--served-model-name", "one,two", "--plugin", "otel", "--log-format", "json"),
    )
    file = tmp_path / "worker.yaml"
    file.write_text(worker_config(given, 4321, {"num_threads": 1}))
    worker = settings_of("--config", str(file))
    same = ("api_key", "admin_api_key", "reasoning_parser", "max_running_requests", "drain_timeout", "plugin")
    same += ("disable_cuda_graph", "file_storage_path", "database_url", "served_model_name", "log_format")
    assert {name: getattr(worker, name) for name in same} == {name: getattr(given, name) for name in same}
    assert (worker.host, worker.port, worker.root_path, worker.data_parallel_size) == ("127.0.0.1", 4321, "", 1)
    assert not worker.allowed_hosts
    assert worker.num_threads == 1


@pytest.mark.parametrize(
    ("model", "names"),
    [(["demo:digits"], ["demo:digits"]), (["demo:digits", "--served-model-name", "a,b"], ["a", "b"]), ([], [])],
)
def test_workers_serve_a_model_under_the_name_that_was_given(
    model: list[str], names: list[str], tmp_path: Path
) -> None:
    """Not under the folder in which it was found; without a name each worker knows the demo's itself."""
    file = tmp_path / "worker.yaml"
    file.write_text(worker_config(with_model(settings_of(*model, "--dp", "2")), 4321, {}))
    worker = settings_of("--config", str(file))
    assert (worker.served_model_name, worker.model_path is None) == (names, not model)


def test_every_setting_is_the_address_s_or_reaches_the_workers() -> None:
    """A list of names that no longer exist would drop nothing."""
    from dovetail_server.gateway.worker_settings import OURS

    assert set(ServeSettings.model_fields) >= OURS


def test_secrets_do_not_stay_in_a_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings reach it by its file alone; other variables stay."""
    monkeypatch.setenv("DOVETAIL_API_KEY", "a")
    monkeypatch.setenv("DOVETAIL_PLUGINS__OTEL__ENDPOINT", "b")
    monkeypatch.setenv("DOVETAIL_PEER_SUMS", "0")
    found = worker_environment()
    assert found["DOVETAIL_PEER_SUMS"] == "0"
    assert not {"DOVETAIL_API_KEY", "DOVETAIL_PLUGINS__OTEL__ENDPOINT"} & set(found)


def test_a_reserved_port_is_a_workers_to_take() -> None:
    """While it is held, a server may listen on it, once it has ended again, and nobody gets it who asks for any."""
    with reserve_port() as held:
        port = held.getsockname()[1]
        for _ in range(2):
            bind("127.0.0.1", port).close()
        others = [reserve_port() for _ in range(50)]
        assert port not in {one.getsockname()[1] for one in others}
        for one in others:
            one.close()


def test_bodies_with_equal_prompts_begin_alike() -> None:
    """Whatever API; fields that are no prompt do not matter, and tools and system texts come first."""
    chat = [{"role": "system", "content": "rules"}, {"role": "user", "content": "hi"}]
    one = beginning(json.dumps({"model": "m", "temperature": 0.3, "messages": chat}).encode())
    two = beginning(json.dumps({"messages": chat, "model": "other", "stream": True}).encode())
    assert one == two == json.dumps(chat)
    text = beginning(json.dumps({"messages": chat, "system": "S", "tools": [1]}).encode())
    assert text is not None
    assert text.startswith('[1]"S"[{')
    assert beginning(b'{"prompt": [1, 2, 3]}') == "[1, 2, 3]"
    assert beginning(b'{"input_ids": [1]}') == "[1]"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1}', b"\xff\xfe", b'{"messages": nope}', b"null"])
def test_a_body_without_prompt_has_no_beginning(body: bytes) -> None:
    """Then the worker says what is wrong."""
    assert beginning(body) is None


def test_of_a_long_prompt_only_the_beginning_is_taken() -> None:
    """A body over a megabyte is not parsed at all; both are cut at bytes, wherever a letter stands."""
    for num in (MAX_TEXT_BYTES, 3 << 20):
        text = beginning(json.dumps({"prompt": "ä" * num}, ensure_ascii=False).encode())
        assert text is not None
        assert len(text.encode()) <= MAX_TEXT_BYTES + 2


def test_lines_of_workers_bear_their_names() -> None:
    """As SGLang's log has them; what tells a worker's own address is dropped."""
    assert tagged("[2026-01-02 03:04:05] Prefill batch.", "DP1") == "[2026-01-02 03:04:05 DP1] Prefill batch."
    assert tagged("Traceback (most recent call last):", "DP0") == "[DP0] Traceback (most recent call last):"
    assert tagged("[2026-01-02 03:04:05] The server is fired up and ready to roll!", "DP1") is None
    assert tagged('{"message": "Serving m at http://127.0.0.1:5/v1"}', "DP1") is None
    assert json.loads(tagged('{"message": "Prefill", "pid": 3}', "DP1") or "") == {
        "message": "Prefill",
        "pid": 3,
        "worker": "DP1",
    }
    assert tagged("{no json", "DP1") == "[DP1] {no json"


def test_a_workers_complaint_is_kept_for_the_end() -> None:
    """In both formats, without the command's name; other lines are passed on, a bar's last state only."""
    lines: list[str] = []
    for complaint in ("dovetail serve: error: no such folder", '{"level": "error", "message": "dovetail serve: gone"}'):
        log = WorkerLog("DP0", lines.append)
        log.take("0%\r50%\r100%")
        log.take(complaint)
        assert log.reason in ("no such folder", "gone")
    assert lines[0] == "[DP0] 100%"
    assert not any("no such folder" in line for line in lines)


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    """Nothing is held beyond the reader's limit."""

    async def follow() -> list[str]:
        lines: list[str] = []
        stream = asyncio.StreamReader(limit=1 << 10)
        stream.feed_data(b"x" * 5000 + b"\nlast")
        stream.feed_eof()
        await WorkerLog("DP0", lines.append).follow(stream)
        return lines

    lines = asyncio.run(follow())
    assert "".join(line.removeprefix("[DP0] ") for line in lines) == "x" * 5000 + "last"
    assert len(lines) >= 2


def test_what_is_under_way_ends_before_the_gateway_does() -> None:
    """A request that runs when the gateway is told to end holds it up, within the time that it has."""

    async def run() -> None:
        state: Any = SimpleNamespace(settings=settings_of("--drain-timeout", "600"))
        server = GatewayServer(lambda scope, receive, send: asyncio.sleep(0), state, None)
        request = asyncio.get_running_loop().create_future()
        server.server_state.tasks.add(request)
        drained = asyncio.create_task(server.drain(0.0))
        for _ in range(4):
            await asyncio.wait([drained], timeout=0.02)
        assert not server.should_exit
        server.server_state.tasks.clear()
        await drained
        assert server.should_exit

    asyncio.run(run())


def test_a_client_that_takes_nothing_is_cut_off_alone() -> None:
    """What is still to be sent to it is dropped at once; connections of others stay."""

    async def run() -> None:
        arrived: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        listener = await asyncio.start_server(lambda reader, writer: arrived.put(writer), "127.0.0.1", 0)
        clients = [await asyncio.open_connection(*listener.sockets[0].getsockname()) for _ in range(2)]
        kept, lost = [(await arrived.get()).transport for _ in clients]
        lost.write(bytes(64 << 20))
        assert lost.get_write_buffer_size()
        open_ones = [SimpleNamespace(transport=one, client=one.get_extra_info("peername")) for one in (kept, lost)]
        server: Any = SimpleNamespace(server_state=SimpleNamespace(connections=open_ones))
        DrainingServer.cut_off(server, {"client": lost.get_extra_info("peername")})
        assert (kept.is_closing(), lost.is_closing(), lost.get_write_buffer_size()) == (False, True, 0)
        for _, writer in clients:
            writer.close()
        kept.close()
        listener.close()

    asyncio.run(run())


def test_metrics_of_workers_stand_side_by_side() -> None:
    """Each family once, with its help; every sample keeps its labels and value."""
    page = (
        "# HELP a_total Things.\n# TYPE a_total counter\na_total 1.0\n"
        '# HELP h Time.\n# TYPE h histogram\nh_bucket{le="0.5",path="/a}b {"} 1\nh_sum 0.25\nh_count 1\n'
    )
    other = page.replace("a_total 1.0", "a_total 2.5e3").replace("Things.", "Things, as another version says.")
    text = merged({"0": page, "1": other})
    assert text.splitlines() == [
        "# HELP a_total Things.",
        "# TYPE a_total counter",
        'a_total{worker="0"} 1.0',
        'a_total{worker="1"} 2.5e3',
        "# HELP h Time.",
        "# TYPE h histogram",
        *(
            f"h_{name}"
            for number in "01"
            for name in (
                f'bucket{{worker="{number}",le="0.5",path="/a}}b {{"}} 1',
                f'sum{{worker="{number}"}} 0.25',
                f'count{{worker="{number}"}} 1',
            )
        ),
    ]
    from prometheus_client.parser import text_string_to_metric_families

    assert {family.name for family in text_string_to_metric_families(text)} == {"a", "h"}


def test_the_least_busy_ready_worker_is_taken() -> None:
    """One that is lost gets nothing until it is ready again; who waits is woken then."""

    async def wait() -> Any:
        fleet = Fleet([Worker(0, "http://a", is_ready=True, num_running=3), Worker(1, "http://b")])
        assert fleet.least_busy() is fleet.workers[0]
        fleet.workers[0].is_lost("gone")
        assert fleet.problem() == "no worker is ready"
        assert "DP0 http://a: gone" in str(fleet.no_worker())
        assert await fleet.wait_ready(0.01) is None
        asyncio.get_running_loop().call_later(0.02, fleet.is_now_ready, fleet.workers[1])
        return await fleet.wait_ready(5) is fleet.workers[1]

    assert asyncio.run(wait())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--port 1", "no --worker is given; give the address of each server"),
        ("--worker", "--worker '': not the address"),
        ("--worker 10.0.0.5:30000", "not the address of a server; give one such as http://"),
        ("--worker http://a:99999", "not the address"),
        ("--worker http://a/v1", "leave out '/v1'"),
        ("--worker http://a:1 --worker http://a:1/", "--worker http://a:1 is given twice"),
        ("--worker http://a:1 http://b:1", "'http://b:1': unexpected; each server's address needs a --worker"),
        ("--worker http://a:1 --tp 2", "--tensor-parallel-size: a setting of the servers behind a gateway"),
        ("--worker http://a:1 --wroker b", "--wroker: unknown option"),
    ],
)
def test_bad_arguments_of_the_command_are_refused(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2."""
    assert gateway_command(arguments.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("dovetail gateway: error: ")
    assert error.count("\n") == 1


def test_options_of_plugins_reach_the_workers(tmp_path: Path) -> None:
    """As they were given, whatever they came from."""
    source = tmp_path / "config.yaml"
    source.write_text("plugins:\n  kv-events:\n    endpoint: tcp://127.0.0.1:5557\n    topic: a\n")
    settings = ServeSettings(config=source)
    handed = tmp_path / "worker.json"
    handed.write_text(worker_config(settings, 1, {}))
    found = ServeSettings(config=handed).plugins
    assert {name: each.value for name, each in found["kv-events"].items()} == {
        "endpoint": "tcp://127.0.0.1:5557",
        "topic": "a",
    }
