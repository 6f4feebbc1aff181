"""The helpers beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # last: other folders import their own `conftest` by name
