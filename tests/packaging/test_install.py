"""The built wheel beside a third party's, in a clean environment outside the source tree."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from clean_env import ROOT, CleanEnv

from dovetail.distribution import DISTRIBUTION

pytestmark = pytest.mark.install

EXAMPLE = ROOT / "docs/examples/dovetail-acme-parser"


def test_wheel_holds_the_manifests(wheel: Path) -> None:
    """The built-ins' facts can be read without importing them; what else is in it `test_release.py` says."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"dovetail_parsers/dovetail-plugins.json", "dovetail_backends/dovetail-plugins.json"} <= names


def test_installed_package_is_listed(clean: CleanEnv) -> None:
    """`dovetail plugin list --json` shows the third party's parser beside the built-ins, from its own package."""
    listing = json.loads(clean.run(str(clean.bin / "dovetail"), "plugin", "list", "--json"))
    assert listing["problems"] == []
    assert {item["state"] for item in listing["data"]} == {"found"}
    assert {item["location"] for item in listing["data"]} == {str(clean.site)}
    found = {(item["kind"], item["name"]): item for item in listing["data"]}
    acme = found["reasoning_parser", "acme-r2"]
    assert (acme["distribution"], acme["version"], acme["api"]) == ("dovetail-acme-parser", "1.0.0", 1)
    assert found["reasoning_parser", "qwen3"]["distribution"] == DISTRIBUTION
    assert found["attention_backend", "torch_native"]["aliases"] == ["sdpa", "torch-sdpa"]


def test_installed_package_is_accepted_by_name(clean: CleanEnv) -> None:
    """The name resolves, enters the plan, and loads in the server's role, with no change to Dovetail."""
    out = clean.python(
        "import sys",
        "from dovetail.plugins import PluginPlan, Registry, load, make_plan",
        "plan = make_plan(Registry.scan(), reasoning_parser='Acme_R2', device='cpu')",
        "plan = PluginPlan.decode(plan.encode())",
        "print(load(plan, 'api').get('reasoning_parser', 'acme-r2').__name__)",
        "print(load(plan, 'engine').all('reasoning_parser'), 'torch' in sys.modules)",
    )
    assert out == "AcmeR2\n[] False\n"


def test_example_is_small() -> None:
    """A reasoning parser in a package of its own takes at most 40 lines, pyproject included."""
    files = (EXAMPLE / "pyproject.toml", EXAMPLE / "dovetail_acme_parser.py")
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 40


def test_removed_entry_point_is_not_installed(clean: CleanEnv, tmp_path: Path) -> None:
    """With a built-in's line gone from the installed metadata, its name is refused and the rest is offered."""
    (metadata,) = clean.site.glob("dovetail_llm-*.dist-info/entry_points.txt")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    flags = ("--model-path", str(tmp_path), "--load-format", "dummy", "--reasoning-parser", "qwen3")
    before = metadata.read_text()
    metadata.write_text("\n".join(line for line in before.splitlines() if not line.startswith("qwen3 =")))
    try:
        out = clean.run(str(clean.bin / "dovetail"), "serve", *flags, code=2)
    finally:
        metadata.write_text(before)
    assert "--reasoning-parser 'qwen3': not installed; installed: acme-r2, " in out
    assert ", deepseek-r1, " in out
    assert "Traceback" not in out
