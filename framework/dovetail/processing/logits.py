"""What requests say to logits processors, checked by what each processor declares."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.kinds import normalise

KIND = "logits_processor"
FIELD = "logits_processors"


class LogitsRequests:
    """Reads the field `logits_processors` of requests. Safe to share between threads."""

    def __init__(self, served: Mapping[str, type[LogitsProcessor]]) -> None:
        """`served` are the processors' classes by name."""
        self._served = {normalise(KIND, name): (name, cls) for name, cls in served.items()}

    @classmethod
    def load(cls, plugins: LoadedPlugins) -> LogitsRequests:
        """Take those of a process's plan."""
        return cls({planned.name: plugin for planned, plugin in plugins.candidates(KIND)})

    def read(self, given: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
        """Return what a request asks for as plain values, complete with defaults, by the processors' own names.

        Raises:
            RequestError: A processor is not served, or its parameters are not as it declares them.
        """
        found: dict[str, dict[str, Any]] = {}
        for written, params in (given or {}).items():
            known = self._served.get(normalise(KIND, written))
            if known is None:
                names = ", ".join(name for name, _ in self._served.values())
                what = f"served: {names}" if names else "none is served; start the server with --logits-processors NAME"
                raise _wrong(f"{FIELD}: {written!r} is no logits processor of this server; {what}")
            name, plugin = known
            if name in found:
                raise _wrong(f"{FIELD}: {name!r} is given twice")
            found[name] = _checked(name, plugin.Params, params)
        return found


def _checked(name: str, declared: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    fields = getattr(declared, "model_fields", None)
    known = list(fields) if fields is not None else [field.name for field in dataclasses.fields(declared)]
    for written in given:
        if written not in known:
            near = difflib.get_close_matches(written, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"possible: {', '.join(known) or 'none'}"
            raise _wrong(f"{FIELD}: {name}: {written!r} is unknown; {hint}")
    adapter = TypeAdapter(declared)
    try:
        made = adapter.validate_python(dict(given), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise _wrong(f"{FIELD}: {name}: {where}: {text[:1].lower()}{text[1:]}") from None
    return dict(adapter.dump_python(made, mode="json"))


def _wrong(text: str) -> RequestError:
    return RequestError(text, param=FIELD, code="invalid_value")
