"""Makes the helpers beside this file importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest too
