"""The documentation agrees with the code: names and examples."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from dovetail.plugins import PluginState, hookspecs
from dovetail.plugins.kinds import KINDS, ROLES
from dovetail.plugins.scan import PluginFacts, parse_manifest

ROOT = Path(__file__).parents[2]
PLUGINS = "".join(
    (ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("plugins", "plugins-manifest", "plugins-hooks")
)


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_every_kind_state_role_and_fact_is_documented() -> None:
    """The pages on plugins name each kind with its group and contract, each state, role and manifest fact."""
    for kind in KINDS.values():
        assert f"| `{kind.name}` | `{kind.entry_point_group}` |" in PLUGINS
        if kind.contract is not None:
            assert f"`dovetail.contracts.{kind.contract.partition(':')[2]}`" in PLUGINS
    for word in (*PluginState, *ROLES, *PluginFacts._fields):
        assert f"`{word}`" in PLUGINS, word


def test_every_hook_is_documented() -> None:
    """The pages on plugins name each hook."""
    hooks = [name for name, f in vars(hookspecs).items() if inspect.isfunction(f) and name.startswith("dovetail_")]
    assert [name for name in hooks if f"`{name}`" not in PLUGINS] == []


def test_the_documented_manifest_is_valid() -> None:
    """The manifest shown is one that Dovetail reads."""
    (block,) = blocks(PLUGINS, "json")
    facts = parse_manifest(json.loads(block))["attention_backend", "acme-fast"]
    assert facts.matches == {"device": ("cuda",), "architecture": ("Llama*", "Qwen*")}


def test_the_documented_code_runs() -> None:
    """The Python blocks of the pages on plugins run as they stand."""
    for block in blocks(PLUGINS, "python"):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_documented_package_is_the_example() -> None:
    """The package shown is the example's, short of its description."""
    shown = tomllib.loads(blocks(PLUGINS, "toml")[0])
    real = tomllib.loads((ROOT / "docs/examples/dovetail-acme-parser/pyproject.toml").read_text(encoding="utf-8"))
    del real["project"]["description"]
    assert shown == real
