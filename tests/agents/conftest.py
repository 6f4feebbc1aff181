"""Makes the helpers beside the tests importable; last, as other folders have helpers of these names, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
