"""Packages that an earlier `dovetail plugin new` wrote pass, or their author is told what to change.

`scaffolds/2026-11-22.json` holds what the command of 22 November 2026 (commit ac377135) wrote for each kind then.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dovetail
from dovetail_server.cli.plugin import main

PACKAGES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "scaffolds/2026-11-22.json").read_text())
REQUIRED = '"dovetail>='
"""The distribution had this name then."""
MOVED = {
    "dovetail-ministral": (
        "from dovetail.layers.transformer import DecoderLayer, ",
        "from dovetail.layers.decoder import DecoderLayer\nfrom dovetail.layers.transformer import ",
        "DecoderLayer is in dovetail.layers.decoder now: import it from there",
    )
}
"""What a package imports from where it no longer is, what it must write, and what its author is told."""


def written(folder: Path, package: str, *, required: str) -> str:
    for name, text in PACKAGES[package].items():
        (folder / name).write_text(text.replace(REQUIRED, required))
    return str(folder)


@pytest.mark.first(1)
@pytest.mark.parametrize("package", PACKAGES)
def test_one_as_it_was_is_told_its_requirement(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks for a distribution that is another project's now."""
    assert main(["validate", written(tmp_path, package, required=REQUIRED)]) == 1
    assert "take a version that requires 'dovetail-llm'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(name, marks=() if name.endswith(("-tools", "-ministral")) else pytest.mark.full)
        for name in PACKAGES
    ],
)
def test_one_that_requires_what_there_is_passes(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is told where a layer is now, and passes with it."""
    folder = written(tmp_path, package, required='"dovetail-llm>=')
    if package in MOVED:
        old, new, said = MOVED[package]
        (source,) = (file for file in tmp_path.glob("*.py") if not file.name.startswith("test_"))
        assert main(["validate", folder]) == 1
        assert said in capsys.readouterr().out
        source.write_text(source.read_text().replace(old, new))
    code = main(["validate", folder])
    assert code == 0, capsys.readouterr().out


def test_a_bound_that_the_next_version_breaks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kit passes against this Dovetail; the requirement is compared with the next minor version, too."""
    major, minor = map(int, dovetail.__version__.split(".")[:2])
    bound = f"{major}.{minor + 1}"
    main(["validate", written(tmp_path, "dovetail-acme-order", required=f'"dovetail-llm<{bound},>=')])
    text = capsys.readouterr().out
    assert "note: Dovetail's next minor version would refuse it: it requires dovetail-llm" in text
    assert f"this is {bound}.0; upgrade one of the two; leave the upper bound out" in text
