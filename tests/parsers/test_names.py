"""Every name under which SGLang and vLLM know a format is one of ours."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dovetail.plugins import Registry

PEERS = tomllib.loads((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("kind", ["reasoning_parser", "tool_parser"])
def test_a_name_of_a_peer_names_a_parser(kind: str, peer: str) -> None:
    """Whoever comes from there types the same name."""
    registry = Registry.scan()
    assert PEERS[peer][kind]
    for name in PEERS[peer][kind]:
        assert registry.resolve(kind, name).builtin, f"{peer} {PEERS[peer]['version']} calls a format {name}"
