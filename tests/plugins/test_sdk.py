"""The rooms that plugins stand on: what they import, and what is said of a package that imports others."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.plugins import core_imports
from dovetail.plugins.core_imports import private_imports
from dovetail.plugins.registry import Registry
from dovetail.processing.prepare import prepare
from dovetail_server.settings.serve import ServeSettings
from dovetail_testing.site import FakeSite

LIGHT = ("checkpoint", "config", "expressions", "masks", "rope_config", "schemas.structural")
FORMATS = ("call_grammar", "json_calls", "machine", "plain", "reply_grammar", "tagged_values")


def test_what_needs_no_torch_imports_none() -> None:
    """Formats, schemas, masks and reading of configurations are used by processes that have no torch."""
    names = [*(f"dovetail.sdk.{name}" for name in LIGHT), *(f"dovetail.sdk.formats.{name}" for name in FORMATS)]
    code = f"import sys\nfrom importlib import import_module\nfor name in {names}: import_module(name)\n"
    subprocess.run([sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from dovetail.contracts import ToolParser\nfrom dovetail.sdk.formats.json_calls import JsonCalls\n", []),
        ("from dovetail import LLM, contracts, sdk\nimport dovetail\n", []),
        ("import dovetail.text.parsing.output\n", ["dovetail.text.parsing.output (acme_private.py)"]),
        ("from dovetail import messages\n", ["dovetail.messages (acme_private.py)"]),
        ("def late():\n    from dovetail.sdkx import y\n", ["dovetail.sdkx (acme_private.py)"]),
        ("from dovetail.plugins import hookspecs, records\n", ["dovetail.plugins (acme_private.py)"]),
        ("from dovetail.plugins import hookspecs\n", []),
        (
            "import importlib\nimportlib.import_module('dovetail.cache.radix')\n",
            ["dovetail.cache.radix (acme_private.py)"],
        ),
        (
            "def late(name):\n    __import__('dovetail.sdk.masks')\n    __import__(name), __import__('dovetails.x')\n",
            [],
        ),
        ("def broken(:\n", []),
    ],
)
def test_private_imports_are_found(source: str, found: list[str], dovetail_site: FakeSite) -> None:
    """Wherever in a file they stand; what is public is not one, nor is what only begins as its name does."""
    (dovetail_site.root / "acme_private.py").write_text(source)
    dovetail_site.add("acme-private", "1.0", {"dovetail.hooks.v1": {"acme": "acme_private:plugin"}})
    (record,) = (r for r in Registry.scan().sorted() if r.distribution == "acme-private")
    assert private_imports(record) == found


@pytest.mark.parametrize("line", ["from dovetail_acme.dovetail_part import y", "NAME = 'dovetail-acme dovetail'"])
def test_only_files_with_an_import_of_the_core_are_parsed(
    line: str, dovetail_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose own name begins as the core's does names itself everywhere, and may be large."""
    (dovetail_site.root / "dovetail_acme").mkdir()
    (dovetail_site.root / "dovetail_acme" / "__init__.py").write_text(line)
    (dovetail_site.root / "dovetail_acme" / "deep.py").write_text("from dovetail \\\n    import messages\n")
    dovetail_site.add("dovetail-acme", "1.0", {"dovetail.hooks.v1": {"acme": "dovetail_acme:plugin"}})
    (record,) = (r for r in Registry.scan().sorted() if r.distribution == "dovetail-acme")
    parsed, parse = [], ast.parse
    monkeypatch.setattr(core_imports.ast, "parse", lambda text: parsed.append(text) or parse(text))
    assert private_imports(record) == ["dovetail.messages (deep.py)"]
    assert len(parsed) == 1


def test_of_a_namespace_its_own_part_is_read(dovetail_site: FakeSite) -> None:
    """Other packages have theirs, and what those import is not this one's."""
    for name, line in (("own", "import dovetail.messages"), ("other", "import dovetail.runtime")):
        (dovetail_site.root / "acme" / name).mkdir(parents=True)
        (dovetail_site.root / "acme" / name / "__init__.py").touch()
        (dovetail_site.root / "acme" / name / f"{name}.py").write_text(line)
    dovetail_site.add("acme-own", "1.0", {"dovetail.hooks.v1": {"acme": "acme.own.hooks:plugin"}})
    (record,) = (r for r in Registry.scan().sorted() if r.distribution == "acme-own")
    assert private_imports(record) == ["dovetail.messages (own.py)"]


def test_each_package_of_a_plugin_folder_and_of_a_distribution_is_read(
    dovetail_site: FakeSite, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A distribution may have several, and a plugin that is not installed may be a folder."""
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)
    parser = "from dovetail.contracts import FormatSpec, ReasoningParser\nclass A(ReasoningParser):\n"
    spec = "    def spec(self, tokenizer, template, request):\n        return FormatSpec()\n"
    files = {"acme_a.py": f"import dovetail.text.inline\n{parser}{spec}", "acme_b.py": "import dovetail.sdk\n"}
    points = {"dovetail.reasoning_parsers.v1": {"a": "acme_a:A"}, "dovetail.schedule_policies.v1": {"b": "acme_b:B"}}
    dovetail_site.add("acme", "1.0", points, files)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text("from .late import dovetail_process_start\n")
    (tmp_path / "folder" / "late.py").write_text(
        "import dovetail.messages\nfrom dovetail.contracts import hookimpl\n"
        "@hookimpl\ndef dovetail_process_start(ctx):\n    pass\n"
    )
    given = {"reasoning_parser": "a", "schedule_policy": "b", "plugin_file": [str(tmp_path / "folder")]}
    prepare(ServeSettings(**given, device="cpu"))
    assert [line.split(" imports ")[1].split(", ")[0] for line in caplog.messages if " imports " in line] == [
        "dovetail.text.inline (acme_a.py)",
        "dovetail.messages (late.py)",
    ]


def test_a_start_names_what_is_imported_beside_contracts_and_sdk(
    dovetail_site: FakeSite, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for each package that is used, before anything of it is imported; built-ins and others give none."""
    monkeypatch.setattr(logging.getLogger("dovetail"), "propagate", True)
    parser = "from dovetail.contracts import FormatSpec, ReasoningParser\nclass P(ReasoningParser):\n{}"
    late = "    def spec(self, tokenizer, template, request):\n        {}\n        return FormatSpec()\n"
    for name, line in (("deep", "from dovetail.text.inline import Inline"), ("sound", "import dovetail.sdk.masks")):
        files = {f"acme_{name}.py": parser.format(late.format(line))}
        dovetail_site.add(f"acme-{name}", "1.0", {"dovetail.reasoning_parsers.v1": {name: f"acme_{name}:P"}}, files)
    for name in ("deep", "sound", "qwen3"):
        prepare(ServeSettings(reasoning_parser=name, device="cpu"))
    said = [line for line in caplog.messages if " imports " in line]
    assert said == [
        "reasoning_parser 'deep' of acme-deep 1.0 imports dovetail.text.inline (acme_deep.py), which any release of "
        "Dovetail may move or change; use dovetail.contracts and dovetail.sdk."
    ]
