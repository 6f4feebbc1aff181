"""The clean environment of the packaging tests and the builder of the site are importable here too."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests/packaging"), str(ROOT / "docs/site")]  # last: other folders have a conftest too
