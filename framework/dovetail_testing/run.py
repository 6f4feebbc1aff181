"""Running a conformance class without writing a test file: what `dovetail plugin check` does."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.registry import Registry
from dovetail_testing.checks import COMPARED, UNLOADED

if TYPE_CHECKING:
    import pytest

    from dovetail_testing.conformance.base import Conformance

_pending: dict[str, type] = {}
_numbers = itertools.count()
_PLUGINS = ("dovetail_testing.fixtures", "no:cacheprovider", "no:faulthandler", "no:unraisableexception", "no:warnings")
"""The last but one only warns, and collects the garbage of the whole process ten times for that. The last one keeps
each warning of what is deprecated, which looks like a leak, and lets no filter make an error of it."""
_TEST_FILE = "from dovetail_testing.run import pending\n\nTestPlugin = pending({!r})\n"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one test: `passed`, `failed`, `skipped` or `xfailed`; `message` says why."""

    test: str
    claim: str
    state: str
    message: str = ""


@dataclass(slots=True)
class Report:
    """The outcome of every test of a class, in order."""

    outcomes: list[CaseResult] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, str]:
        """Messages of the failed tests by name."""
        return {outcome.test: outcome.message for outcome in self.outcomes if outcome.state == "failed"}

    @property
    def passed(self) -> bool:
        """Whether tests ran and none failed."""
        return bool(self.outcomes) and not self.failures

    def count(self, state: str) -> int:
        """Number of tests in a state."""
        return sum(outcome.state == state for outcome in self.outcomes)

    def text(self) -> str:
        """Return one line per test and a summary; why a plugin cannot be loaded is said once."""
        lines, obstacle = [], ""
        for outcome in self.outcomes:
            lines.append(f"{outcome.state:>7}  {outcome.claim or outcome.test}")
            if outcome.message:
                is_known = obstacle and obstacle in outcome.message
                lines.append(f"         {outcome.test}: {'for the same reason' if is_known else outcome.message}")
            if outcome.message.startswith(UNLOADED):
                obstacle = outcome.message.removeprefix(UNLOADED)
        counted = [f"{self.count(state)} {state}" for state in ("passed", "failed", "skipped", "xfailed")]
        lines.append(", ".join(part for part in counted if not part.startswith("0 ")) or "no tests ran")
        return "\n".join(lines)


def conformance_class(kind: str, name: str | None = None, **attrs: Any) -> type[Conformance]:
    """Make the conformance class of one plugin.

    Args:
        kind: A key of `KINDS`.
        name: The plugin's name as registered; None where `plugin_class` is in `attrs`.
        attrs: Further attributes of the class: `plugin_class`, `samples`, `options`, …

    Raises:
        ConfigError: There is no such kind, no such attribute, or pytest is not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r}: unknown; possible: {', '.join(KINDS)}")
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the conformance kit needs pytest, which is not installed; run: pip install pytest")
    module, _, attribute = KINDS[kind].kit.partition(":")
    base: type[Conformance] = getattr(import_module(module), attribute)
    unknown = [attr for attr in attrs if not hasattr(base, attr)]
    if unknown:
        raise ConfigError(f"{base.__name__} has no attribute {unknown[0]!r}")
    given = {**attrs, **({} if name is None else {"name": name})}
    return type(f"Test{base.__name__}", (base,), {**given, "__module__": __name__, "__doc__": base.__doc__})


def run_conformance(
    kind: str, name: str, attrs: Mapping[str, Any] | None = None, *, stream: TextIO | None = None
) -> int:
    """Run every standard test on an installed plugin and print what came out.

    Args:
        kind: A key of `KINDS`.
        name: As registered, an alias, or `distribution:name`.
        attrs: As for `conformance_class`. Without them the classes are run that the plugin's package brings for it,
            with its samples and configurations, if there are any.
        stream: Where to print; standard output if not given.

    Returns:
        0 if nothing failed, 1 otherwise.

    Raises:
        PluginError: Its package's classes cannot be used.
    """
    plain = conformance_class(kind, name, **(attrs or {}))
    from dovetail_testing.own import own_classes  # the kit needs pytest, which may be missing until here

    try:
        record = Registry.scan().resolve(kind, name)
    except PluginError:  # which the kit's first test says in its report
        record = None
    classes = own_classes(record) if record is not None and attrs is None else []
    has_failed = False
    for cls in classes or [plain]:
        is_own = cls is not plain
        report = check_class(type(cls.__name__, (cls,), {"name": name, "__doc__": cls.__doc__}) if is_own else cls)
        title = f"{kind} {name} as {cls.__name__}" if is_own else f"{kind} {name}"
        print(f"{title}\n{report.text()}", file=stream or sys.stdout)
        has_failed |= not report.passed
    return 1 if has_failed else 0


def check_class(cls: type[Conformance], select: str = "") -> Report:
    """Run a conformance class in this process and return what came out.

    Args:
        cls: The class.
        select: As pytest's `-k`: an expression over test names.
    """
    import pytest

    recorder = _Recorder(cls)
    module = f"dovetail_check_{next(_numbers)}"
    _pending[module] = cls
    output = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="dovetail-check-") as folder, _own_pytest():
        file = Path(folder) / f"{module}.py"
        file.write_text(_TEST_FILE.format(module), encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        arguments = ["-c", f"{folder}/pytest.ini", f"--rootdir={folder}", f"--confcutdir={folder}", str(file)]
        arguments += ["--assert=plain", "--import-mode=importlib", "--capture=sys", f"--basetemp={folder}/tmp"]
        arguments += ["--tb=native", *(f"-p{plugin}" for plugin in _PLUGINS)]
        arguments += ["-k", select] if select else []
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = pytest.main(arguments, plugins=[recorder])
    del _pending[module]
    sys.modules.pop(module, None)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        recorder.report.outcomes.append(CaseResult("collection", "", "failed", output.getvalue().strip()))
    return recorder.report


def pending(token: str) -> type:
    """Return the class that a test file made by `check_class` stands for."""
    return _pending[token]


class _Recorder:
    """A pytest plugin that notes the outcome of each test."""

    def __init__(self, cls: type) -> None:
        self.report = Report()
        self._cls = cls

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome; a passed set-up or tear-down is none."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2]
        claim = (inspect.getdoc(getattr(self._cls, name.partition("[")[0], None)) or "").partition("\n")[0]
        bracket = name.find("[")
        claim += f" {name[bracket:]}" if claim and bracket >= 0 else ""
        xfail = getattr(report, "wasxfail", None)
        state = "xfailed" if xfail is not None else report.outcome
        self.report.outcomes.append(CaseResult(name, claim, state, xfail if xfail is not None else _message(report)))


def _message(report: pytest.TestReport) -> str:
    if report.passed:
        return "; ".join(f"{name}: {value}" for name, value in report.user_properties if name == COMPARED)
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    if crash is None or text.startswith("AssertionError: "):
        return text.removeprefix("AssertionError: ")
    return f"{text} ({crash.path}:{crash.lineno})"  # what the kit did not foresee is found by its place alone


@contextlib.contextmanager
def _own_pytest() -> Iterator[None]:
    """Keep what a user configured for pytest, and plugins installed for other purposes, out of the run."""
    before = {name: os.environ.pop(name, None) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    before["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
