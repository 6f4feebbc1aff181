"""Build the documentation as a site: `make docs`, or this file with `[--output FOLDER] [--version NAME]`.

The pages of `docs/` and the root's are staged with their links turned into the site's, the reference is generated from
the code, and Zensical builds it strictly: a warning, a link or an anchor that leads nowhere fails. A version becomes a
folder beside the others in FOLDER; `versions.json` and the page at the top know all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import InvalidVersion, Version
from stage import stage

from dovetail import __version__

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Dovetail</title>
<meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">Dovetail {0}</a></html>
"""
"""The page at the top: it leads to the newest version."""


def minor(version: str) -> str:
    """Return the folder of a version: `0.1` for `0.1.3`, since patches change no page's meaning."""
    return ".".join(version.split(".")[:2])


def build(output: Path, version: str) -> Path:
    """Build one version into its folder of `output`; returns the folder.

    Raises:
        SystemExit: Zensical found something wrong; it has said what.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-site-") as name:
        folder = Path(name)
        stage(ROOT, folder / "docs")
        shutil.copy(HERE / "zensical.toml", folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(problems(done.stdout + done.stderr) or "zensical failed")
        remove_foreign_script(folder / "site")
        target = output / version
        shutil.rmtree(target, ignore_errors=True)
        output.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "site", target)
    list_versions(output)
    return target


def problems(printed: str) -> str:
    """Return what Zensical says is wrong, without its colours and Python's traceback."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    return plain.partition("Traceback")[0].strip() or plain


def remove_foreign_script(site: Path) -> None:
    """Take out the script that Zensical's offline search loads from another host; `worker.js` does its work."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'<script src="https://unpkg.com/iframe-worker/shim"[^>]*></script>', "", text), "utf-8")


def list_versions(output: Path) -> None:
    """Write the list that the version selector reads, newest first, and the page at the top."""
    names = sorted((page.parent.name for page in output.glob("*/index.html")), key=order, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in names]
    (output / "versions.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    (output / "index.html").write_text(LEAD.format(names[0]), encoding="utf-8")


def order(name: str) -> tuple[bool, Version, str]:
    """Return what versions are sorted by: releases above names such as `dev`."""
    try:
        return True, Version(name), name
    except InvalidVersion:
        return False, Version("0"), name


def main() -> int:
    """Build what the command line says."""
    parser = argparse.ArgumentParser(description="Build the documentation as a site.")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "site", help="where versions stand side by side"
    )
    parser.add_argument("--version", default=minor(__version__), help="folder of this version [%(default)s]")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of its own default configurations
    print(build(options.output, options.version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
