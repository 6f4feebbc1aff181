"""Time limits, monkeypatches and adapters: what keeps a plugin from taking the server with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import torch

import dovetail.text
from dovetail.contracts.errors import PluginError
from dovetail.plugins import Registry, adapters, kinds, load, make_plan
from dovetail.plugins.monkeypatches import detect_monkeypatches, watching
from dovetail.plugins.time_limit import PluginTimeout, time_limit
from dovetail_testing.site import FakeSite

PARSER = """
import dovetail.sdk.formats.output, dovetail.plugins.kinds, dovetail.contracts.errors
from dovetail.contracts import FormatSpec, ReasoningParser
{before}
class Parser(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec()
"""


def load_parser(site: FakeSite, before: str) -> list[str]:
    """Load a parser whose module does something; the report of monkeypatches."""
    files = {"acme_parser.py": PARSER.format(before=before)}
    site.add("acme", "1.2", {"dovetail.reasoning_parsers.v1": {"acme": "acme_parser:Parser"}}, files)
    return load(make_plan(Registry.scan(path=[str(site.root)]), reasoning_parser="acme"), "api").monkeypatches


def test_a_plugin_that_changes_nothing_is_silent(site: FakeSite) -> None:
    """Importing core modules, which sets attributes of their packages, is no change."""
    assert load_parser(site, "import dovetail.sdk.formats.json_calls, dovetail.plugins.lock, dovetail_testing") == []


@pytest.mark.parametrize(
    ("patch", "restore", "changed"),
    [
        ("dovetail.sdk.formats.output.fold = print", "fold", "dovetail.sdk.formats.output.fold"),
        ("dovetail.sdk.formats.output.extra = 5", "extra", "dovetail.sdk.formats.output.extra"),
        (
            "dovetail.sdk.formats.output.FormatParser.feed = lambda *a: []",
            "FormatParser.feed",
            "dovetail.sdk.formats.output.FormatParser.feed",
        ),
        (
            "dovetail.sdk.formats.output.FormatParser.__init__ = lambda *a: None",
            "FormatParser.__init__",
            "dovetail.sdk.formats.output.FormatParser.__init__",
        ),
        ("dovetail.plugins.kinds.KINDS['acme'] = 1", "KINDS", "dovetail.plugins.kinds.KINDS"),
    ],
)
def test_what_a_plugin_changed_is_named(
    site: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patch: str,
    restore: str,
    changed: str,
) -> None:
    """A replaced function, a new attribute, a patched method and an edited table are logged with the plugin."""
    from dovetail.sdk.formats import output

    owner = output.FormatParser if "." in restore else output
    attr = restore.rpartition(".")[2]
    if restore == "KINDS":
        monkeypatch.setitem(kinds.KINDS, "acme", kinds.KINDS["model"])
        kinds.KINDS.pop("acme")
    else:  # so that it is put back
        monkeypatch.setattr(owner, attr, getattr(owner, attr, None), raising=False)
        if restore == "extra":
            delattr(owner, attr)
    with caplog.at_level("WARNING", "dovetail.plugins"):
        (line,) = load_parser(site, patch)
    assert line == f"reasoning_parser 'acme' of acme 1.2 changed {changed} of Dovetail itself"
    assert line in caplog.text


@pytest.mark.parametrize(
    ("patch", "changed"),
    [("fold = print", "fold"), ("Reader.feed = lambda *a: []", "Reader.feed"), ("TABLE['x'] = 1", "TABLE")],
)
def test_what_a_plugin_is_the_first_to_import_is_watched_too(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patch: str, changed: str
) -> None:
    """The module is held as its own code left it, before the plugin goes on."""
    name = f"first_{changed.replace('.', '_').lower()}"
    code = "TABLE = {'a': 1}\ndef fold(): ...\nclass Reader:\n    def feed(self): ...\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(dovetail.text, "__path__", [*dovetail.text.__path__, str(tmp_path)])
    (line,) = load_parser(site, f"import dovetail.text.{name} as first; first.{patch}")
    assert line == f"reasoning_parser 'acme' of acme 1.2 changed dovetail.text.{name}.{changed} of Dovetail itself"


def test_two_that_watch_find_modules_once(site: FakeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kit watches while the loader does: a core module that is first imported then is found, and held by both."""
    (tmp_path / "first_of_two.py").write_text("TABLE = {'a': 1}\n")
    monkeypatch.setattr(dovetail.text, "__path__", [*dovetail.text.__path__, str(tmp_path)])
    with watching() as outer, watching() as inner:
        import_module("dovetail.text.first_of_two").TABLE["b"] = 2
    assert [detect_monkeypatches(held) for held in (outer, inner)] == [["dovetail.text.first_of_two.TABLE"]] * 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import json; json.dumps = repr", "changed json.dumps, which all code"),
        ("import sys; sys.setrecursionlimit(1234)", "left another recursion limit behind"),
        ("import sys, io; sys.stdout = io.StringIO()", "left another standard output behind"),
        ("import signal; signal.signal(signal.SIGUSR2, print)", "left a handler of SIGUSR2 behind"),
        ("import torch; torch.set_default_dtype(torch.float64)", "left torch's default dtype torch.float64 behind"),
    ],
)
def test_what_all_code_of_a_process_shares_is_watched(
    site: FakeSite, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    """A start names the plugin that changes it."""
    before = json.dumps, sys.getrecursionlimit(), sys.stdout, signal.getsignal(signal.SIGUSR2)
    try:
        (line,) = load_parser(site, code)
    finally:
        json.dumps, sys.stdout = before[0], before[2]
        sys.setrecursionlimit(before[1])
        signal.signal(signal.SIGUSR2, before[3])
        torch.set_default_dtype(torch.float32)
    assert line.startswith(f"reasoning_parser 'acme' of acme 1.2 {said}")
    assert line in caplog.text


def test_a_default_of_torch_that_a_plugin_sets_when_it_is_made_ends_the_start(site: FakeSite) -> None:
    """Or every later request would fail and name nobody."""
    files = {"acme_parser.py": PARSER.format(before="")}
    site.add("acme", "1.2", {"dovetail.reasoning_parsers.v1": {"acme": "acme_parser:Parser"}}, files)
    loaded = load(make_plan(Registry.scan(path=[str(site.root)]), reasoning_parser="acme"), "api")
    loaded.check_torch()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(PluginError, match=r"^reasoning_parser 'acme' of acme 1.2 left torch's default dtype torch"):
            loaded.check_torch()
    finally:
        torch.set_default_dtype(torch.float32)


def test_names_that_look_alike_are_one(site: FakeSite) -> None:
    """Two forms of Unicode of one text: as with `_` and `-`, the two plugins are in each other's way."""
    assert kinds.normalise("tool_parser", "\u00e9cole") == kinds.normalise("tool_parser", "e\u0301cole")
    assert kinds.normalise("model", "\u00c9cole") == kinds.normalise("model", "E\u0301cole")


def test_time_limit_lets_quick_code_pass() -> None:
    """Within the limit nothing happens, nested limits included, and an exception passes unchanged."""
    with time_limit("outer", 60), time_limit("inner", 60):
        time.sleep(0.01)
    with time_limit("none", 0):
        pass
    with pytest.raises(KeyError), time_limit("it", 60):
        raise KeyError("x")


def test_time_limit_interrupts_a_lock() -> None:
    """Waiting for a lock is interrupted, and the lock's waiter is named."""
    lock = threading.Lock()
    lock.acquire()
    named = r"^acme did not end within 0\.1 s; fix or disable the plugin"
    with pytest.raises(PluginTimeout, match=named), time_limit("acme", 0.1):
        lock.acquire()


def test_an_outer_limit_and_other_alarms_keep_their_own() -> None:
    """The outer of two limits is named when it is over, and an alarm of somebody else reaches its own handler."""
    with pytest.raises(PluginTimeout, match=r"^outer did not end"), time_limit("outer", 0.1), time_limit("inner", 60):
        time.sleep(60)
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:
        with time_limit("acme", 60):
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard == [signal.SIGALRM]


def test_outside_the_main_thread_the_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    """In another thread nothing is interrupted; the plugin is named while it still runs."""

    is_named = threading.Event()

    def work() -> bool:
        with time_limit("acme", 0.05):
            return is_named.wait(60)

    with caplog.at_level("ERROR", "dovetail.plugins"), ThreadPoolExecutor(1) as threads:
        running = threads.submit(work)
        while "acme did not end within 0.05 s" not in caplog.text:
            assert not running.done()
            time.sleep(0.01)
        is_named.set()
        assert running.result()


def test_what_cannot_be_interrupted_ends_the_process() -> None:
    """Code that no signal reaches is ended after the grace period, with the message and exit code 2."""
    code = (
        "import signal, time\nfrom dovetail.plugins import time_limit\ntime_limit.GRACE_S = 0.2\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "with time_limit.time_limit('acme', 0.1):\n    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "dovetail: error: acme did not end within 0.1 s; fix or disable the plugin, or raise --plugin-timeout\n"
    )


OLD = """
class Old:
    begin, end = "<old>", "</old>"
"""
ADAPTERS = """
from dovetail.contracts import FormatSpec, Markers, ReasoningParser

def to_v2(old):
    if not hasattr(old, "begin"):
        raise ValueError("no begin")
    class Adapted(ReasoningParser):
        def spec(self, tokenizer, template, request):
            return FormatSpec(reasoning=Markers(old.begin, old.end))
    return Adapted
"""


@pytest.fixture
def second_api(monkeypatch: pytest.MonkeyPatch, site: FakeSite) -> None:
    """Make believe that reasoning parsers are at API 2 and that API 1 is adapted."""
    kind = kinds.KINDS["reasoning_parser"]._replace(api=2, oldest_api=1)
    monkeypatch.setitem(kinds.KINDS, "reasoning_parser", kind)
    monkeypatch.setitem(kinds._KIND_OF_GROUP, kind.group, kind)
    monkeypatch.setitem(adapters.ADAPTERS, ("reasoning_parser", 1), "acme_adapters:to_v2")
    site.add("adapters", files={"acme_adapters.py": ADAPTERS})


def test_the_previous_api_is_adapted(site: FakeSite, second_api: None) -> None:
    """A plugin of API N-1 is listed as adapted, loads, and does what it did; N+1 and N-2 are refused."""
    groups = {f"dovetail.reasoning_parsers.v{n}": {f"v{n}": "acme_old:Old"} for n in (0, 1, 3)}
    site.add("acme", "1.0", groups, {"acme_old.py": OLD})
    registry = Registry.scan(path=[str(site.root)])
    record = registry.resolve("reasoning_parser", "v1")
    assert record.reason == "made for API 1 of reasoning_parser; used through an adapter"
    plan = make_plan(registry, reasoning_parser="v1")
    parser = load(plan, "api").get("reasoning_parser", "v1")()
    assert parser.spec(None, None, None).reasoning.start == "<old>"
    for name in ("v0", "v3"):
        with pytest.raises(PluginError, match="this dovetail speaks 1 to 2"):
            registry.resolve("reasoning_parser", name)


def test_of_two_apis_under_one_name_the_newest_is_taken(site: FakeSite, second_api: None) -> None:
    """A package that registers a name for both API versions is used at the newer one, without an adapter."""
    groups = {f"dovetail.reasoning_parsers.v{n}": {"both": f"acme_both:V{n}"} for n in (1, 2)}
    site.add("acme", "1.0", groups)
    assert Registry.scan(path=[str(site.root)]).resolve("reasoning_parser", "both").target == "acme_both:V2"


def test_an_adapter_that_fails_names_the_plugin(site: FakeSite, second_api: None) -> None:
    """What an old plugin lacks is reported as a fault of the plugin."""
    site.add(
        "acme", "1.0", {"dovetail.reasoning_parsers.v1": {"v1": "acme_odd:Old"}}, {"acme_odd.py": "class Old: ..."}
    )
    plan = make_plan(Registry.scan(path=[str(site.root)]), reasoning_parser="v1")
    with pytest.raises(PluginError) as caught:
        load(plan, "api")
    assert str(caught.value) == (
        "reasoning_parser 'v1' of acme 1.0: adapting it from API 1 raised ValueError: no begin; upgrade acme"
    )


def test_every_supported_version_has_its_adapters() -> None:
    """No kind claims to speak an old version without a way to read it."""
    needed = {(kind.name, step) for kind in kinds.KINDS.values() for step in range(kind.oldest_api, kind.api)}
    assert needed <= adapters.ADAPTERS.keys()
