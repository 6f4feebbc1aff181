"""Packages that an earlier `dovetail plugin new` wrote pass, or their author is told what to change.

`scaffolds/2026-11-22.json` holds what the command of 22 November 2026 (commit ac377135) wrote for each kind then.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import dovetail
from dovetail.plugins.moved import MODULES, RENAMED, REPLACED, where_now
from dovetail_server.cli.plugin import main

PACKAGES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "scaffolds/2026-11-22.json").read_text())
REQUIRED = '"dovetail>='
"""The distribution had this name then."""
MOVED = (
    ("dovetail.testing", "dovetail_testing", "dovetail.testing is dovetail_testing now"),
    ("dovetail.errors", "dovetail.contracts.errors", "dovetail.errors is dovetail.contracts.errors now"),
    ("dovetail.layers", "dovetail.sdk.layers", "dovetail.layers is dovetail.sdk.layers"),
    (
        "transformer import DecoderLayer, ",
        "decoder import DecoderLayer\nfrom dovetail.sdk.layers.transformer import ",
        "DecoderLayer is in dovetail.sdk.layers.decoder now",
    ),
    ("dovetail.plugins import", "dovetail.contracts import", "HealthCheck is in dovetail.contracts.hooks now"),
    ("dovetail.runtime.hf_config", "dovetail.sdk.config", "dense_config is in dovetail.sdk.config now"),
    ("dovetail.text.json_calls", "dovetail.sdk.formats.json_calls", "is dovetail.sdk.formats.json_calls now"),
)
"""What packages import from where it no longer is, what they must write, and what their authors are told."""

REWRITTEN = {
    "dovetail-acme-packed": "is called as linear(ctx, spec); upgrade the package, or have its author take MatrixSpec of"
}
"""Whose methods have other parameters now, and what their authors are told."""


def written(folder: Path, package: str, *, required: str, renamed: bool = True) -> str:
    """Write a package, with the names of today unless it is to stay as it was."""
    for name, text in PACKAGES[package].items():
        for old, new, _ in MOVED if renamed else ():
            text = text.replace(old, new)
        (folder / name).write_text(text.replace(REQUIRED, required))
    return str(folder)


@pytest.mark.first(1)
@pytest.mark.parametrize("package", PACKAGES)
def test_one_as_it_was_is_told_its_requirement(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks for a distribution that is another project's now, whose names have moved since."""
    assert main(["validate", written(tmp_path, package, required=REQUIRED)]) != 0
    said = capsys.readouterr()
    assert "take a version that requires 'dovetail-llm'" in said.out + said.err


@pytest.mark.parametrize(
    "package",
    [pytest.param(name, marks=() if name.endswith("-tools") else pytest.mark.full) for name in PACKAGES],
)
def test_one_that_requires_what_there_is_passes(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its author is told where each name is now, one after the other, and it passes with these; or what to rewrite."""
    folder = written(tmp_path, package, required='"dovetail-llm>=', renamed=False)
    while (code := main(["validate", folder])) != 0:
        said = " ".join(capsys.readouterr())
        if REWRITTEN.get(package, "nothing") in said:
            return
        old, new = next(((old, new) for old, new, told in MOVED if told in said), ("", ""))
        assert old, f"{code}: {said}"
        for file in tmp_path.glob("*.py"):
            file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("old", RENAMED)
def test_an_author_is_told_the_new_name_of_what_is_renamed(old: str) -> None:
    """A name that its module has no more is told with the one that it has."""
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {name}")
    assert where_now(error.value) == f"{name} of {module} is called {RENAMED[old]} now"
    assert hasattr(importlib.import_module(module), RENAMED[old])


@pytest.mark.parametrize("old", REPLACED)
def test_what_is_gone_is_told_with_what_to_do(old: str) -> None:
    """No name of it is left where it was."""
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {name}")
    assert where_now(error.value) == f"{name} of {module} is gone: {REPLACED[old]}"


@pytest.mark.parametrize(
    "old", ["dovetail.sdk.random", "dovetail.sdk.schemas.lru", "dovetail.sdk.expressions.ambiguous"]
)
def test_a_module_that_has_moved_is_told_however_it_is_imported(old: str) -> None:
    """By its name, or from its package."""
    package, _, name = old.rpartition(".")
    for code in (f"import {old}", f"from {old} import anything", f"from {package} import {name}"):
        with pytest.raises(ImportError) as error:
            exec(code)
        assert where_now(error.value) == f"{old} is {MODULES[old]} now: import it from there"


def test_a_name_that_is_read_from_a_module_is_told_as_one_that_is_imported() -> None:
    """A class of a plugin may have `norm.GatedRMSNorm` as its base."""
    with pytest.raises(AttributeError) as error:
        exec("from dovetail.sdk.layers import norm\nnorm.GatedRMSNorm")
    assert "is gone: copy it from dovetail_models.gated_delta" in where_now(error.value)
    assert where_now(AttributeError("module 'torch.nn' has no attribute 'GatedRMSNorm'")) == ""


def test_a_bound_that_the_next_version_breaks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kit passes against this Dovetail; the requirement is compared with the next minor version, too."""
    major, minor = map(int, dovetail.__version__.split(".")[:2])
    bound = f"{major}.{minor + 1}"
    main(["validate", written(tmp_path, "dovetail-acme-order", required=f'"dovetail-llm<{bound},>=')])
    text = capsys.readouterr().out
    assert "note: Dovetail's next minor version may break it: it requires dovetail-llm" in text
    assert f"this is {bound}.0; upgrade one of the two; leave the upper bound out" in text
