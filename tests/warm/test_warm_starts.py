"""Processes that are forked instead of started are as those that are started."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from warm_starts import TESTS, WarmStarts

WHO = str(TESTS / "warm" / "who_am_i.py")


@pytest.fixture(scope="module")
def starts() -> Iterator[WarmStarts]:
    made = WarmStarts()
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["forked", "started"])
def is_forked(request: pytest.FixtureRequest, starts: WarmStarts) -> Iterator[bool]:
    """Whether processes of the test are forked."""
    starts.set(request.param)
    yield request.param
    starts.set(False)


@pytest.fixture
def forked(starts: WarmStarts) -> Iterator[None]:
    starts.set(True)
    yield
    starts.set(False)


def ask(*arguments: str, **options: Any) -> dict[str, Any]:
    """What a process says of itself; see `who_am_i.py`."""
    done = subprocess.run(
        [sys.executable, WHO, *arguments], capture_output=True, text=True, check=True, timeout=60, **options
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_is_as_a_started_process(is_forked: bool, tmp_path: Path) -> None:
    """Parent, session, folder, environment, files, arguments, limits and signals are those that were asked for."""
    reading, writing = os.pipe()
    environment = {**os.environ, "DOVETAIL_EXAMPLE": "ü", "XDG_DATA_HOME": str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)
    try:
        said = ask("a b", "ü", cwd=tmp_path, env=environment, pass_fds=[writing], start_new_session=True)
        assert said.pop("has_torch") == is_forked
        assert said.pop("pid") == said.pop("session")
        assert said == {
            "argv": [WHO, "a b", "ü"],
            "orig_argv": [sys.executable, WHO, "a b", "ü"],
            "shown": [sys.executable, WHO, "a b", "ü"],
            "path": str(Path(WHO).parent),
            "parent": os.getpid(),
            "cwd": str(tmp_path),
            "example": "ü",
            "data": str(tmp_path),
            "fds": [0, 1, 2, writing],
            "name": "__main__",
            "limit": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
            "cores": len(os.sched_getaffinity(0)),
            "interrupt": "default_int_handler",
            "terminate": "SIG_DFL",
            "threads": 1,
            "unbuffered": False,
            "encoding": said["encoding"],
            "prefix": sys.prefix,
        }
    finally:
        os.close(reading)
        os.close(writing)


def test_streams_are_those_that_were_given(is_forked: bool) -> None:
    """Input, output and errors are three pipes, or one, and nobody else keeps them open."""
    command = [sys.executable, WHO, "--echo"]
    done = subprocess.run(command, input="one\ntwo\n", capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "one\ntwo\n", "read 2\n")
    joined = subprocess.run(command, input=b"one\n", stdout=-1, stderr=-2, check=False, timeout=60)
    assert sorted(joined.stdout.splitlines()) == [b"one", b"read 1"]
    raw = ask(env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert raw["unbuffered"]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("exit 7", 7, ""),
        ("exit words", 1, "words\n"),
        ("raise", 1, "ValueError: it is wrong\n"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("atexit", 0, "at exit\n"),
        ("thread", 0, "a thread\n"),
        ("_exit", 5, ""),
        ("abort", -signal.SIGABRT, ""),
    ],
)
def test_it_ends_as_a_started_process(is_forked: bool, how: str, code: int, said: str) -> None:
    """With the same code and last words."""
    done = subprocess.run([sys.executable, WHO, "--end", how], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert done.stderr.endswith(said) if said else not done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_end_it_and_its_template(is_forked: bool, number: signal.Signals) -> None:
    """Its own template, too, which is what else it leaves."""
    process = subprocess.Popen([sys.executable, WHO, "--wait"], stdout=-1, stderr=-1, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == is_forked
        process.send_signal(number)
        assert process.wait(60) == -number
    deadline = time.monotonic() + 60
    while any(is_alive(int(pid)) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_it_starts_is_forked_too(forked: None) -> None:
    """A server's engine is: the template of each process is there for its own."""
    said = ask("--child")
    assert said["child"]["has_torch"]
    assert said["child"]["parent"] == said["pid"]


def test_pytest_is_pytest(is_forked: bool, tmp_path: Path) -> None:
    """It collects, and says which values an assertion had; what fails is its exit code."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert ['torch' in sys.modules] == [None]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"assert [{is_forked}] == [None]" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("is_full", [False, True])
def test_processes_that_run_tests_beside_others_are_forked(tmp_path: Path, is_full: bool) -> None:
    """Those of pytest-xdist, with all that tests import, whatever threads the caller asks for; `--full` starts them."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "warm").symlink_to(TESTS / "warm")
    (tmp_path / "test_it.py").write_text(
        f"import sys\n\nHAS = 'torch' in sys.modules\n\ndef test_it():\n    assert HAS is {not is_full}\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "-n", "1", "-c", str(TESTS.parent / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), "test_it.py"]
    command += ["--full"] if is_full else []
    env = os.environ | {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_another_environment_has_a_template_of_its_own(forked: None, starts: WarmStarts, tmp_path: Path) -> None:
    """It imports from there, as what it starts does; an interpreter that was not added is started."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    [site] = (tmp_path / "env/lib").glob("python3*/site-packages")
    (site / "here.pth").write_text("\n".join(path for path in sys.path if Path(path).is_dir()))
    said = []
    for _ in range(2):
        done = subprocess.run([python, WHO, "--child"], capture_output=True, check=True, timeout=60)
        said.append(json.loads(done.stdout))
        starts.add(python)
    before, after = said
    assert not before["has_torch"]
    for it in (after, after["child"]):
        assert it["has_torch"]
        assert it["prefix"] == str(tmp_path / "env")
        assert it["orig_argv"][0] == str(python)


def test_it_is_the_child_of_a_process_with_an_event_loop(is_forked: bool) -> None:
    """Of uvloop's as well, which starts processes itself."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> tuple[int, bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dovetail_server", "serve", "--portt", "1", stdout=-3, stderr=-1, stdin=-3
        )
        assert process.stderr is not None
        said = await process.stderr.read()
        assert await process.wait() == process.returncode == 2
        return process.pid, said

    for run in (asyncio.run, uvloop.run):
        pid, said = run(main())
        assert not is_alive(pid)
        assert b"did you mean --port?" in said


def code() -> list[str]:
    return [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (code(), {}),
        ([sys.executable, "-X", "dev", WHO], {}),
        ([sys.executable, "-I", WHO], {}),
        ([sys.executable, WHO], {"env": {"PYTHONPATH": "/nowhere"}}),
        ([sys.executable, WHO], {"env": {"TRITON_INTERPRET": "2"}}),
        ([sys.executable, WHO], {"preexec_fn": lambda: None}),
        ([sys.executable, WHO], {"close_fds": False}),
    ],
    ids=["code", "option", "isolated", "path", "import", "preexec", "fds"],
)
def test_what_a_fork_could_not_be_is_started(forked: None, command: list[str], options: Mapping[str, Any]) -> None:
    """Where options or the environment tell what is imported, or how."""
    environment = {**os.environ, **options.get("env", {})}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, **{**options, "env": environment}
    )
    assert "true" not in done.stdout.lower().partition("has_torch")[2][:8]
    assert done.stdout != "True\n"
