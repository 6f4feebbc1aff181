"""The rooms that plugins stand on: what they import, and what is said of a package that imports others."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

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
        ("def broken(:\n", []),
    ],
)
def test_private_imports_are_found(source: str, found: list[str], dovetail_site: FakeSite) -> None:
    """Wherever in a file they stand; what is public is not one, nor is what only begins as its name does."""
    (dovetail_site.root / "acme_private.py").write_text(source)
    dovetail_site.add("acme-private", "1.0", {"dovetail.hooks.v1": {"acme": "acme_private:plugin"}})
    (record,) = (r for r in Registry.scan().sorted() if r.distribution == "acme-private")
    assert private_imports(record) == found


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
