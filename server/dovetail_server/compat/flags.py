"""Flags of SGLang, vLLM and llama.cpp that are no settings here: what each means, accepted or refused.

`flags.json` lists them: `why` one is refused or means nothing; `at` which values it means nothing, all where that is
not said; whether it is a `switch`; which flags of ours it `sets`, by value, "" for a switch; the flag of ours that it
is read `as`. A setting's own name and aliases go first (`settings.py`). Names are written without the dashes in front;
one that ends with `*` stands for every name that begins so, where no longer one fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from dovetail_server.compat.known import ForeignName
from dovetail_server.compat.objects import kv_events, speculation

_DATA = json.loads(Path(__file__).with_name("flags.json").read_text("utf-8"))
SHORT: dict[str, str] = _DATA["short"]
"""Flags of one dash."""
OTEL = ("--plugin", "otel")


@dataclass(frozen=True, slots=True)
class Flag(ForeignName):
    """A flag.

    Attributes:
        is_switch: It takes no value.
        sets: What it is written as here, where it is a setting under another form: by value, "" for a switch.
        rewrite: Makes arguments of our own of its value, where it says several things at once.
    """

    is_switch: bool = False
    sets: tuple[tuple[str, str], ...] = ()
    rewrite: Callable[[str], list[str]] | None = None


def _renamed(ours: str, value: str) -> list[str]:
    """Return our flag with the value that another name of it was given."""
    return [ours, value]


TABLE: dict[str, Flag] = {}
for _row in _DATA["flags"]:
    _sets = tuple(_row.get("sets", {}).items())
    _possible = ", ".join(value for value, _ in _sets if value)
    _why = _row.get("why") or (f"give {_possible}" if _possible else "")
    _at = () if _sets else tuple(_row["at"]) if "at" in _row else None
    _as = _row.get("as")
    _rewrite = partial(_renamed, _as) if _as else None
    TABLE |= dict.fromkeys(_row["names"].split(), Flag(_why, _at, "switch" in _row, _sets, _rewrite))
_DRAFTING = TABLE["speculative-*"].why
TABLE |= {
    "speculative-num-draft-tokens": Flag(_DRAFTING, (), rewrite=lambda value: ["--ngram.max-drafts", value]),
    "speculative-config": Flag(_DRAFTING, (), rewrite=speculation),
    "enable-trace": Flag("", (), is_switch=True, rewrite=lambda value: [*OTEL]),
    "otlp-traces-endpoint": Flag("", (), rewrite=lambda value: [*OTEL, "--otel.endpoint", value]),
    "otlp-service-name": Flag("", (), rewrite=lambda value: [*OTEL, "--otel.service-name", value]),
    "kv-events-config": Flag("give plugin: kv-events and its settings (docs/plugins.md)", (), rewrite=kv_events),
}


@cache
def find(name: str) -> Flag | None:
    """Return what is known of a flag, given without its dashes; `no-x` of a switch asks for what is so already."""
    if name in TABLE:
        return TABLE[name]
    stems = [stem for stem in TABLE if stem.endswith("*") and name.startswith(stem[:-1])]
    if stems:
        return TABLE[max(stems, key=len)]
    positive = find(name[3:]) if name.startswith("no-") else None
    if positive is None or not positive.is_switch or positive.sets:
        return None
    return Flag(positive.why, None, is_switch=True)
