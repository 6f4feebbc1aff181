"""The helpers beside this file are importable, as `tests/server` has it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest too
