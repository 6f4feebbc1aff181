"""Starts of Dovetail's processes that are forked from one that has everything imported, instead of imported anew.

Importing torch is half of what a server's start costs, and tests start hundreds. `warm_starts` replaces what
`subprocess` does between taking its arguments and having a process: for `dovetail …`, `python -m pytest` and Dovetail's
own `python -m …` it asks a template, a child that has imported all and waits. The template forks, twice, so that the
new process becomes a child of whoever asked: that is a subreaper for the moment, to which the system gives children of
a process that has ended. Process id, exit code, signals, pipes, session, environment, command line and working
directory are as those of a started process. Each such process has a template of its own, forked before it did anything,
so a server's engine is forked, too. A template ends with the process that it belongs to. pytest-xdist's processes are
forked as well, and fork from the templates that they have by that.

What could not be told from a real start by its result is started so; all else really starts: other programs, other code
given by `-c`, options of the interpreter, another environment for what is read at import.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import inspect
import io
import json
import os
import pkgutil
import re
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

MODULES = {
    "dovetail",
    "dovetail_server.supervision.engine_main",
    "dovetail.executor.rank_main",
    "dovetail.grammar.compile.child",
    "dovetail.launch_server",
    "dovetail_server",
    "dovetail_server.reading.child",
    "dovetail_server.cli.parent_bound",
    "dovetail_server.cli.plugin.probe",
    "pytest",
}
"""What is forked when it is started by `python -m`, as are scripts of the tests."""
XDIST = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""Options of the interpreter with which pytest-xdist, by way of execnet, starts a process that runs tests."""
TESTS = Path(__file__).parents[1]
CODE = str(Path(__file__).with_name("run_code.py"))
"""What `python` runs in place of `-c`, where nothing depends on what is imported already."""
PRELOAD = (
    "anthropic",
    "dovetail_server.supervision.engine_main",
    "dovetail.client.launch",
    "dovetail.executor.rank_main",
    "dovetail.grammar.compile.child",
    "dovetail.text.detection.detect",
    "dovetail_backends.schedule_policies",
    "dovetail_backends.torch_native",
    "dovetail_backends.triton",
    "dovetail_grammar.llguidance",
    "dovetail_grammar.outlines",
    "dovetail_grammar.xgrammar",
    "dovetail_models.qwen3",
    "dovetail_server.start.app",
    "dovetail_server.batches.service",
    "dovetail_server.reading.child",
    "dovetail_server.cli.parent_bound",
    "dovetail_server.cli.plugin.doctor",
    "dovetail_server.cli.plugin.probe",
    "dovetail_server.cli.serve",
    "dovetail_server.start.lifecycle",
    "dovetail_server.start.run",
    "huggingface_hub",
    "openai",
    "pytest",
    "rich.console",
    "rich.table",
    "transformers.modeling_utils",
    "uvicorn.protocols.websockets.auto",
)
"""Modules that a server of the demo model, or its engine, imports; and what they import.

The clients, and the models of transformers, are what each process that runs tests would import for 2.5 s.
"""
PACKAGES = ("dovetail_parsers.reasoning", "dovetail_parsers.tools")
"""Of which all modules are imported, as a server does to choose one."""
AT_START = re.compile(
    r"(PYTHON|LD_|LC_|LANG|MALLOC_|GLIBC_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|TORCH|CUDA_|NVIDIA_|TRITON_|HF_|COVERAGE)"
)
"""Variables that libraries may read while they are imported."""
LATER = {"PYTHONUNBUFFERED", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"}
"""Of these the ones that `_become` sees to, say nothing to a single thread, or are set by what torch compiles with."""
TITLE_BYTES = 1 << 14
LENGTH = struct.Struct("<Q")
LARGE, MADV_COLLAPSE = 2 << 20, 25
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals to a group of processes are not for the templates in it, which end with their owners."""
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_exit = os._exit  # servers replace it
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
_really_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_really_start)
_really_start_async = asyncio.create_subprocess_exec


class Template:
    """The process that forks, seen from the one that it belongs to."""

    def __init__(
        self, channel: socket.socket, environment: Mapping[str, str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Speak with it through `channel`; it was started in `environment`, as `process` if not forked."""
        self._channel, self._environment, self._process = channel, environment, process
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def close(self) -> None:
        """Have it end, and wait for that."""
        self._channel.close()
        if self._process is not None:
            self._process.wait()

    def does(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has imported is what a process in `environment` would import."""
        names = {name for name in (*environment, *self._environment) if AT_START.match(name)}
        names -= LATER | _imported.keys()
        return all(environment.get(name) == self._environment.get(name) for name in names)

    def start(self, order: dict[str, Any], fds: Sequence[int]) -> int | None:
        """Have a process started, a child of this one; None if the template is gone, or not this process's."""
        with self._lock:
            if os.getpid() != self._owner:
                return None
            _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                payload = json.dumps(order).encode()
                socket.send_fds(self._channel, [LENGTH.pack(len(payload))], list(fds))
                self._channel.sendall(payload)
                return int(LENGTH.unpack(_read(self._channel, LENGTH.size))[0])
            except (OSError, EOFError):
                return None
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class WarmStarts:
    """Forks instead of starts, while `running`; the first such start waits for a template, which is then kept."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}
        self._interpreters = [sys.executable]
        self._lock = threading.Lock()

    def add(self, interpreter: Path) -> None:
        """Fork what another environment's interpreter would run, too: from a template of its own, once it is asked."""
        self._interpreters.append(str(interpreter))

    def set(self, is_on: bool) -> None:
        """Fork from now on, or start."""
        if is_on and _prctl is not None and Path("/proc/self/stat").exists():  # on other systems all really starts
            _replace(self.template, self._interpreters)
        else:
            _restore()

    def close(self) -> None:
        """Start what comes from now on, and end the templates."""
        _restore()
        while self._templates:
            self._templates.popitem()[1].close()

    def template(self, interpreter: str = sys.executable) -> Template:
        """Start the template of `interpreter`, the first time.

        Raises:
            RuntimeError: It cannot import what it has to.
        """
        with self._lock:
            if interpreter == sys.executable and _own:
                return _own[0]
            if interpreter not in self._templates:
                self._templates[interpreter] = _begin(interpreter)
            return self._templates[interpreter]


def _begin(interpreter: str) -> Template:
    """Start a template that imports everything itself, from where `interpreter` does."""
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    code = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; from warm_starts import main; main()"
    with theirs:
        command = [interpreter, "-c", code, str(theirs.fileno()), " " * TITLE_BYTES]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
    try:
        said = _read(ours, LENGTH.unpack(_read(ours, LENGTH.size))[0]).decode()
    except EOFError:
        said = "it has ended; its last words are above"
    if said:
        process.kill()
        process.wait()
        raise RuntimeError(f"the template of warm starts cannot start: {said}")
    return Template(ours, environment, process)


_imported: dict[str, str] = {}
"""Variables that imports have set in the environment."""
_own: list[Template] = []
"""The template that this process has because it is forked itself, as those are that run tests beside others."""


def _restore() -> None:
    subprocess.Popen._execute_child = _really_start  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = _really_start_async


def _replace(template: Callable[[str], Template], interpreters: Sequence[str]) -> None:
    """Have `subprocess` fork what can be forked of what one of `interpreters` would run."""

    def execute(self: Any, *args: Any) -> None:
        given = _parameters.bind(self, *args).arguments
        command = _command_of(given, interpreters)
        environment = dict(os.environ) if given["env"] is None else _text(given["env"])
        if command is None or not (found := template(command[0])).does(environment):
            _really_start(self, *args)
            return
        targets = sorted(given["pass_fds"])
        std = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        fds = [number if fd == -1 else fd for number, fd in enumerate(std)] + targets
        order = {
            "command": command,
            "env": environment,
            "cwd": os.fsdecode(given["cwd"] or os.getcwd()),
            "targets": [0, 1, 2, *targets],
            "session": bool(given["start_new_session"]),
            "group": given.get("process_group", -1),
            "cores": sorted(os.sched_getaffinity(0)),
            "limits": [resource.getrlimit(limit) for limit in LIMITS],
            "umask": _umask(),
        }
        pid = found.start(order, fds)
        if pid is None:
            _really_start(self, *args)
            return
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))

    async def start(*command: Any, **options: Any) -> Any:
        is_ours = command[0] == sys.executable and command[1] == "-m" and command[2] in MODULES
        is_by_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        if not is_by_uvloop or not is_ours or options.get("stdin") == subprocess.PIPE:
            return await _really_start_async(*command, **options)
        limit = options.pop("limit", 1 << 16)
        return await ForkedProcess(subprocess.Popen(command, **options)).connect(limit)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = start  # type: ignore[assignment]


class _Reading(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        """Have the pipe closed at its end."""
        super().eof_received()
        return False


class ForkedProcess:
    """What `asyncio.create_subprocess_exec` returns; uvloop starts processes itself, without `subprocess`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Follow `process`."""
        self._process, self._end = process, asyncio.Event()
        self.stdin: None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self.pid, self._loop = process.pid, asyncio.get_running_loop()
        self._fd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._fd, self._ended)

    async def connect(self, limit: int) -> ForkedProcess:
        """Read what it writes into pipes."""
        for name in ("stdout", "stderr"):
            if (pipe := getattr(self._process, name)) is not None:
                reader = asyncio.StreamReader(limit)
                await self._loop.connect_read_pipe(lambda it=reader: _Reading(it), pipe)
                setattr(self, name, reader)
        return self

    @property
    def returncode(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end."""
        await self._end.wait()
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; raises `ProcessLookupError` after the end."""
        if self._process.returncode is not None:
            raise ProcessLookupError
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._process.wait()
        self._end.set()


def _text(environment: Mapping[Any, Any]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}


def _umask() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def _command_of(given: Mapping[str, Any], interpreters: Sequence[str]) -> list[str] | None:
    """Return the command line of what can be forked: one of `interpreters`, and a module or a script."""
    args = given["args"]
    if isinstance(args, (str, bytes, os.PathLike)) or given["shell"] or not given["close_fds"]:
        return None
    others = [given["preexec_fn"], given["gid"], given["gids"], given["uid"]]
    if any(other is not None for other in others) or given["umask"] not in (-1, None) or not given["restore_signals"]:
        return None
    command = [os.fsdecode(arg) for arg in args]
    if given["executable"] is not None and os.fsdecode(given["executable"]) != command[0]:
        return None
    scripts = {str(Path(interpreter).with_name("dovetail")): interpreter for interpreter in interpreters}
    if command[0] in scripts:
        return [scripts[command[0]], *command]
    if command[0] not in interpreters:
        return None
    is_module = len(command) > 2 and command[1] == "-m" and command[2] in MODULES
    is_script = len(command) > 1 and (scripts.get(command[1]) == command[0] or _is_of_tests(Path(command[1])))
    return command if is_module or is_script or command[1:] == XDIST else None


def _is_of_tests(path: Path) -> bool:
    return path.suffix == ".py" and path.is_relative_to(TESTS)


def main() -> None:
    """Be a template: import, and fork; in a forked process, be what was asked for."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    given = dict(os.environ)
    try:
        for name in PRELOAD:
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed here, such as Triton
                import_module(name)
        for package in PACKAGES:
            for found in pkgutil.iter_modules(import_module(package).__path__):
                import_module(f"{package}.{found.name}")
        if len(tasks := os.listdir("/proc/self/task")) != 1:
            raise RuntimeError(f"imports have started {len(tasks) - 1} threads, which a fork would not have")
    except Exception:
        said = traceback.format_exc().encode()
        channel.sendall(LENGTH.pack(len(said)) + said)
        return
    for name in MODULES & sys.modules.keys():
        if sys.modules[name].__spec__.submodule_search_locations is None:  # type: ignore[union-attr]
            del sys.modules[name]  # it runs as `__main__`
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    gc.collect()
    gc.freeze()
    _use_large_pages()
    channel.sendall(LENGTH.pack(0))
    _imported.update({name: value for name, value in os.environ.items() if given.get(name) != value})
    command = _serve(channel, given)
    if command is not None:
        _end(_run(command))


def _use_large_pages() -> None:
    """Have the system keep memory in large pages: to fork is to copy the table of all pages, four times faster so."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, _, _, file = line.split()[:5]
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        begin, end = -(-begin // LARGE) * LARGE, end // LARGE * LARGE
        if rights.startswith("rw") and file == "0" and end > begin:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)  # what it cannot do stays


def _serve(channel: socket.socket, environment: dict[str, str]) -> list[str] | None:
    """Fork for whoever has the other end of `channel`; returns in a forked process, with its command line."""
    while True:
        try:
            header, fds, _, _ = socket.recv_fds(channel, LENGTH.size, 250)
            if not header:
                return None
            header += _read(channel, LENGTH.size - len(header))
            order = json.loads(_read(channel, LENGTH.unpack(header)[0]))
        except (OSError, EOFError):
            return None
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, LENGTH.pack(child))
                os._exit(0)
            while os.getppid() == between:  # until it is the child of who asked
                time.sleep(0.0005)
            channel.close()
            os.close(reading)
            os.close(writing)
            return _become(order, fds, environment)
        os.close(writing)
        os.waitpid(between, 0)
        pid = os.read(reading, LENGTH.size)
        os.close(reading)
        for fd in fds:
            os.close(fd)
        try:
            channel.sendall(pid)
        except OSError:
            return None


def _become(order: dict[str, Any], fds: list[int], environment: dict[str, str]) -> list[str] | None:
    """Be as a process is that has just been started; or be its template."""
    if order["session"]:
        os.setsid()
    elif order["group"] != -1:
        os.setpgid(0, order["group"])
    ours, theirs = socket.socketpair()
    owner = os.getpid()
    if os.fork() == 0:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != owner:
            _exit(0)
        for fd in (*fds, ours.detach()):
            os.close(fd)
        if (command := _serve(theirs, environment)) is None:
            _exit(0)
        return command
    theirs.close()
    for number in IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _own[:] = [Template(_place(order["targets"], fds, ours), environment)]
    _replace(lambda _: _own[0], [sys.executable])
    os.environ.clear()
    os.environ.update({**order["env"], **_imported})
    os.chdir(order["cwd"])
    os.umask(order["umask"])
    os.sched_setaffinity(0, order["cores"])
    for limit, (soft, hard) in zip(LIMITS, order["limits"], strict=True):
        if resource.getrlimit(limit) != (soft, hard):
            resource.setrlimit(limit, (soft, hard))
    _open_streams(is_raw=bool(order["env"].get("PYTHONUNBUFFERED")) or order["command"][1:] == XDIST)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    command: list[str] = order["command"]
    _set_title(command)
    return command


def _place(targets: Sequence[int], fds: Sequence[int], channel: socket.socket) -> socket.socket:
    """Give file descriptors the numbers that they are to have, and close all others but the template's."""
    above = max(targets) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (channel.detach(), *fds)]
    for fd, target in zip(moved[1:], targets, strict=True):
        os.dup2(fd, target, inheritable=True)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in targets and fd != moved[0]:
            with contextlib.suppress(OSError):  # the one by which the folder was listed
                os.close(fd)
    return socket.socket(fileno=moved[0])


def _open_streams(is_raw: bool) -> None:
    """Have `sys` write where this process writes; what the interpreter does before it runs anything."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw: Any = open(number, "rb" if number == 0 else "wb", buffering=0, closefd=False)  # noqa: SIM115
        if number == 0:
            raw = io.BufferedReader(raw)
        elif not is_raw:
            raw = io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_raw and number > 0,
        )
        stream.mode = "r" if number == 0 else "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_title(command: Sequence[str]) -> None:
    """Have the system show this command line for the process; the template's own was made long enough."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(os.fsencode(arg) + b"\0" for arg in command)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
    name = command[0] if command[1].startswith("-") else command[1]
    _prctl(PR_SET_NAME, Path(name).name.encode()[:15], 0, 0, 0)


def _run(command: list[str]) -> int:
    """Run what the command line names, as the interpreter does; returns the exit code."""
    sys.orig_argv = list(command)
    invalidate_caches()
    this = sys.modules["__main__"].__dict__
    this.pop("main", None)
    try:
        if command[1] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = ["-m", *command[3:]]
            runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
        elif command[1:] == XDIST:
            sys.path[0] = ""
            sys.argv = ["-c"]
            exec(XDIST[-1], this)
        else:
            sys.path[0] = str(Path(command[1]).resolve().parent)
            sys.argv = command[1:]
            this["__file__"] = command[1]
            exec(compile(Path(command[1]).read_bytes(), command[1], "exec"), this)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(code: int) -> None:
    """End the process, but for the clearing of modules: that is slow for as many as a template has."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    _exit(code)


def _read(channel: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        if not (part := channel.recv(num_bytes - len(data))):
            raise EOFError
        data += part
    return data
