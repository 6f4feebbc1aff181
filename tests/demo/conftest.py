"""The training of the demo model, which tests import by name, stands beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
