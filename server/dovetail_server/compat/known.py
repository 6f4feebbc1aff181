"""What is said of a peer's name: at which values it means nothing, and why every other one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values by which a client says that it does not ask for something."""


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A name of a peer's that is no name of ours.

    Attributes:
        why: What to say of a value that is refused, or of a name that changes nothing.
        at: Values at which it means nothing; None for all.
    """

    why: str
    at: tuple[Any, ...] | None = OFF

    def means_nothing(self, value: Any) -> bool:
        """Tell whether the name at this value asks for nothing that is not so already."""
        return self.at is None or any(value == other and type(value) is type(other) for other in self.at)
