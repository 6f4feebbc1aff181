"""The name under which package indexes know Dovetail. Its import name is `dovetail`, as is its command."""

from __future__ import annotations

DISTRIBUTION = "dovetail-llm"
"""Plugins of this distribution are the built-ins: they win their bare names."""

OTHER_PROJECT = "dovetail"
"""What the public index holds under Dovetail's import name is another project's package."""


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for messages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
