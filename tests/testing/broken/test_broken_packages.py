"""Installed packages with one fault each, found by name: the kit names every fault."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dovetail_testing import FakeSite, check_class, conformance_class

GROUP = "dovetail.reasoning_parsers.v1"


@pytest.fixture(autouse=True)
def usual_dtype() -> Iterator[None]:
    """One of the faults changes it, in this process too."""
    yield
    torch.set_default_dtype(torch.float32)


PARSER = """
from dataclasses import dataclass
from dovetail.contracts import FormatSpec, Markers, ReasoningParser

class Parser(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
"""
COMMON = "found or left or listing or child or twice or core or options or torch"
FAULTS = {
    "imports torch when installed": (
        {
            "acme_parser.py": PARSER,
            "sitecustomize.py": "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')",
        },
        "test_listing_imports_nothing",
        "torch is imported as soon as Python starts",
    ),
    "imports torch": (
        {"acme_parser.py": "import torch\n" + PARSER},
        "test_imports_no_torch",
        "loading it imports torch, which takes seconds",
    ),
    "does not import": (
        {"acme_parser.py": "import acme_missing\n" + PARSER},
        "test_it_is_found_and_implements_its_contract",
        "importing acme_parser raised ModuleNotFoundError: No module named 'acme_missing'",
    ),
    "no such attribute": (
        {"acme_parser.py": PARSER.replace("class Parser", "class Other")},
        "test_it_is_found_and_implements_its_contract",
        "acme_parser has no attribute 'Parser'",
    ),
    "leaves out a method": (
        {"acme_parser.py": PARSER.replace("def spec", "def format")},
        "test_it_is_found_and_implements_its_contract",
        "Parser does not implement spec",
    ),
    "loads in the main process only": (
        {
            "acme_parser.py": "import os\nfirst = os.environ.setdefault('ACME_PID', str(os.getpid()))\n"
            "if first != str(os.getpid()):\n    raise RuntimeError('already registered elsewhere')\n" + PARSER
        },
        "test_loads_in_a_child_process",
        "loading in a child process failed: PluginError: reasoning_parser 'acme' of acme 1.0: importing acme_parser "
        "raised RuntimeError: already registered elsewhere",
    ),
    "kills another process": (
        {
            "acme_parser.py": "import os, sys\nfirst = os.environ.setdefault('ACME_PID', str(os.getpid()))\n"
            "if first != str(os.getpid()):\n    sys.stderr.write('no licence')\n    os.kill(os.getpid(), 9)\n" + PARSER
        },
        "test_loads_in_a_child_process",
        "loading in a child process failed: the process ended with exit code -9: no licence",
    ),
    "cannot be made twice": (
        {
            "acme_parser.py": PARSER + "    made = 0\n    def __init__(self):\n        type(self).made += 1\n"
            "        if self.made > 1: raise RuntimeError('there is one already')\n"
        },
        "test_loads_twice",
        "loading it a second time failed: RuntimeError: there is one already",
    ),
    "mutates core": (
        {
            "acme_parser.py": PARSER + "import dovetail.sdk.formats.output as core\nbefore = core.FormatParser.feed\n"
            "core.FormatParser.feed = lambda self, *a, **k: before(self, *a, **k)\n"
        },
        "test_core_is_unchanged_after_load",
        "loading it changed the core: dovetail.sdk.formats.output.FormatParser.feed",
    ),
    "adds to a table of the core": (
        {"acme_parser.py": PARSER + "from dovetail.plugins.kinds import KINDS\nKINDS['acme'] = KINDS['model']\n"},
        "test_core_is_unchanged_after_load",
        "loading it changed the core: dovetail.plugins.kinds.KINDS",
    ),
    "leaves a thread": (
        {
            "acme_parser.py": "import threading\nthreading.Thread(target=threading.Event().wait, name='acme-poll', "
            "daemon=True).start()\n" + PARSER
        },
        "test_nothing_is_left_behind",
        "loading it leaves behind the thread 'acme-poll'",
    ),
    "leaves a process": (
        # Without a Popen object: the collector would warn of one that is forgotten, in whatever test runs then.
        {"acme_parser.py": "import os\nchild = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '3')\n" + PARSER},
        "test_nothing_is_left_behind",
        "loading it leaves behind the process ",
    ),
    "takes a signal": (
        {"acme_parser.py": "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n" + PARSER},
        "test_nothing_is_left_behind",
        "loading it leaves behind a handler of SIGUSR1",
    ),
    "changes torch's default": (
        {"acme_parser.py": "import torch\ntorch.set_default_dtype(torch.float64)\n" + PARSER},
        "test_nothing_is_left_behind",
        "loading it leaves behind torch's default dtype torch.float64",
    ),
    "options lost": (
        {
            "acme_parser.py": PARSER + "    @dataclass\n    class Options:\n        top_k: int = 4\n"
            "        def __post_init__(self): self.top_k = 4\n"
        },
        "test_options_round_trip",
        "option 'top_k' is lost: 9 was given and",
    ),
    "option without a default": (
        {"acme_parser.py": PARSER + "    @dataclass\n    class Options:\n        top_k: int\n"},
        "test_options_round_trip",
        "top_k has no default; every option needs one",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture
def tmp_path(place: Path) -> Path:
    """One folder for all tests, emptied: the kit's processes, which begin with `sys.path`, serve all of them."""
    shutil.rmtree(place)
    place.mkdir()
    return place


@pytest.fixture(autouse=True)
def reaped() -> Iterator[None]:
    """End and reap the process that a fault leaves behind: other tests look at this process' children."""
    yield
    for child in psutil.Process().children():
        if child.name() == "sleep":
            child.kill()
            child.wait()


def install(site: FakeSite, files: dict[str, str]) -> None:
    site.add("acme", "1.0", {GROUP: {"acme": "acme_parser:Parser"}}, files)


def test_a_right_package_passes(dovetail_site: FakeSite) -> None:
    """The package that the faults are made from has none."""
    install(dovetail_site, {"acme_parser.py": PARSER})
    report = check_class(conformance_class("reasoning_parser", "acme"), COMMON)
    assert report.passed, report.text()


@pytest.mark.first(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_fault(fault: str, dovetail_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with one fault fails the test for it, with a message that names it."""
    monkeypatch.delenv("ACME_PID", raising=False)
    files, test, message = FAULTS[fault]
    if "sitecustomize.py" in files:  # which a process reads when it starts
        dovetail_site = FakeSite(dovetail_site.root / "another")
        monkeypatch.syspath_prepend(str(dovetail_site.root))
    install(dovetail_site, files)
    attrs = {"options": {"top_k": 9}} if fault == "options lost" else {}
    # Only where the fault is about it: what this process loads stays, a changed core too.
    select = f"{test} or found" if " process" in fault and "leaves" not in fault else test
    report = check_class(conformance_class("reasoning_parser", "acme", **attrs), select)
    assert message in report.failures.get(test, ""), report.text()


def test_of_two_with_one_name_the_authors_is_tested(dovetail_site: FakeSite) -> None:
    """A model under a built-in's architecture is what its author's class tests by that name, not the built-in."""
    broken = (
        "from dovetail_models.llama import Llama\n\nclass Acme(Llama):\n    @staticmethod\n"
        "    def build(config, ctx):\n        raise RuntimeError('acme was built')\n"
    )
    entry_points = {"dovetail.models.v1": {"LlamaForCausalLM": "acme_llama:Acme"}}
    dovetail_site.add("acme-llama", "1.0", entry_points, {"acme_llama.py": broken})
    select = "test_builds_in_the_dtype_asked_for"
    by_name = check_class(conformance_class("model", "LlamaForCausalLM"), select)
    assert "acme was built" in by_name.failures[select]
    assert check_class(conformance_class("model", "dovetail-llm:LlamaForCausalLM"), select).passed


def test_a_name_of_several_packages_has_to_be_qualified(dovetail_site: FakeSite) -> None:
    """Where two packages provide the name, and Dovetail too, the kit says what to write instead of choosing one."""
    for name in ("acme", "other"):
        entry_points = {GROUP: {"qwen3": f"{name}_parser:Parser"}}
        dovetail_site.add(name, "1.0", entry_points, {f"{name}_parser.py": PARSER})
    report = check_class(conformance_class("reasoning_parser", "qwen3"), "found")
    assert "give name = 'acme:qwen3' or 'other:qwen3'" in report.text()


def test_a_processor_that_brings_torch_is_named(dovetail_site: FakeSite) -> None:
    """What an HTTP server loads of it imports torch, though the engine's part of the core would have it anyway."""
    module = "import torch\nfrom dovetail.contracts import LogitsProcessor\nclass Acme(LogitsProcessor): ...\n"
    group = {"dovetail.logits_processors.v1": {"acme": "acme_logits:Acme"}}
    dovetail_site.add("acme", "1.0", group, {"acme_logits.py": module})
    report = check_class(conformance_class("logits_processor", "acme"), "imports_no_torch")
    assert "loading it imports torch" in report.failures.get("test_imports_no_torch", ""), report.text()


def test_a_kernel_set_that_brings_torch_is_named(dovetail_site: FakeSite) -> None:
    """What is asked on every device imports nothing that only one of them needs."""
    module = (
        "import torch\nfrom dovetail.contracts import KernelSet\nclass Acme(KernelSet):\n"
        "    def serves(self, ask): return 'no'\n    def make(self, ask): ...\n"
    )
    dovetail_site.add(
        "acme", "1.0", {"dovetail.kernels.v1": {"acme": "acme_kernels:Acme"}}, {"acme_kernels.py": module}
    )
    report = check_class(conformance_class("kernels", "acme"), "asking_imports_no_kernel")
    assert "loading it imports torch" in report.failures.get("test_asking_imports_no_kernel", ""), report.text()


def test_an_api_that_knows_the_server_is_named(dovetail_site: FakeSite) -> None:
    """What the server keeps for itself is found as soon as a plugin imports it."""
    module = "import dovetail_server.errors.catalogue\nfrom dovetail.contracts import Api\nclass Acme(Api): ...\n"
    dovetail_site.add("acme", "1.0", {"dovetail.apis.v1": {"acme": "acme_api:Acme"}}, {"acme_api.py": module})
    report = check_class(conformance_class("api", "acme"), "know_the_server")
    assert "imports dovetail_server" in report.failures.get("test_does_not_know_the_server", ""), report.text()
