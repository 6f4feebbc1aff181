"""A server with parsers and a grammar backend, over the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Harness

from dovetail.plugins import Registry, make_plan
from dovetail.processing.processor import Processor
from dovetail.runtime.checkpoint.folder import ModelFolder


class WithGrammars(Harness):
    """Has the parsers of a Qwen3 model, and llguidance."""

    def make_ready(self) -> None:
        """Take requests."""
        plan = make_plan(Registry.scan(), reasoning_parser="qwen3", tool_parser="hermes", grammar_backend="llguidance")
        self.tools = Processor.load(self.settings, plan, ModelFolder(self.settings.folder, weights=False))
        super().make_ready()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Harness]:
    """A server with grammars, of its module."""
    running = WithGrammars(folder)
    yield running
    running.close()
