"""Which installed format reads a model path, if it is no folder of safetensors. Imports those alone that it asks.

The core itself reads folders as transformers writes them: `config.json`, `*.safetensors`, `tokenizer.json`. What else
stands at a path is read by plugins of the kind `checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.base.model_files import check_is_file
from dovetail.contracts.checkpoint import CheckpointFormat, Listing
from dovetail.contracts.errors import DovetailError, ModelError, PluginError, described

if TYPE_CHECKING:
    from dovetail.plugins import LoadedPlugins, Registry

logger = logging.getLogger(__name__)
AUTO, OWN = "auto", "safetensors"
"""Names of `--load-format` that are no plugin's: whatever claims the path, and the core's own reader."""
KIND = "checkpoint"
_OWN_FILES = frozenset((".json", ".jinja", ".txt", ".md", ".model", ".py", ".safetensors"))
"""How files end that a folder of the core's own reader has; where there are no others, nobody is asked."""


class Format(NamedTuple):
    """A format of the plugin kind, by the name that a plan holds."""

    name: str
    cls: type[CheckpointFormat]


class StoredFormat(NamedTuple):
    """What a format reads.

    Attributes:
        name: The format's, as a plan holds it.
        format: It, made of the files.
        files: That it claims, all in one folder.
    """

    name: str
    format: CheckpointFormat
    files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """Where its files are, and what it does not say itself."""
        return self.files[0].parent

    def ask(self, what: str, *args: object) -> Any:
        """Call a method of the format.

        Raises:
            ModelError: As the contract's method.
            PluginError: It raised anything else; named.
        """
        with _naming(self.name):
            return getattr(self.format, what)(*args)

    def each(self, what: str) -> Iterator[Any]:
        """Yield what a method gives; errors are those of `ask`."""
        with _naming(self.name):
            yield from getattr(self.format, what)()


class Formats:
    """The formats that may be asked, and the one that `--load-format` names.

    Attributes:
        named: As given: `auto`, `safetensors`, or a plugin's name.
    """

    def __init__(self, find: Callable[[str | None], Iterable[Format]], named: str = AUTO) -> None:
        """Take what finds formats: of a name, or all of them for None. It is called when one is asked for."""
        self._find, self.named = find, named

    @classmethod
    def of_registry(cls, scan: Callable[[], Registry], named: str = AUTO) -> Formats:
        """Return the formats of a registry, which is made when one is asked for."""

        def find(name: str | None) -> Iterator[Format]:
            from dovetail.plugins.loader import import_planned
            from dovetail.plugins.plan import as_planned

            registry = scan()
            records = [registry.resolve(KIND, each) for each in ([name] if name else registry.names(KIND))]
            for record in records:
                try:
                    yield Format(record.qualified, import_planned(as_planned(record)))
                except PluginError as error:
                    if name:
                        raise
                    logger.warning("--load-format auto passes over a format: %s", error)

        return cls(find, named)

    @classmethod
    def installed(cls, named: str = AUTO) -> Formats:
        """Return the formats of all installed packages: for tools that serve nothing, and no rules hold for."""

        def scan() -> Registry:
            from dovetail.plugins import Registry

            return Registry.scan()

        return cls.of_registry(scan, named)

    @classmethod
    def of_plan(cls, plugins: LoadedPlugins, named: str = AUTO) -> Formats:
        """Return the formats that a start has chosen: all that a process of it asks."""

        def find(name: str | None) -> Iterator[Format]:
            planned = plugins.plan.of_kind(KIND)
            for each in planned:
                if name is None or name in (each.name, each.qualified):
                    yield Format(each.qualified, plugins.get(KIND, each.qualified))

        return cls(find, named)

    @property
    def is_filled(self) -> bool:
        """Whether weights are made up, so that no file of weights is read.

        Raises:
            PluginError: What is named is not installed.
        """
        return (named := self._named()) is not None and named.cls.is_filled

    def filler(self) -> CheckpointFormat | None:
        """Return what makes weights up; None where they are read."""
        return named.cls(()) if (named := self._named()) is not None and named.cls.is_filled else None

    def used(self, *paths: Path) -> list[str]:
        """Return the names of the plugins that these paths and `--load-format` need, as a plan holds them.

        Args:
            paths: The model's, then others.
        """
        found = [self._named(), *(self._at(path, is_model=path == paths[0])[0] for path in paths)]
        return list(dict.fromkeys(each.name for each in found if each is not None))

    def at(self, path: Path, *, is_model: bool = True) -> StoredFormat | None:
        """Return what reads a path; None: the core does, if anybody.

        Args:
            path: A folder or a file.
            is_model: `--load-format` speaks of it; of a tokenizer's path it does not.

        Raises:
            ModelError: Several formats claim it, the one that is named does not, or a file is missing or empty.
            PluginError: A format fails.
        """
        found, files = self._at(path, is_model=is_model)
        if found is None:
            return None
        for file in files:
            try:
                check_is_file(file)
            except OSError as error:
                raise ModelError(f"{file}: cannot be read: {error}") from None
        with _naming(found.name):
            return StoredFormat(found.name, found.cls(files), files)

    def _named(self) -> Format | None:
        if self.named.lower() in (AUTO, OWN):
            return None
        found = next(iter(self._find(self.named)), None)
        if found is None:
            raise PluginError(f"--load-format {self.named!r}: not in this process's plan")
        return found

    def _at(self, path: Path, *, is_model: bool) -> tuple[Format | None, tuple[Path, ...]]:
        if is_model and self.named.lower() == OWN:
            return None, ()
        named = self._named() if is_model else None
        asked = named is not None and not named.cls.is_filled
        listing = _listing(path, whatever=asked)
        if listing is None:
            return None, ()
        claimed = []
        for each in [named] if named is not None and asked else self._find(None):
            if each.cls.is_filled:
                continue
            with _naming(each.name):
                names = tuple(each.cls.claims(listing))
            if names:
                claimed.append((each, tuple(_inside(listing, name, each.name) for name in names)))
        if named is not None and asked and not claimed:
            raise ModelError(f"model path {str(path)!r}: --load-format {self.named} finds no file of its own there")
        if len(claimed) > 1:
            names = tuple(each.name for each, _ in claimed)
            raise ModelError(f"model path {str(path)!r}: {' and '.join(names)} read it; choose one with --load-format")
        return claimed[0] if claimed else (None, ())


def _listing(path: Path, *, whatever: bool) -> Listing | None:
    """Return what stands at a path; None where the core's own reader has all of it, or nothing is there."""
    if path.is_file():
        return Listing(path.parent, (path.name,), is_file=True)
    if not path.is_dir():
        return None
    try:
        names = tuple(sorted(each.name for each in path.iterdir() if each.is_file()))
    except OSError:
        return None  # who reads the folder says what is wrong with it
    ends = {Path(name).suffix for name in names}
    return Listing(path, names) if whatever or (ends - _OWN_FILES and ".safetensors" not in ends) else None


def _inside(listing: Listing, name: str, plugin: str) -> Path:
    """Return the place of a claimed file.

    Raises:
        PluginError: It is no name, or no file of the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or Path(name).name != name:
        raise PluginError(f"{plugin}: claims() names {name!r}; only files of the folder itself are read")
    return listing.folder / name


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn what a format raises into one line that names it; Dovetail's own errors pass."""
    try:
        yield
    except DovetailError:
        raise
    except Exception as error:
        raise PluginError(f"--load-format: {name} raised {described(error)}; report this to its author") from error
