"""What a plugin changed in Dovetail's own modules when it was loaded: named in the log and by `plugin doctor`.

A plugin that patches the core works until the core changes, and breaks other plugins meanwhile. Nothing prevents it
(a plugin is ordinary code), so it is shown. Compared are the attributes of every core module and of the classes
defined there, by identity, the contents of its constant tables, and the code and defaults of its functions; a module
that the plugin is the first to import is held as it is once its own code has run. The same holds for modules of Python
and of libraries that all code goes through (`SHARED`), where new names are not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from dovetail.contracts.tables import table

CORE = ("dovetail", "dovetail_offline", "dovetail_server")
SHARED: list[str] = table(__file__)
"""Modules whose public functions and classes, and their methods, no plugin may replace; from `monkeypatches.json`."""
_HOOKS = frozenset(
    {
        *("__import__", "__build_class__", "__init__", "__new__", "__call__", "__getattr__", "__setattr__"),
        *("_create_default_https_context", "_create_stdlib_context"),
    }
)
"""Names with underscores that all code goes through, too."""
_MACHINERY = ("__pydantic_", "__msgspec_", "__warningregistry__", "__annotat", "_abc_")
"""Attributes that Python, pydantic and msgspec make themselves, when they are first needed."""

_Held = tuple[Mapping[str, Any], Mapping[str, Any]]
Snapshot = dict[str, _Held]
"""By owner (`module` or `module:Class`): the attributes, and of those that can change in place what they held: of
constant tables (`KINDS`) a copy, of functions which code and defaults."""


def snapshot(skip: str = "") -> Snapshot:
    """Return what the imported core modules hold now.

    Other threads may be importing meanwhile. A dictionary is copied in one go; a list of its items is not, since each
    new tuple may start the garbage collector, and with it arbitrary code.

    Args:
        skip: Module whose plugin is about to be loaded; it may change itself.
    """
    taken: Snapshot = {}
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] in CORE and name != skip and isinstance(module, ModuleType):
            _hold(taken, name, module)
    for name in SHARED:
        if isinstance(shared := sys.modules.get(name), ModuleType):
            _hold(taken, name, shared)
    return taken


def _hold(taken: Snapshot, name: str, module: ModuleType) -> None:
    """Add a module of the core, and the classes defined there."""
    for owner, namespace in _owners(name, module):
        if name in SHARED and owner.partition(":")[2].startswith("_"):
            continue  # the same class under a second name
        taken[owner] = _held_of(name, namespace)


def _held_of(name: str, namespace: Any) -> _Held:
    """Return what a module of this name, or a class of it, holds."""
    held = namespace.copy()
    if name in SHARED:
        named = ((key, value) for key, value in held.items() if key[0] != "_" or key in _HOOKS)
        held = {key: value for key, value in named if callable(value) or isinstance(value, (classmethod, property))}
        held.pop("Storage", None)  # torch's own, and another one with another default dtype
    inside: dict[str, Any] = {k: v.copy() for k, v in held.items() if isinstance(v, _TABLE) and _is_constant(k)}
    for key, value in held.items():
        if type(value) is FunctionType and value.__module__ == name:
            inside[key] = _made_of(value)
    return held, inside


def _made_of(function: FunctionType) -> tuple[object, ...]:
    """Say which code and which defaults a function has; comparing these themselves could run arbitrary code."""
    named = function.__kwdefaults__
    return id(function.__code__), id(function.__defaults__), named and tuple(map(id, named.values()))


@contextmanager
def watching(skip: str = "") -> Iterator[Snapshot]:
    """Take a snapshot, and add modules that are first imported inside, each as its own code leaves it."""
    before = snapshot(skip)
    finder = _CoreImports(before, skip)
    sys.meta_path.insert(0, finder)
    try:
        yield before
    finally:
        sys.meta_path.remove(finder)


class _CoreImports:
    """Finds modules of the core and shared ones as the other finders do, and holds them once they are executed."""

    def __init__(self, taken: Snapshot, skip: str) -> None:
        self._taken, self._skip = taken, skip

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if (name.partition(".")[0] not in CORE and name not in SHARED) or name == self._skip:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # of two that watch, one asks the other, not both
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((one for one in found if one is not None), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module") and not isinstance(loader, type):  # a class loads what is built in
            inner = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                inner(module)
                if module.__name__ == name:  # pytest's loader is one for all modules
                    _hold(self._taken, name, module)

            loader.exec_module = exec_module
        return spec


def detect_monkeypatches(before: Snapshot, skip: str = "") -> list[str]:
    """Return the core attributes that changed since `before`, as `module.attribute`, sorted."""
    changed = []
    tables: dict[int, str] = {}
    for owner, held in before.items():
        module, _, class_name = owner.partition(":")
        namespace = None if module == skip else _namespace(module, class_name)
        if namespace is None and not class_name and module != skip:
            changed.append(f"sys.modules[{owner!r}]")
        if namespace is None or _is_as(held, namespace):  # None: a replaced class, which its module's attribute shows
            continue
        current = _held_of(module, namespace)
        keys = held[0].keys() | current[0].keys()
        if module in SHARED:
            keys = held[0].keys() | _overrides(owner, current[0].keys() - held[0].keys())
        for key in keys:
            old, new = _at(held, key), _at(current, key)
            if key.startswith(_MACHINERY) or not _differs(old, new):
                continue
            name = f"{owner.replace(':', '.')}.{key}"
            if old is not None and new is not None and old[0] is new[0]:  # many modules may have imported one table
                if id(old[0]) not in tables or key in getattr(sys.modules.get(owner), "__annotations__", {}):
                    tables[id(old[0])] = name
            else:
                changed.append(name)
    return sorted([*changed, *tables.values()])


def _overrides(owner: str, names: Iterable[str]) -> set[str]:
    """Return those of a class's new names that it inherited before; other new names are not checked."""
    module, _, name = owner.partition(":")
    bases = getattr(getattr(sys.modules.get(module), name, None), "__mro__", ())[1:] if name else ()
    return {key for key in names if any(key in vars(base) for base in bases)}


def _owners(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    namespace = vars(module)
    yield name, namespace
    for key, value in namespace.copy().items():
        if isinstance(value, type) and value.__module__ == name:
            yield f"{name}:{key}", vars(value)


_TABLE = (dict, list, set)


def _is_constant(name: str) -> bool:
    """Whether a table of this name may not change; private and lower-case ones are caches that may grow."""
    return name.isupper() and not name.startswith("_")


def _namespace(module: str, class_name: str) -> Any:
    """Return the attributes of a module, or of a class defined there; None where it is another one, or gone."""
    found: Any = sys.modules.get(module)
    if class_name and isinstance(found, ModuleType):
        found = vars(found).get(class_name)
        return vars(found) if isinstance(found, type) and found.__module__ == module else None
    return vars(found) if isinstance(found, ModuleType) else None


def _is_as(old: _Held, new: Mapping[str, Any]) -> bool:
    """Whether nothing changed: said mostly at the speed of C, since it is so for nearly every owner."""
    held, inside = old
    if held.keys() != new.keys() or not all(map(is_, held.values(), map(new.get, held))):
        return False
    return all((_made_of(held[k]) if type(v) is tuple else held[k]) == v for k, v in inside.items())


def _at(held: _Held, key: str) -> tuple[Any, Any] | None:
    """Return an attribute and its contents if it is a table; None where there is no such attribute."""
    return (held[0][key], held[1].get(key)) if key in held[0] else None


def _differs(old: tuple[Any, Any] | None, new: tuple[Any, Any] | None) -> bool:
    if old is None:  # importing a sub-module sets an attribute of its package, and so does a lazy `__getattr__`
        return new is not None and _is_foreign(new[0])
    if new is None or old[0] is not new[0]:
        return True
    return old[1] is not None and old[1] != new[1]


def _is_foreign(value: Any) -> bool:
    """Whether a new attribute of the core came from outside it."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return not (isinstance(home, str) and home.partition(".")[0] in CORE)
