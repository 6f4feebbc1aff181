"""`dovetail version`."""

from __future__ import annotations

import dovetail


def main(argv: list[str]) -> int:
    """Print the version; arguments are not expected."""
    print(f"dovetail {dovetail.__version__}")
    return 2 if argv else 0
