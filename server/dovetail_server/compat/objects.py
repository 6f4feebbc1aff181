"""Flags of SGLang and vLLM whose value is a JSON object that says several things at once."""

from __future__ import annotations

import json
from typing import Any

from dovetail.contracts.errors import ConfigError

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
