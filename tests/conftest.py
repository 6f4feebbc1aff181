"""What holds for all tests."""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Triton kernels run on CPU in the interpreter, chosen when a kernel is defined: before anything imports one.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tensors are tiny: threads that wait for one another at a barrier only cost time, on a busy machine most of it. The
# processes that tests start inherit it.
# The caller may have set them. Processes are forked from one that imported everything, which must have one thread.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Tests start hundreds of processes, and each would compile all of Dovetail again: images of containers often say so.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
"""The first takes a quarter of the others' processor time for a window."""
LIGHT = {"DOVETAIL_GRAMMAR_BACKEND": "none", "DOVETAIL_BODY_PROCESSES": "0"}
"""Environment of servers that are asked for no grammar and no large body: a third of a start's processor time."""


# Reproducible, and without deadlines: tests make claims about results, not about this machine's load.
settings.register_profile(
    "dovetail", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("dovetail"), max_examples=500)

sys.path.insert(0, str(Path(__file__).parent / "warm"))
from quick_interpreter import quicken  # noqa: E402
from remembered_scans import remember_metadata, remember_plugins  # noqa: E402
from sampled_tests import beyond_samples  # noqa: E402
from time_box import add_options, rotate, skip_when_late  # noqa: E402
from warm_starts import WarmStarts  # noqa: E402

INSTALLED = metadata.entry_points()


@functools.cache
def entry_points(**wanted: str) -> metadata.EntryPoints:
    """As the library's, which reads the files of all installed packages each time: here a thousand tests ask."""
    return INSTALLED.select(**wanted)


metadata.entry_points = entry_points  # type: ignore[assignment]

STDERR = pytest.StashKey[int]()
ENDS = pytest.StashKey[float]()
WARM = pytest.StashKey[WarmStarts]()
COLD = (
    "tests/engine/test_process.py",
    "tests/models/test_loading_memory.py",
    "tests/packaging/test_release.py",
    "tests/packaging/test_stuck.py",
    "tests/packaging/test_thinning.py",
    "tests/plugins/test_commands.py",
    "tests/server/test_body_memory.py",
    "tests/server/test_e2e.py",
    "tests/server/test_exits.py",
    "tests/server/test_first_requests.py",
    "tests/server/test_signals.py",
    "tests/test_orphans.py",
)
"""Files whose claims are about how a process starts, ends or what it takes: theirs are started, never forked.

`--full` starts those of all files.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one switch between a contributor's suite and everything, and what bounds a run."""
    parser.addoption("--full", action="store_true", help="run also what is marked `full`, as `make test-all` does")
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Keep servers that are told no folder out of the data of whoever runs the tests; see `own_data` for each file."""
    settings.load_profile("nightly" if config.getoption("full") else "dovetail")
    # Examples are the same whatever is imported: Hypothesis would read the constants of all modules, in a second.
    providers._get_local_constants = lambda: providers._local_constants
    folder = tempfile.TemporaryDirectory(prefix="dovetail-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_DATA_HOME"] = folder.name
    config.stash[STDERR] = os.dup(2)  # capturing has not begun
    config.pluginmanager.unregister(name="faulthandler")  # see `end_when_stuck`
    config.stash[WARM] = WarmStarts()
    config.add_cleanup(config.stash[WARM].close)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Bound the test by its own time, where that is longer than the limit of all, and the run by its time."""
    skip_when_late(item)
    end_when_stuck(item.config, item)
    is_cold = item.config.getoption("full") or item.nodeid.partition("::")[0] in COLD
    item.config.stash[WARM].set(not is_cold)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Bound the teardown, too."""
    end_when_stuck(item.config, item)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Bound what comes after the last test, to the end of the process."""
    end_when_stuck(session.config)


def pytest_enter_pdb() -> None:
    """A debugger waits for its user."""
    faulthandler.cancel_dump_traceback_later()


def end_when_stuck(config: pytest.Config, item: pytest.Item | None = None) -> None:
    """Show all threads and end this process if it gets no further in time, or in a tenth more.

    That is `faulthandler_timeout` for a test, or as much more as `item` is given beyond what tests have by default. A
    new timer is a thread, which waits for the end of the one before: on a busy machine that takes longer than most
    tests, so a timer is kept for as many as it has time for. pytest's own, which is a new one for each test, is off.
    """
    limit = float(config.getini("faulthandler_timeout") or 0)
    if not limit:
        return
    marker = item.get_closest_marker("timeout") if item else None
    if marker is not None:
        given = marker.args[0] if marker.args else marker.kwargs["timeout"]
        limit += max(0.0, given - float(config.getini("timeout") or 0))
    now = time.monotonic()
    if not limit <= config.stash.get(ENDS, 0.0) - now <= 1.1 * limit:
        faulthandler.dump_traceback_later(1.1 * limit, exit=True, file=config.stash[STDERR])
        config.stash[ENDS] = now + 1.1 * limit


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> WarmStarts:
    """What forks processes instead of starting them; an environment's interpreter can be added."""
    return pytestconfig.stash[WARM]


@pytest.fixture(scope="session")
def keeps_bits() -> bool:
    """Whether a column of a product has the same bits wherever it stands; Triton's interpreter multiplies by NumPy.

    NumPy's library takes columns at the end by other instructions on some processors (AMD with AVX-512 is one).
    """
    import numpy as np

    left, right = (np.random.default_rng(seed).standard_normal((64, 64), dtype=np.float32) for seed in (0, 1))
    return all(np.array_equal(left @ np.roll(right, by, 1), np.roll(left @ right, by, 1)) for by in range(1, 64))


@pytest.fixture(autouse=True, scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files and batches of one file's servers are not there for another's, which would open them at their start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def light_servers() -> Iterator[dict[str, str]]:
    """Servers of this module's processes start without what compiles grammars and reads large bodies."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LIGHT.items():
            patch.setenv(name, value)
        yield LIGHT


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `light_servers`, for one test's."""
    for name, value in LIGHT.items():
        monkeypatch.setenv(name, value)


# What is collected stays until the end, as do the modules imported for it; the collector would look at all of it again.
gc.disable()


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's rounds, and let it run for the tests."""
    gc.freeze()
    gc.enable()
    remember_metadata()
    if "MUTATION_FOLDER" not in os.environ:  # there a scan may be at fault in one test, and not in the next
        remember_plugins()
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and os.environ.get("TRITON_INTERPRET") == "1":
        quicken(interpreter)


LONG = (
    "tests/storage/test_faults.py",
    "tests/storage/test_pauses.py",
    "tests/testing/test_builtins.py",
    "tests/server/test_resume.py",
    "tests/executor/test_rank_processes.py",
    "tests/server/test_ray.py",
    "tests/server/test_data_parallel.py",
    "tests/server/test_signals.py",
    "tests/storage/test_recovery.py",
    "tests/plugins/test_commands.py",
    "tests/playground/test_pages.py",
    "tests/playground/test_conversations.py",
    "tests/packaging/test_examples.py",
    "tests/compat/test_gateways.py",
    "tests/playground/test_keyboard.py",
    "tests/server/test_e2e.py",
    "tests/models/test_parity.py",
    "tests/grammar/test_jump.py",
    "tests/storage/test_postgres.py",
    "tests/engine/test_restart.py",
    "tests/docs/test_tutorials.py",
    "tests/server/test_ray_batch.py",
    "tests/compat/test_sglang_frontend.py",
    "tests/layers/test_quant_benches.py",
    "tests/engine/test_poison_isolation.py",
    "tests/warm/test_warm_starts.py",
)
"""Files that take 20 s or more: begun last, one would keep a process busy while others have nothing to do."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full`, run long files first, and skip tests marked `gpu` where there is no CUDA device.

    A test that is named with `::` runs, whatever its marks say.
    """
    for item in beyond_samples(items):
        item.add_marker(pytest.mark.full)
    if not config.getoption("full"):
        named = tuple(arg.partition("::")[2] for arg in config.args if "::" in arg)
        left_out = {item for item in items if item.get_closest_marker("full")}
        left_out = {item for item in left_out if not item.nodeid.partition("::")[2].startswith(named or ("::",))}
        if left_out:
            config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]
    rank = {file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(LONG)))
    rotate(config, items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only where a test needs it: the plugin core's own tests run without

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the processes that run tests, and with each the template that it forks others from."""
    config.stash[WARM].set(not config.getoption("full"))


TOGETHER = ("tests/compat/test_gateways.py", "tests/compat/test_sglang_frontend.py", "tests/compat/test_npm.py",
    "tests/compat/test_llm_comply.py")  # fmt: skip
"""Files that one process runs, for they share servers; each process that ran one of them would start its own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give files that share servers to one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER[0] if file in TOGETHER else file

    return Scheduling(config, log)


@pytest.fixture
def cuda_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start on CUDA leaves behind: the class that answers for such a device, which need not be there."""
    from dovetail.runtime.device import devices
    from dovetail_backends.devices.cuda import CudaDevice

    monkeypatch.setitem(devices.CLASSES, "cuda", CudaDevice)


LOGGERS = ("", "dovetail", "uvicorn", "uvicorn.access", "uvicorn.error")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def logs_and_signals_as_before() -> Iterator[None]:
    """Undo what a block does to the logs of this process and to its handlers of signals."""
    loggers, signals = [logging.getLogger(name) for name in LOGGERS], [signal.getsignal(number) for number in SIGNALS]
    before = [(one.level, one.propagate, [*one.handlers], [*one.filters]) for one in loggers]
    yield
    for number, handler in zip(SIGNALS, signals, strict=True):
        signal.signal(number, handler)
    for logger, (level, *others) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers, logger.filters = others


@pytest.fixture(autouse=True, scope="module")
def process_of_file_as_before() -> Iterator[None]:
    """Undo what servers of a whole file did: each one adds filters to the loggers of uvicorn, which keep them."""
    with logs_and_signals_as_before():
        yield


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Undo what commands and servers that a test ran in this process did to it."""
    with logs_and_signals_as_before():
        yield


CORE = pytest.StashKey[tuple[set[str], Any]]()


@pytest.fixture(autouse=True, scope="module")
def core_as_before(pytestconfig: pytest.Config) -> Iterator[None]:
    """No file of tests leaves a public attribute of Dovetail changed: others would fail for it, in one order only."""
    from dovetail.plugins.monkeypatches import detect_monkeypatches, snapshot

    imported = {name for name in sys.modules.copy() if name.startswith("dovetail")}  # threads may import
    names, before = pytestconfig.stash.get(CORE, (None, {}))
    if names != imported:  # a look at all of it takes as long as ten small tests: what a file found intact is kept
        before = {owner: held for owner, held in snapshot().items() if owner.startswith("dovetail")}
        pytestconfig.stash[CORE] = imported, before
    yield
    changed = [name for name in detect_monkeypatches(before) if not name.rpartition(".")[2].startswith("_")]
    if changed:  # what is new is not looked at: Triton's interpreter adds names to the modules of kernels
        had = {f"{owner.replace(':', '.')}.{name}" for owner, (held, _) in before.items() for name in held}
        changed = [name for name in changed if name in had]
    if changed:
        del pytestconfig.stash[CORE]  # the next file is not to blame
    assert not changed, f"left changed: {', '.join(changed)}"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser, for one file of tests: while it runs, this thread has an event loop of its own."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium here; install the distribution's package `chromium-headless-shell`, or `chromium`")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make setup`")
    flags = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()
