"""Servers over scripted engines; the helpers beside this file are importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file

from harness import Harness, folder, make_harness
from package_apis import loose, loose_server, strange, strange_server
from seeing_server import seeing, seeing_folder, server

__all__ = [
    "folder",
    "loose",
    "loose_server",
    "make_harness",
    "seeing",
    "seeing_folder",
    "server",
    "strange",
    "strange_server",
]


@pytest.fixture(scope="session")
def plain_server(folder: Path) -> Iterator[Harness]:
    running = Harness(folder)
    yield running
    running.close()


@pytest.fixture(scope="session")
def thinking_server(folder: Path) -> Iterator[Harness]:
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    running = Harness(folder, reasoning=Qwen3Reasoning(), tools=HermesTools())
    yield running
    running.close()


@pytest.fixture
def harness(plain_server: Harness) -> Harness:
    """A server without parsers, over a fresh engine."""
    plain_server.reset()
    return plain_server


@pytest.fixture
def thinking(thinking_server: Harness) -> Harness:
    """A server with the parsers of a Qwen3 model, over a fresh engine."""
    thinking_server.reset()
    return thinking_server
