"""The rooms that plugins stand on: what they import, and what is said of a package that imports others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dovetail.plugins.registry import Registry
from dovetail_testing.next_minor import private_imports
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
