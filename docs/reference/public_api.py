"""The public names that plugins use, with their signatures, read from the code.

`lines()` is what `tests/plugins/golden/public_api.txt` holds; `generate.py` beside this file makes the reference page
of the same facts. What is listed here only grows within one version of an API.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import dovetail
import dovetail_testing as testing
from dovetail import contracts, sdk
from dovetail.plugins import KINDS, hookspecs
from dovetail.plugins.kinds import SDK_API, SDK_MINOR
from dovetail.plugins.registry import KindRegistry

CONFORMANCE = tuple(name for name in testing.__all__ if name.endswith("Conformance"))
KIT = (*CONFORMANCE, "FakeSite", "GrammarSample", "Sample", "check_class", "conformance_class", "run_conformance")


KIT_OWNER, ALL_OWNER, SDK_OWNER = "kit", "all kinds", "sdk"
KERNELS = "dovetail.sdk.layers.ops"
OWNERS = {
    "api": "api",
    "attention": "attention_backend",
    "cache": "model",
    "checkpoint": "checkpoint",
    "config": "model",
    "compiler": "device",
    "device": "device",
    "errors": ALL_OWNER,
    "grammar": "grammar_backend",
    "hooks": "hooks",
    "kernels": "kernels",
    "operations": "kernels",
    "layers": "model",
    "logits": "logits_processor",
    "model": "model",
    "needs": "model",
    "observers": "hooks",
    "options": ALL_OWNER,
    "output": "reasoning_parser",
    "processor": "processor",
    "quantization": "quantization",
    "ranks": "device",
    "reasoning": "reasoning_parser",
    "replies": "api",
    "requests": "api",
    "scheduling": "schedule_policy",
    "speculation": "speculator",
    "tools": "tool_parser",
}
"""Whose version a module of the contracts belongs to."""
TOOL_NAMES = ("Malformed", "NewCall", "ToolArgs", "ToolBody", "ToolEnd", "ToolEvent", "ToolFormat", "ToolStart")
OF_NAMES = {
    "AttentionCaps": "attention_backend",
    "Event": "reasoning_parser",
    "Prompt": "api",
    "Reach": "model",
    "hookimpl": "hooks",
} | dict.fromkeys(TOOL_NAMES, "tool_parser")
"""The same, of names that another kind's version covers than that of their module, and of unions, which have none."""


def header() -> list[str]:
    """Return the versions: what changes below needs one of them raised."""
    kinds = ", ".join(f"{kind.name} {kind.oldest_api}-{kind.api}.{kind.minor}" for kind in KINDS.values())
    sdk_version = f"{SDK_OWNER} {SDK_API}-{SDK_API}.{SDK_MINOR}"
    return [f"dovetail {dovetail.__version__}", f"api {kinds}, {sdk_version}"]


def owner_of(name: str) -> str:
    """Return whose version a name of the contracts belongs to."""
    module = getattr(getattr(contracts, name), "__module__", "").rpartition(".")[2]
    return OF_NAMES[name] if name in OF_NAMES else OWNERS[module]


def hook_functions() -> dict[str, Any]:
    """Return every hook specification by name, in the order of the page."""
    return {name: value for name, value in vars(hookspecs).items() if name.startswith("dovetail_")}


def sdk_names() -> Iterator[tuple[str, str, Any]]:
    """Yield home and name of the classes and functions of the SDK, and what each is; kernels have no public names."""
    for found in pkgutil.walk_packages(sdk.__path__, f"{sdk.__name__}."):
        if not found.name.startswith(KERNELS):
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                is_own = getattr(value, "__module__", "") == found.name
                if is_own and not name.startswith("_") and (isinstance(value, type) or inspect.isroutine(value)):
                    yield found.name.removeprefix("dovetail."), name, value


def lines() -> list[str]:
    """Return the header, and of each owner of a version its name and one line per public name, sorted."""
    found: dict[str, set[str]] = {owner: set() for owner in (*KINDS, ALL_OWNER, SDK_OWNER, KIT_OWNER)}
    for name in contracts.__all__:
        found[owner_of(name)].update(of_class("contracts", name, getattr(contracts, name)))
    found["hooks"].update(f"hooks.{name}{_signature(value)}" for name, value in hook_functions().items())
    found["hooks"].update(of_class("plugins", "KindRegistry", KindRegistry))
    for home, name, value in sdk_names():
        found[SDK_OWNER].update(of_class(home, name, value))
    for name in KIT:
        found[KIT_OWNER].update(of_class("testing", name, getattr(testing, name)))
    return [*header(), *(line for owner, own in found.items() for line in (f"[{owner}]", *sorted(own)))]


def of_class(home: str, name: str, value: Any) -> Iterator[str]:
    """Yield the lines of one name: a class with its public members, a union, or a function."""
    where = f"{home}.{name}"
    if not isinstance(value, type):
        if inspect.isroutine(value):
            yield f"{where}{_signature(value)}"
        else:
            yield f"{where}: {type(value).__name__}" if callable(value) else f"{where} = {_union(value)}"
        return
    if issubclass(value, enum.Enum):
        yield from (f"{where}.{member.name} = {member.value!r}" for member in value)
        return
    if _has_own_init(value):
        yield f"{where}{_signature(value)}"
    elif issubclass(value, Exception):  # most have no members of their own
        yield f"{where} is a {value.__bases__[0].__name__}"
    for key, member in public_members(value):
        yield f"{where}.{describe_member(key, member, value)}"


def public_members(value: type) -> list[tuple[str, Any]]:
    """Return what a class itself declares for others: methods, properties, class variables; no tests."""
    own = {
        key: member for key, member in vars(value).items() if key == "__call__" or not key.startswith(("_", "test_"))
    }
    own |= {key: None for key in value.__annotations__ if not key.startswith("_") and key not in own}
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    hidden = ("FixtureFunctionDefinition",)  # pytest's own
    return [(key, m) for key, m in own.items() if key not in fields and type(m).__name__ not in hidden]


def describe_member(key: str, member: Any, owner: type) -> str:
    """Return a member's signature or type."""
    if isinstance(member, property):
        return f"{key} -> {inspect.signature(member.fget).return_annotation}" if member.fget else key
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if inspect.isfunction(function):
        return f"{key}{_signature(function)}"
    written = owner.__annotations__.get(key, type(member).__name__)
    written = getattr(written, "__forward_arg__", written)  # what a NamedTuple makes of an annotation
    defaults = getattr(owner, "_field_defaults", {})
    return f"{key}: {written}{f' = {defaults[key]!r}' if key in defaults else ''}"


def _has_own_init(value: type) -> bool:
    protocol = getattr(value, "_is_protocol", False)
    made = dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__")
    return not protocol and (made or "__init__" in vars(value))


def _signature(value: Any) -> str:
    text = str(inspect.signature(value)).replace("typing.", "").replace("collections.abc.", "")
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text.replace("<factory>", "…"))
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _union(value: Any) -> str:
    return " | ".join(sorted(part.__name__ for part in getattr(value, "__args__", ()))) or repr(value)
