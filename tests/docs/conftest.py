"""The clean environment of the packaging tests is importable here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "packaging"))  # last: other folders have a conftest too
