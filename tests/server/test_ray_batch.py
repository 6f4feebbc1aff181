"""`dovetail run-batch --ray`: every line once, whatever ends, and a run that goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs dovetail-llm[ray]")

from ray_process import QUIET, environment_of

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli import run_batch
from dovetail_server.ray import batch_files
from dovetail_server.ray.batch_files import BatchFile, files_of, look_through

MOST = 1 << 20
RUNNING: list[subprocess.Popen[bytes]] = []


def line(custom_id: str, **changes: Any) -> str:
    body = {"prompt": custom_id, "max_tokens": 1}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def test_chunks_are_the_lines_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by bytes, blank lines left out, the last line without its end too."""
    monkeypatch.setattr(batch_files, "CHUNK_LINES", 7)
    monkeypatch.setattr(batch_files, "CHUNK_BYTES", 1000)
    source = tmp_path / "in.jsonl"
    lines = [line(str(number), pad="x" * (900 if number % 10 == 0 else 0)) for number in range(50)]
    source.write_text("\n\n".join(lines))
    chunks = look_through(source, MOST)
    file = BatchFile(source, tmp_path / "out.jsonl", chunks)
    assert (file.num_lines, [chunk.number for chunk in chunks]) == (50, list(range(len(chunks))))
    found = [each for chunk in chunks for each in file.lines(chunk).split(b"\n") if each]
    assert found == [each.encode() for each in lines]
    assert len(chunks) > 8


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "it holds no request"),
        (["{"], "line 1: no JSON object"),
        ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is that of line 1 already"),
        ([line("")], "line 1: custom_id must have 1 to 512 characters"),
        ([line("a", url="/v1/files")], "line 1: url '/v1/files' is none of /v1/chat/completions, "),
        ([line("a", method="GET")], "line 1: method must be 'POST', not 'GET'"),
        ([line("a"), line("b", pad="x" * MOST)], f"line 2: it is over {MOST} bytes (--max-body-bytes)"),
    ],
)
def test_a_file_with_mistakes_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    """Before anything starts, with the line."""
    with pytest.raises(ConfigError) as raised:
        look_through(write(tmp_path / "in.jsonl", lines), MOST)
    assert said in str(raised.value)


def test_parts_are_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the input, however they came; what was there is counted again."""
    monkeypatch.setattr(batch_files, "CHUNK_LINES", 2)
    source = write(tmp_path / "in.jsonl", [line(str(number)) for number in range(7)])
    target = tmp_path / "out.jsonl"
    chunks = look_through(source, MOST)
    file = BatchFile(source, target, chunks)
    file.open("settings")
    for number in (3, 0):
        file.save(chunks[number], b"part %d\n" % number, num_failed=number)
    again = BatchFile(source, target, look_through(source, MOST))
    again.open("settings")
    assert (again.done, again.num_failed) == ({0, 3}, 3)
    for number in (2, 1):
        again.save(chunks[number], b"part %d\n" % number, num_failed=0)
    again.finish()
    assert target.read_text() == "part 0\npart 1\npart 2\npart 3\n"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_results_of_something_else_are_not_gone_on_with(tmp_path: Path) -> None:
    """Another input or other settings: the folder to remove is named."""
    source = write(tmp_path / "in.jsonl", [line("a")])
    file = BatchFile(source, tmp_path / "out.jsonl", look_through(source, MOST))
    file.open("settings")
    with pytest.raises(ConfigError, match="results of a run with other settings; remove that folder"):
        file.open("more")
    write(source, [line("a"), line("b")])
    with pytest.raises(ConfigError, match="it has changed since; remove that folder"):
        file.open("settings")


def test_of_a_folder_every_file_is_answered_once(tmp_path: Path) -> None:
    """Outputs that are there are done; one that is older than its input is refused."""
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    outputs.mkdir()
    with pytest.raises(ConfigError, match=r"the folder has no \*\.jsonl"):
        files_of(inputs, outputs)
    for name in ("a", "b"):
        write(inputs / f"{name}.jsonl", [line(name)])
    (outputs / "a.jsonl").write_text("done")
    assert files_of(inputs, outputs) == [(inputs / "b.jsonl", outputs / "b.jsonl")]
    os.utime(outputs / "a.jsonl", (1, 1))
    with pytest.raises(ConfigError, match="is older than its input; remove it"):
        files_of(inputs, outputs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-i", "{in}", "-o", "{out}"], "a folder needs --ray"),
        (["-i", "{in}", "-o", "{none}", "--ray"], "-i is a folder, so this has to be one that exists"),
        (["-i", "{in}", "-o", "{in}", "--ray"], "that is the folder of the inputs; give another one"),
        (["-i", "{file}", "-o", "{out}", "--ray"], "a folder; give a file"),
        (["-i", "{file}", "-o", "{none}", "--replicas", "2"], "--replicas 2: only --ray has replicas"),
        (
            ["-i", "{file}", "-o", "{none}", "--ray", "--replicas", "0"],
            "--replicas: expected a whole number of at least 1, not '0'",
        ),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before Ray is looked for."""
    places = {"in": tmp_path / "in", "out": tmp_path / "out", "none": tmp_path / "none", "file": tmp_path / "f.jsonl"}
    places["in"].mkdir()
    places["out"].mkdir()
    write(places["file"], [line("a")])
    assert run_batch.main([each.format(**places) for each in arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-i", "a", "-h"], 0)])
def test_without_arguments_it_says_how_to_call_it(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is an error only where nobody asked for it."""
    assert run_batch.main(arguments) == code
    assert capsys.readouterr().out == run_batch.USAGE


@pytest.fixture
def cluster(light: None) -> Iterator[dict[str, str]]:
    """The environment of a command whose Ray cluster is its own; what runs with it is ended, and waited for."""
    temp = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield {**os.environ, **QUIET, "RAY_TMPDIR": temp}
    while RUNNING:
        running = RUNNING.pop()
        running.kill()
        running.wait()
    for pid in [int(path.name) for path in Path("/proc").glob("[0-9]*") if temp in environment_of(int(path.name))]:
        with contextlib.suppress(ProcessLookupError):  # some end with others
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(temp, ignore_errors=True)


def run_on_ray(environment: dict[str, str], log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dovetail_server", "run-batch", "--ray", *map(str, arguments), "--device", "cpu"]
    with log.open("wb") as out:
        running = subprocess.Popen([*command, "--max-total-tokens", "65536"], stdout=out, stderr=out, env=environment)
    RUNNING.append(running)
    return running


def until(is_so: Callable[[], bool], running: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for something; only the test's own limit ends it, as a cluster starts as slowly as the machine is busy."""
    while not is_so():
        assert running.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)


def actors(temp: str) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    mine = [int(row.split(None, 1)[0]) for row in found.splitlines() if "ray::BatchReplica" in row]
    return [pid for pid in mine if temp in environment_of(pid)]


@pytest.mark.timeout(900)  # a cluster starts as slowly as the machine is busy: 21 s alone, 388 s with a ninth of a core
def test_every_line_is_answered_once_and_in_order(tmp_path: Path, cluster: dict[str, str]) -> None:
    """Of one file, by an actor of Ray; a request that is refused makes the exit code 1."""
    log, source, target = tmp_path / "log", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(
        source, [*(line(f"a-{number}") for number in range(40)), line("wrong", body={"prompt": "x", "max_tokens": -2})]
    )
    running = run_on_ray(cluster, log, "-i", source, "-o", target)
    assert running.wait(800) == 1, log.read_text()[-3000:]
    assert "41/41" in log.read_text()
    rows = [json.loads(row) for row in target.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [*(f"a-{number}" for number in range(40)), "wrong"]
    assert [row["response"]["status_code"] for row in rows] == [*[200] * 40, 400], rows


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_line_is_answered_once_whatever_ends(tmp_path: Path, cluster: dict[str, str]) -> None:
    """An actor is killed, then the command itself, and the same command goes on: all lines, once, in order."""
    inputs, outputs, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    inputs.mkdir()
    outputs.mkdir()
    wanted = {name: [f"{name}-{number}" for number in range(num)] for name, num in (("a", 4000), ("b", 1000))}
    for name, ids in wanted.items():
        write(inputs / f"{name}.jsonl", [line(each) for each in ids])
    wrong = line("wrong", body={"prompt": "x", "max_tokens": -2})
    with (inputs / "b.jsonl").open("a") as file:
        file.write(f"{wrong}\n")

    def num_parts() -> int:
        return len(list(outputs.glob(".*.parts/[0-9]*")))

    running = run_on_ray(cluster, log, "-i", inputs, "-o", outputs, "--replicas", 2)
    until(lambda: num_parts() >= 3, running, log)
    os.kill(actors(cluster["RAY_TMPDIR"])[0], signal.SIGKILL)
    at = num_parts()
    until(lambda: num_parts() >= at + 4, running, log)
    running.kill()
    running.wait()
    kept = num_parts()
    assert 7 <= kept < 20
    running = run_on_ray(cluster, log, "-i", inputs, "-o", outputs, "--replicas", 2)
    assert running.wait(600) == 1, log.read_text()[-3000:]  # one request was refused
    shown = log.read_text().replace("\r", "\n")
    assert "5001/5001" in shown
    for name, ids in wanted.items():
        rows = [json.loads(row) for row in (outputs / f"{name}.jsonl").read_text().splitlines()]
        assert [row["custom_id"] for row in rows if row["custom_id"] != "wrong"] == ids
        assert {row["response"]["status_code"] for row in rows} == ({200} if name == "a" else {200, 400})
    assert sorted(path.name for path in outputs.iterdir()) == ["a.jsonl", "b.jsonl"]
