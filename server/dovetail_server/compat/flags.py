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
from typing import Any

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.tables import table
from dovetail_server.compat.known import ForeignName

# Flags of SGLang and vLLM whose value is a JSON object that says several things at once.

KV_EVENTS = ("endpoint", "replay_endpoint", "topic", "buffer_steps", "hwm")
KV_EVENTS_SAME = {"max_queue_size": "the server's own queue holds 10,000", "bind": "an address with * is bound"}
"""Keys that change nothing here."""


def kv_events(value: str) -> list[str]:
    """Return what `--kv-events-config` asks for as arguments: the plugin kv-events with its settings, or nothing.

    Raises:
        ConfigError: It is no such object, or asks for what nothing here does.
    """
    flag = "--kv-events-config"
    given = _object(flag, value, '{"publisher": "zmq", "endpoint": "tcp://*:5557"}')
    is_on = given.pop("enable_kv_cache_events", None)
    publisher = given.pop("publisher", "zmq" if is_on else "null")
    form = given.pop("format", "default")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"{flag}: publisher {publisher!r} is not supported; possible: zmq, null")
    if form != "default":
        raise ConfigError(f"{flag}: format {form!r} is not supported: events have vLLM's form, which Dynamo reads, too")
    unknown = sorted(set(given) - {*KV_EVENTS, *KV_EVENTS_SAME})
    if unknown:
        raise ConfigError(f"{flag}: {unknown[0]!r} is unknown; possible: {', '.join((*KV_EVENTS, *KV_EVENTS_SAME))}")
    if publisher == "null" or is_on is False:
        return []
    arguments = ["--plugin", "kv-events"]
    for name in KV_EVENTS:
        if given.get(name) is not None:
            arguments += [f"--kv-events.{name.replace('_', '-')}", str(given[name])]
    return arguments


NGRAM = {"num_speculative_tokens": "max-drafts", "prompt_lookup_max": "max-match", "prompt_lookup_min": "min-match"}
"""Keys of vLLM's `--speculative-config`, and the options of `ngram` that they are."""


def speculation(value: str) -> list[str]:
    """Return what `--speculative-config` asks for as arguments: the speculator ngram with its settings.

    Raises:
        ConfigError: It is no such object, or asks for another way to draft.
    """
    flag = "--speculative-config"
    given = _object(flag, value, '{"method": "ngram", "num_speculative_tokens": 5}')
    method = given.pop("method", None) or given.get("model")
    if method in ("ngram", "[ngram]"):
        given.pop("model", None)
    else:
        why = "this flag has ngram alone; --speculator names any plugin for drafting that is installed"
        raise ConfigError(f"{flag}: method {method!r} is not supported: {why}")
    if unknown := sorted(set(given) - set(NGRAM)):
        raise ConfigError(f"{flag}: {unknown[0]!r} is not supported with ngram; possible: {', '.join(NGRAM)}")
    options = [[f"--ngram.{NGRAM[name]}", str(number)] for name, number in given.items() if number is not None]
    return ["--speculator", "ngram", *(word for option in options for word in option)]


def _object(flag: str, value: str, example: str) -> dict[str, Any]:
    """Read a flag's JSON object.

    Raises:
        ConfigError: It is none.
    """
    try:
        given: Any = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {value[:64]!r} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{flag}: give a JSON object such as {example}")
    return given


_DATA = table(__file__)
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
