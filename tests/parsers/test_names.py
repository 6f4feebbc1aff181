"""Every name under which SGLang and vLLM know a format is one of ours."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dovetail.plugins import Registry

PEERS = tomllib.loads((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))
CASES = [
    (kind, name, peer)
    for peer, facts in PEERS.items()
    for kind in ("reasoning_parser", "tool_parser")
    for name in facts[kind]
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.scan()


@pytest.mark.parametrize(("kind", "name", "peer"), CASES)
def test_a_name_of_a_peer_names_a_parser(kind: str, name: str, peer: str, registry: Registry) -> None:
    """Whoever comes from there types the same name."""
    assert registry.resolve(kind, name).builtin, f"{peer} {PEERS[peer]['version']} calls a format {name}"
