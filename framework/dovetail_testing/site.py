"""A folder of made-up distributions, for tests of plugin discovery that no installed package can disturb."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class FakeSite:
    """A `site-packages` of its own. Put `root` on `sys.path` where its modules must be importable.

    ```python
    site = FakeSite(tmp_path)
    site.add("acme", "1.0", {"dovetail.reasoning_parsers.v1": {"acme-r2": "acme:AcmeR2"}}, {"acme.py": source})
    registry = Registry.scan(path=[str(site.root)])
    ```
    """

    def __init__(self, root: Path) -> None:
        """Use `root`, which is created."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        version: str = "1.0",
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        files: Mapping[str, str] | None = None,
        manifest: Mapping[str, Any] | None = None,
        requires: Sequence[str] = (),
    ) -> Path:
        """Install a distribution and return its `.dist-info` folder.

        Args:
            name: As its metadata writes it.
            version: Its version.
            entry_points: Targets by name by group.
            files: Text by path below `root`.
            manifest: Facts by name by kind; written to a package `<name>_facts` and registered.
            requires: Further headers of its metadata, such as `Requires-Python: >=3.12`.
        """
        groups = {group: dict(entries) for group, entries in (entry_points or {}).items()}
        written = dict(files or {})
        if manifest is not None:
            package = f"{name.replace('-', '_').lower()}_facts"
            groups["dovetail.manifest"] = {package: package}
            written[f"{package}/__init__.py"] = 'raise RuntimeError("a manifest\'s package must not be imported")\n'
            written[f"{package}/dovetail-plugins.json"] = json.dumps({"manifest": 1, "plugins": manifest})
        for path, text in written.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text, encoding="utf-8")
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        headers = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *requires]
        (info / "METADATA").write_text("\n".join(headers) + "\n", encoding="utf-8")
        lines = (f"[{group}]\n" + "".join(f"{n} = {t}\n" for n, t in e.items()) for group, e in groups.items())
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        importlib.invalidate_caches()
        return info
