"""What is said of a peer's name: at which values it means nothing, and why every other one is refused.

`fields.json` lists fields of bodies: those of SGLang, vLLM and their gateways (`fields`), and those that other servers'
clients send (`of_dialects`, by whose they are). Of each it says `why` it is refused or means nothing, and `at` which
values it means nothing: at `"any"`; at those of `OFF` if it says none; at those and more (`or`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.contracts.tables import table

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


def _listed(rows: list[dict[str, Any]]) -> dict[str, ForeignName]:
    found: dict[str, ForeignName] = {}
    for row in rows:
        at = row.get("at", [*OFF, *row.get("or", ())])
        found |= dict.fromkeys(row["names"].split(), ForeignName(row["why"], None if at == "any" else tuple(at)))
    return found


_DATA = table(__file__, "fields.json")
FIELDS = _listed(_DATA["fields"])
SENT = _listed([row for rows in _DATA["of_dialects"].values() for row in rows])
