"""`--plugin-file my_parser.py` and `--plugins-dir plugins/`: plugins that are not installed.

A plugin is a file, or a folder with an `__init__.py`, which may import its own files relatively. It is run once in the
main process to see what it defines, and again by each process that the plan sends it to. What a folder defines is what
its `__init__.py` names. Each class of a contract is registered: a model under its architectures, others under their
class attribute `plugin_name` or their class name in kebab case (`AcmeR2` is `acme-r2`). Functions with `@hookimpl`
make it a hooks plugin too, which needs no `--plugin`. Whatever is wrong with it stops the start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.contracts.errors import PluginError, described
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.moved import where_now
from dovetail.plugins.registry import Registry
from dovetail.plugins.signals import Signalled
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S, Interrupted, time_limit

logger = logging.getLogger(__name__)
DIGEST_LEN = 12
MAX_LINKS = 40
"""Symbolic links that a path leads through, as the system follows them."""
SELF = "__dovetail_module__"
"""Attribute that holds the file's module itself: the target of its hooks plugin."""
NAME = re.compile(r"\*|[^\s,:=]+")
"""What a flag can name: lists are divided at commas, and a package stands before a colon."""
VERSION = "__dovetail_version__"
"""Attribute that holds the digest of what was run."""


class PluginFileError(PluginError):
    """A plugin file is gone, or is not what was planned."""


def module_name(path: Path) -> str:
    """Return the name under which a file's or folder's module is imported; two of one name in two places differ."""
    place = hashlib.sha256(str(path).encode()).hexdigest()[:6]
    return f"dovetail_plugin_file_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{place}"


def digest(path: Path, given: str = "") -> str:
    """Return the start of the SHA-256 of a file, or of a folder's Python files, which serves as its version.

    Args:
        path: The file or folder.
        given: How it was given, for messages.

    Raises:
        PluginFileError: It cannot be read.
    """
    whole = hashlib.sha256()
    try:
        if not path.is_dir():
            whole.update(path.read_bytes())
        else:
            for file in sorted(path.rglob("*.py")):
                whole.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    except OSError as error:
        given = given or f"plugin file {str(path)!r}"
        raise PluginFileError(f"{given}: {error.strerror}; give a readable Python file") from None
    return whole.hexdigest()[:DIGEST_LEN]


def files_in(folder: Path) -> list[Path]:
    """Return the plugins of a `--plugins-dir` by name: its Python files, and its folders with an `__init__.py`.

    Names that begin with `_` or `.` are not for this; neither is what is no Python code.

    Raises:
        PluginError: There is no such folder, it cannot be read, or it holds no plugin.
    """
    what = f"--plugins-dir {str(folder)!r}"
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise PluginError(f"{what}: {error.strerror}; give a folder of Python files") from None
    found = [path for path in inside if path.name[0] not in "_." and _is_plugin(path)]
    if not found:
        raise PluginError(f"{what}: holds no plugin; put Python files into it, or folders with an __init__.py")
    return found


def given_files(files: Iterable[str], folders: Iterable[str]) -> dict[Path, str]:
    """Return what `--plugin-file` and `--plugins-dir` name, each once, with how it was given, for messages.

    Raises:
        PluginError: See `files_in`.
    """
    given = {Path(file): f"--plugin-file {file!r}" for file in files}
    for folder in folders:
        for path in files_in(Path(folder)):
            given.setdefault(path, f"--plugins-dir {folder!r}: {path.name}")
    found: dict[Path, str] = {}
    for path, what in given.items():
        found.setdefault(path.resolve(), what)
    link_folders = {place for path in (*given, *map(Path, folders)) for place in _folders_of_links(path)}
    _warn_of_others(tuple(found), tuple(Path(folder).resolve() for folder in folders), tuple(link_folders))
    return found


def _folders_of_links(path: Path, num_left: int = MAX_LINKS) -> set[Path]:
    """Return the folders of the symbolic links that a path leads through, with what these are in."""
    found: set[Path] = set()
    path = Path(os.path.abspath(path))
    for at in (path, *path.parents):
        if num_left and at.is_symlink():
            found |= {*at.parents, *_folders_of_links(at.parent / at.readlink(), num_left - 1)}
    return found


@cache
def _warn_of_others(paths: tuple[Path, ...], folders: tuple[Path, ...], link_folders: tuple[Path, ...] = ()) -> None:
    """Warn once of plugins that other users may change: what they write there runs as this user."""
    files = [file.resolve() for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    filled = {*folders, *(file.parent for path in paths if path.is_dir() for file in files if path in file.parents)}
    why = {}
    for place in {place for file in files for place in (file, *file.parents)} | {*folders, *link_folders}:
        if reason := _others(place, takes_new=place in filled):
            why[place] = reason
    if why:
        named = "; ".join(f"{place} {reason}" for place, reason in sorted(why.items())[:4])
        logger.warning(
            "Plugins that other users may change: %s. What they write runs as this user; correct owner and mode.", named
        )


def _others(place: Path, *, takes_new: bool) -> str:
    """Say why others may change a file or folder, "" if they may not.

    Args:
        place: The file or folder.
        takes_new: Whether a file that is added to it would run, too. Else the sticky bit is enough.
    """
    try:
        found = place.stat()
    except OSError:
        return ""  # it is gone: whoever reads it says so
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX and not takes_new:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "may be written by everybody"
    if found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid()):
        return f"may be written by group {found.st_gid}"
    return ""


def _is_plugin(path: Path) -> bool:
    return (path / "__init__.py").is_file() if path.is_dir() else path.suffix == ".py"


def load_file(path: str, version: str) -> ModuleType:
    """Import a plugin file or folder, once per process.

    Raises:
        PluginFileError: It is gone or has changed since the plan was made.
    """
    file = Path(path)
    if digest(file) != version:
        raise PluginFileError(f"{path} has changed since it was planned")
    name = module_name(file)
    if getattr(sys.modules.get(name), VERSION, None) == version:
        return sys.modules[name]
    _forget(name)
    inside = [path] if file.is_dir() else None
    spec = importlib.util.spec_from_file_location(
        name, file / "__init__.py" if inside else file, submodule_search_locations=inside
    )
    if spec is None or spec.loader is None:
        raise PluginFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    setattr(module, SELF, module)
    setattr(module, VERSION, version)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        _forget(name)
        raise
    return module


def _forget(name: str) -> None:
    for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[each]


def add_file(registry: Registry, path: Path, timeout_s: float = DEFAULT_TIMEOUT_S, given: str = "") -> str | None:
    """Run a plugin file or folder and register what it defines.

    Args:
        registry: Where its plugins go.
        path: The file or folder.
        timeout_s: What running it may take.
        given: How it was given, for messages; as a `--plugin-file` if not said.

    Returns:
        The name of its hooks plugin, or None where it defines no hook.

    Raises:
        PluginError: It cannot be read or run, defines nothing, or needs a later minor version.
    """
    given = given or f"--plugin-file {str(path)!r}"
    path = path.resolve()
    if path.exists() and not _is_plugin(path):
        raise PluginError(f"{given}: is neither a .py file nor a folder with an __init__.py; install packages with pip")
    version = digest(path, given)
    module = _run(path, version, timeout_s, given)
    found, hooks = list(_classes(module, given)), path.stem.replace("_", "-") if _has_hooks(module) else None
    if hooks is not None:
        found.append(("hooks", hooks, SELF))
    for kind, name, attr in found:  # before anything can choose or pass over one
        if why := KINDS[kind].too_new(getattr(module, attr)):
            raise PluginError(f"{given}: {kind} {name!r}: {why}")
    for kind, name, attr in found:
        target = f"{module.__name__}:{attr}"
        registry.add(kind, name, target, distribution=path.name, version=version, file=str(path))
    if not found:
        contracts = ", ".join(kind.contract.partition(":")[2] for kind in KINDS.values() if kind.contract)
        raise PluginError(
            f"{given}: defines no plugin{_unfinished(module)}; subclass one of {contracts}, or write a function with "
            "@hookimpl"
        )
    return None if hooks is None else f"{path.name}:{hooks}"


def _run(path: Path, version: str, timeout_s: float, given: str) -> ModuleType:
    try:
        with time_limit(f"{given}: running it", timeout_s):
            return load_file(str(path), version)
    except (PluginError, Signalled, Interrupted):
        raise
    except BaseException as error:  # a stranger's module may raise anything; the cause is kept
        fix = where_now(error) or "correct the file"
        raise PluginError(f"{given}: running it raised {described(error)}; {fix}") from error


def _classes(module: ModuleType, given: str) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, attribute) of each concrete class of a contract that the module names and that is its own.

    Raises:
        PluginError: What a class says of its names is no name.
    """
    for attr, value in list(vars(module).items()):
        if not isinstance(value, type) or inspect.isabstract(value):
            continue
        if value.__module__ != module.__name__ and not value.__module__.startswith(f"{module.__name__}."):
            continue
        for kind in KINDS.values():
            if kind.contract is None:
                continue
            home, _, contract = kind.contract.partition(":")
            if issubclass(value, getattr(import_module(home), contract)):
                for name in _names(kind.name, value, attr, given):
                    yield kind.name, name, attr


def _unfinished(module: ModuleType) -> str:
    """Return what classes of the module lack that are abstract, for a message."""
    own: list[Any] = [each for each in vars(module).values() if inspect.isabstract(each)]
    lacking = {each.__name__: sorted(each.__abstractmethods__) for each in own if each.__module__ == module.__name__}
    return "".join(f": {name} lacks {' and '.join(methods)}" for name, methods in lacking.items())


def _names(kind: str, plugin: type, attr: str, given: str) -> Iterable[str]:
    """Return the names of a class: a model's architectures, else its `plugin_name`, else its own in kebab case."""
    if kind == "model" and (listed := getattr(plugin, "architectures", None)) is not None:
        names = () if isinstance(listed, str) or not isinstance(listed, Iterable) else tuple(listed)
        said, wish = f"architectures = {listed!r}", "give a tuple of names, with a comma behind a single one"
    else:
        listed = getattr(plugin, "plugin_name", None)
        names = (listed if listed is not None else _kebab(attr),)
        said, wish = f"plugin_name = {listed!r}", "give a name as it is typed, such as 'acme-r2'"
    if not names or not all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
        raise PluginError(f"{given}: {kind} {attr}: {said} names nothing that can be asked for; {wish}")
    return names


def _has_hooks(module: ModuleType) -> bool:
    return any(hasattr(value, "dovetail_impl") for value in vars(module).values() if inspect.isfunction(value))


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
