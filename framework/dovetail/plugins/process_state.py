"""What all code of a process shares and a plugin must leave as it is: the kit refuses changes, a start names them."""

from __future__ import annotations

import atexit
import codecs
import copyreg
import faulthandler
import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What all code of a process shares and a plugin must leave as it is when it is loaded.

    Attributes:
        threads: Names of all threads but those that run Dovetail's code.
        children: Processes that any thread has started.
        own_children: Those that this thread has started.
        signals: What handles each signal.
        torch: Defaults of torch of which requests fail.
        python: Everything else, by what it is called in messages.
        random: States of the generators of random numbers that all code shares, as words of MT19937, by module.
        environment: The environment variables.
    """

    threads: frozenset[str]
    children: frozenset[int]
    own_children: frozenset[int]
    signals: dict[str, str]
    torch: dict[str, str]
    python: dict[str, object]
    random: dict[str, tuple[int, ...]]
    environment: dict[str, str]

    @classmethod
    def now(cls) -> ProcessState:
        """Look at this process."""
        children = {pid for path in Path("/proc/self/task").glob("*/children") for pid in _pids(path)}
        own = _pids(Path(f"/proc/self/task/{threading.get_native_id()}/children"))
        handlers = {name.name: repr(signal.getsignal(name)) for name in signal.valid_signals() if hasattr(name, "name")}
        threads = frozenset(thread.name for thread in threading.enumerate() if not _is_ours(thread))
        torch, python = torch_defaults(), {**_python(), **_settings()}
        return cls(threads, frozenset(children), frozenset(own), handlers, torch, python, _random(), dict(os.environ))

    def differences(self, later: ProcessState) -> list[str]:
        """Say what is there that was not."""
        found = [f"the process {pid}" for pid in sorted(later.children - self.children - later.own_children)]
        return found + self.shared_differences(later)

    def shared_differences(self, later: ProcessState) -> list[str]:
        """Say the same but for processes of other threads, which others may have started meanwhile."""
        found = [f"the thread {name!r}" for name in sorted(later.threads - self.threads)]
        found += [f"the process {pid}" for pid in sorted(later.own_children - self.own_children)]
        found += [f"a handler of {name}" for name, handler in later.signals.items() if handler != self.signals[name]]
        # A setting of a library that was imported meanwhile had no value before.
        found += [f"another {what}" for what, value in later.python.items() if value != self.python.get(what, value)]
        states = ((name, self.random.get(name), state) for name, state in later.random.items())
        found += [f"another seed of {name}" for name, old, new in states if old and not _is_drawn(old, new)]
        names = later.environment.keys() | self.environment.keys()
        changed = sorted(name for name in names if later.environment.get(name) != self.environment.get(name))
        found += [f"another value of the environment variable {name}" for name in changed]
        return found + torch_differences(self.torch or TORCH, later.torch)


LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_") and name not in ("RLIMIT_NOFILE", "RLIMIT_AS")]
"""What the operating system lets a process have."""
TORCH = {"default dtype": "torch.float32", "default device": "cpu", "grad mode": "True"}
"""How torch begins."""


def _is_ours(thread: threading.Thread) -> bool:
    """Whether a thread was begun by Dovetail, which may do so at any time."""
    home = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return home.partition(".")[0] in ("dovetail", "dovetail_offline", "dovetail_server")


def _pids(path: Path) -> list[int]:
    """Return the processes that a file lists; none if the thread whose it is has just ended."""
    try:
        return [int(pid) for pid in path.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _python() -> dict[str, object]:
    """What all code of Python's goes through."""
    core = logging.getLogger("dovetail")
    return {
        "recursion limit": sys.getrecursionlimit(),
        "limit of digits": sys.get_int_max_str_digits(),
        "time between threads": sys.getswitchinterval(),
        "standard output": _stream(sys.stdout, 1),
        "standard error": _stream(sys.stderr, 2),
        "standard input": _stream(sys.stdin, 0),
        "hook for exceptions": (sys.excepthook, sys.unraisablehook),
        "hook of Python's": (sys.displayhook, sys.breakpointhook, sys.get_asyncgen_hooks()),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "report of crashes": faulthandler.is_enabled(),
        "size of threads' stacks": threading.stack_size(),
        "search path of modules": tuple(sys.path),
        "hook of imports": _imports(),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), _ids(gc.callbacks)),
        "level of logging": (logging.root.level, logging.root.manager.disable, core.level, core.propagate),
        "handler of logging": (*map(id, logging.root.handlers), *map(id, core.handlers)),
        "filter of logging": [_ids(owner.filters) for owner in _logging(core)],
        "logger of Dovetail's": _loggers(),
        "class of loggers": (logging.getLoggerClass(), logging.getLogRecordFactory()),
        "way of JSON": [tuple(map(str, vars(part).values())) for part in _json()],
        "handler of wrong text": [
            codecs.lookup_error(name) for name in ("strict", "ignore", "replace", "surrogateescape")
        ],
        "rule for warnings": tuple(filter(_is_for_all, warnings.filters)),
        "way of pickling": {kind: id(how) for kind, how in copyreg.dispatch_table.items() if _is_pythons(kind, how)},
        "way of loading modules": (sys.getdlopenflags(), sys.dont_write_bytecode, sys.pycache_prefix),
        "codec": [_codec(name) for name in ("utf-8", "ascii", "latin-1", "idna")],
        "arithmetic of the smallest numbers": sys.float_info.min / 2 > 0,
        "policy of event loops": getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None),
    }


def _settings() -> dict[str, object]:
    """What the operating system keeps for the process, and settings of libraries."""
    torch: Any = sys.modules.get("torch")
    has_torch = hasattr(torch, "get_float32_matmul_precision")
    processes: Any = sys.modules.get("multiprocessing")
    found: dict[str, object] = {
        "working directory": os.getcwd(),
        "mask of files": _umask(),
        "mask of signals": frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer of signals": [bool(signal.getitimer(which)[0]) for which in range(3)],
        "set of processor cores": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "limit of open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "limit of memory": resource.getrlimit(resource.RLIMIT_AS),
        **{f"limit {name}": resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "locale": locale.setlocale(locale.LC_ALL),
        "timeout of sockets": socket.getdefaulttimeout(),
        "way to start processes": processes and processes.get_start_method(allow_none=True),
    }
    if has_torch:
        found |= {
            "number of torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "seed of torch": torch.initial_seed(),
            "mode of torch": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
            "kernel of torch's operators": _replaced_operators(),
            "precision of torch's products": torch.get_float32_matmul_precision(),
            "determinism of torch": torch.are_deterministic_algorithms_enabled(),
            "search for errors of torch": torch.is_anomaly_enabled(),
            "choice of torch's kernels": _kernels(torch.backends),
        }
    if (decimal := sys.modules.get("decimal")) is not None and hasattr(decimal, "DefaultContext"):
        contexts = decimal.getcontext(), decimal.DefaultContext
        found["way of decimal numbers"] = [(c.prec, c.rounding, c.Emin, c.Emax, str(c.traps)) for c in contexts]
    if (files := sys.modules.get("tempfile")) is not None and hasattr(files, "gettempdir"):
        found["folder of temporary files"] = files.gettempdir()
    found["type of files"] = _types()
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "geterr"):
        found["way in which NumPy takes errors"] = numpy.geterr()
    return found


DRAWN_BLOCKS = 100
"""As many blocks of 624 words may be drawn from a generator when a plugin is loaded; httpx draws one at import."""
_PYTHONS = frozenset({"builtins", *sys.stdlib_module_names})


def _random() -> dict[str, tuple[int, ...]]:
    """Return the words of the shared generators, without their position: a draw leaves a block or takes the next."""
    found = {"random": random.getstate()[1][:-1]}
    numbers: Any = getattr(sys.modules.get("numpy"), "random", None)
    if hasattr(numbers, "get_state"):
        found["numpy.random"] = tuple(map(int, numbers.get_state()[1]))
    return found


def _is_drawn(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether a generator can have come to a state by drawing, as libraries do when they are imported."""
    generator, words = random.Random(), old
    generator.setstate((3, (*old, len(old)), None))
    for _ in range(DRAWN_BLOCKS):
        if words == new:
            return True
        generator.getrandbits(32 * len(old))
        words = generator.getstate()[1][:-1]
    return False


def _is_for_all(rule: Any) -> bool:
    """Whether a rule for warnings is about everybody's: one that raises, or that is of no text, module or own class."""
    action, message, category, module, line = rule
    return action == "error" or (not (message or module or line) and category.__module__ == "builtins")


def _is_pythons(kind: type, how: Any) -> bool:
    """Whether a way of pickling is of a type of Python's, and not Python's own way."""
    homes = (getattr(part, "__module__", None) or "" for part in (kind, how))
    of_kind, of_pickler = (home.partition(".")[0] in _PYTHONS for home in homes)
    return of_kind and not of_pickler


def _types() -> list[dict[str, str]]:
    """Return the types of files by suffix, once the system's tables are read: whoever asks first would read them."""
    import mimetypes  # only here: a start without strangers need not wait for it

    mimetypes.guess_type("")
    database: Any = mimetypes._db  # type: ignore[attr-defined]
    return [*(each.copy() for each in database.types_map), database.encodings_map.copy()]


def _codec(name: str) -> object:
    try:
        return codecs.lookup(name)
    except LookupError:
        return None


def _replaced_operators() -> frozenset[str]:
    """Return those of torch's own operators that Python code computes on a device; torch itself adds meta functions."""
    known = getattr(sys.modules.get("torch.library"), "_impls", ())
    own = (name for name in tuple(known) if name.startswith("aten/"))
    return frozenset(name for name in own if name.rpartition("/")[2] != "Meta")


def _ids(objects: Iterable[object]) -> tuple[int, ...]:
    """Return what tells objects apart."""
    return tuple(map(id, objects))


def _imports() -> tuple[object, ...]:
    """What is asked first for a module, and what reads folders of the search path; what stands behind takes nothing."""
    first = next((finder for finder in sys.meta_path if not type(finder).__module__.startswith("dovetail.")), None)
    return first, *_ids(sys.path_hooks)


def _logging(core: logging.Logger) -> list[logging.Filterer]:
    """What a line of Dovetail's goes through on its way to the log."""
    last = [] if logging.lastResort is None else [logging.lastResort]
    return [logging.root, core, *logging.root.handlers, *core.handlers, *last]


def _loggers() -> dict[str, object]:
    """Dovetail's loggers that are not as they are made."""
    found: dict[str, object] = {}
    for name, logger in logging.root.manager.loggerDict.copy().items():
        if name.startswith(("dovetail.", "dovetail_offline", "dovetail_server")) and isinstance(logger, logging.Logger):
            state = logger.level, logger.disabled, logger.propagate, _ids(logger.filters), _ids(logger.handlers)
            if state != (0, False, True, (), ()):
                found[name] = state
    return found


def _json() -> tuple[Any, ...]:
    """Those that `json.dumps` and `json.loads` use."""
    module: Any = json
    return module._default_encoder, module._default_decoder


def _kernels(backends: Any) -> list[object]:
    """Switches of torch by which other kernels compute, and round otherwise."""
    names = ("enabled", "benchmark", "deterministic", "allow_tf32")
    found = [getattr(getattr(backends, part), name, None) for part in ("mkldnn", "cudnn") for name in names]
    cuda = backends.cuda
    found += [getattr(cuda.matmul, name, None) for name in names]
    return [*found, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]


def _stream(stream: Any, descriptor: int) -> object:
    """What a standard stream is: the object, whether it is closed, and the file behind its descriptor."""
    try:
        file = os.fstat(descriptor)
        behind: object = (file.st_dev, file.st_ino)
    except OSError:
        behind = None
    return stream, getattr(stream, "closed", None), behind


def _umask() -> str:
    """Return the mask of new files as Linux shows it: the system call would have to set another one."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return ""
    return status.partition("Umask:")[2].partition("\n")[0].strip()


def torch_defaults() -> dict[str, str]:
    """Return torch's defaults by name; nothing where it is not there yet."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    values = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    return dict(zip(TORCH, map(str, values), strict=True))


def torch_differences(before: Mapping[str, str], later: Mapping[str, str]) -> list[str]:
    """Say which of torch's defaults are others: requests fail of them, and nothing says why."""
    return [f"torch's {what} {value}" for what, value in later.items() if value != before[what]]


# Functions that a plugin registers with Python for good when it is loaded, which Python does not list.
#
# Exit handlers, functions around forks, audit hooks and searches for codecs can be added and not read back. So the
# functions that add one are replaced while a plugin is loaded, and note calls that its own package makes. What a
# library registers when the plugin imports it is the library's concern: torch, logging and multiprocessing do so.

ADDED = (
    (atexit, "register", "a function that runs when the process exits (atexit.register)"),
    (os, "register_at_fork", "a function that runs at every fork (os.register_at_fork)"),
    (sys, "addaudithook", "an audit hook (sys.addaudithook)"),
    (codecs, "register", "a search for codecs (codecs.register)"),
)
"""By module and function: what a call adds to the process."""


@contextmanager
def registrations(target: str) -> Iterator[list[str]]:
    """Yield a list that grows by what the package of a plugin's target registers meanwhile, once each."""
    package, found = target.partition(":")[0].partition(".")[0], list[str]()
    originals = [getattr(module, name) for module, name, _ in ADDED]
    for (module, name, what), original in zip(ADDED, originals, strict=True):
        setattr(module, name, _noting(original, package, what, found))
    try:
        yield found
    finally:
        for (module, name, _), original in zip(ADDED, originals, strict=True):
            # Another function stands there if the plugin replaced it, which `detect_monkeypatches` names.
            if getattr(getattr(module, name), "__wrapped__", None) is original:
                setattr(module, name, original)


def _noting(original: Any, package: str, what: str, found: list[str]) -> Callable[..., Any]:
    """Return a function that does the same: a plugin may keep it (`from atexit import register`)."""

    @wraps(original)
    def add(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals is globals():  # the kit watches a start, which watches too
            frame = frame.f_back
        caller = str(frame.f_globals.get("__name__", ""))
        if caller.partition(".")[0] == package and what not in found:
            found.append(what)
        return original(*args, **kwargs)

    return add
