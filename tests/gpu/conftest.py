"""Helpers of these tests, of the models' that write packed checkpoints, and of the runtime's that serve loads."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("models", "runtime"))]
