"""Fixtures for tests of plugins, loaded by pytest through the `pytest11` entry point wherever Dovetail is installed.

Importing this module imports nothing heavy: each fixture imports what it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail_testing.checks import COMPARED

if TYPE_CHECKING:
    from dovetail.text.tokenizer.tokenizer import Tokenizer
    from dovetail_testing.site import FakeSite


def pytest_configure(config: pytest.Config) -> None:
    """Register the kit's marker."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_exception_interact(call: pytest.CallInfo[Any], report: pytest.CollectReport | pytest.TestReport) -> None:
    """Say in the report of a file that cannot be imported where a name of Dovetail is now."""
    from dovetail.plugins.moved import where_now

    errors = [call.excinfo.value, call.excinfo.value.__cause__] if call.excinfo is not None else []
    if moved := next((text for error in errors if error is not None and (text := where_now(error))), ""):
        report.sections.append(("dovetail", moved))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what tests of kernel sets have compared: a name that no operation has is not among it."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == COMPARED:
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[0]} {COMPARED}: {value}")


@pytest.fixture
def dovetail_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A `site-packages` of made-up distributions at the head of `sys.path`; what is imported from it is forgotten."""
    from dovetail_testing.site import FakeSite

    fake = FakeSite(tmp_path / "site")
    monkeypatch.syspath_prepend(str(fake.root))
    before = set(sys.modules)
    yield fake
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        places = [
            getattr(module, "__file__", None),
            *(getattr(module, "__path__", None) or ()),
        ]  # some have no file
        if any(str(place).startswith(str(tmp_path)) for place in places):
            del sys.modules[name]


@pytest.fixture(scope="session")
def dovetail_tokenizer() -> Tokenizer:
    """A tiny byte-level BPE tokenizer, whose added tokens are the markers that many formats use."""
    from dovetail_testing.vocabularies import byte_level

    return byte_level()


@pytest.fixture(scope="session")
def dovetail_tokenizer_fallback() -> Tokenizer:
    """A tiny sentencepiece-like tokenizer with byte fallback; markers are spelled out in several tokens."""
    from dovetail_testing.vocabularies import byte_fallback

    return byte_fallback()


@pytest.fixture(scope="session")
def dovetail_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make tiny random checkpoints: `dovetail_tiny_model("Qwen3ForCausalLM", head_dim=32)` returns a folder.

    Equal arguments give the same folder.
    """
    made: dict[str, Path] = {}

    def make(architecture: str, **changes: Any) -> Path:
        from dovetail_testing.models import make_model

        key = f"{architecture} {sorted(changes.items())}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(architecture), architecture, **changes)
        return made[key]

    return make
