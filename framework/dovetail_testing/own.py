"""The conformance classes that a package brings for its plugins: entry points of the group `dovetail.conformance`.

```toml
[project.entry-points."dovetail.conformance"]
acme-r2 = "test_dovetail_acme_r2:TestAcmeR2"
```

The keys are free. A class says itself, by its kind and `name`, which plugin it tests; several may test one.
"""

from __future__ import annotations

from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError

from dovetail.contracts.errors import PluginError
from dovetail.plugins.kinds import KIT_GROUP, normalise, split_qualified
from dovetail.plugins.moved import where_now
from dovetail.plugins.records import PluginRecord
from dovetail_testing.conformance.base import Conformance


def own_classes(record: PluginRecord) -> list[type[Conformance]]:
    """Return the classes that a plugin's package brings for it, in the order of their keys.

    Raises:
        PluginError: One cannot be imported, or is no conformance class of a plugin that the package has.
    """
    try:
        entries = Distribution.from_name(record.distribution).entry_points.select(group=KIT_GROUP)
    except PackageNotFoundError:  # a hook registered it for a package that is not installed
        return []
    found = [_load(entry, record) for entry in sorted(entries, key=lambda entry: entry.name)]
    return [cls for cls in found if cls.kind == record.kind and record.answers_to(split_qualified(cls.name or "")[1])]


def unused_classes(distribution: str, records: list[PluginRecord]) -> list[str]:
    """Return a line for each class of a package that tests none of its plugins, which is a slip of the pen."""
    known = {(record.kind, normalise(record.kind, record.name)) for record in records}
    lines = []
    for entry in Distribution.from_name(distribution).entry_points.select(group=KIT_GROUP):
        cls = _load(entry, records[0])
        name = split_qualified(cls.name or "")[1]
        if (cls.kind, normalise(cls.kind, name)) not in known:
            lines.append(
                f"{KIT_GROUP} {entry.name!r}: {entry.value} tests {cls.kind} {name!r}, which is not registered"
            )
    return lines


def _load(entry: EntryPoint, record: PluginRecord) -> type[Conformance]:
    what = f"{record.distribution} {record.version}: {KIT_GROUP} {entry.name!r}"
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything; the cause is kept
        fix = where_now(error) or "correct the entry point"
        text = f"{what}: importing {entry.value} raised {type(error).__name__}: {error}; {fix}"
        raise PluginError(" ".join(text.split())) from error
    if not isinstance(found, type) or not issubclass(found, Conformance) or found.name is None:
        raise PluginError(f"{what}: {entry.value} is no conformance class with a name; see dovetail_testing")
    return found
