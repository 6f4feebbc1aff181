"""Flags of SGLang and vLLM whose value is a JSON object that says several things at once."""

from __future__ import annotations

import json
from typing import Any

from dovetail.errors import ConfigError

KV_EVENTS = ("endpoint", "replay_endpoint", "topic", "buffer_steps", "hwm")
KV_EVENTS_SAME = {"max_queue_size": "the server's own queue holds 10,000", "bind": "an address with * is bound"}
"""Keys that change nothing here."""


def kv_events(value: str) -> list[str]:
    """Return what `--kv-events-config` asks for as arguments: the plugin kv-events with its settings, or nothing.

    Raises:
        ConfigError: It is no such object, or asks for what nothing here does.
    """
    flag = "--kv-events-config"
    try:
        given: Any = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {value[:64]!r} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{flag}: give a JSON object such as {{"publisher": "zmq", "endpoint": "tcp://*:5557"}}')
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
