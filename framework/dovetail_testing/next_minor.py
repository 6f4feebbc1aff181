"""What Dovetail's next minor version ends and this one lets pass: the rules of `dovetail plugin check --next-minor`.

A rule is a claim about a package that works with the next minor version, and what finds the faults. Beside the rules
the whole kit runs with deprecations as errors. What is announced for the next minor version gets a line in `ENDING`,
and goes when that version is made.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dovetail.plugins.core_imports import ADVICE, core_imports, is_within, private_imports
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.scan import unmet_by_next

ENDING = {"dovetail.plugins.hookspecs": "import hookimpl and what hooks are given from dovetail.contracts"}
"""Modules that plugins may import of this minor version and not of the next, each with what to do."""

DEPRECATIONS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)


class MinorRule(NamedTuple):
    """What holds of a plugin that works with the next minor version.

    Attributes:
        claim: The sentence.
        faults: Returns what speaks against it, a line each with what to do.
    """

    claim: str
    faults: Callable[[PluginRecord], list[str]]


def _requirements(record: PluginRecord) -> list[str]:
    why = None if record.file else unmet_by_next(record.distribution)
    return [f"{why}; leave the upper bound out"] if why else []


def _private(record: PluginRecord) -> list[str]:
    found = private_imports(record)
    return [f"it imports {', '.join(found)}; {ADVICE}"] if found else []


def _ending(record: PluginRecord) -> list[str]:
    return [
        f"it imports {module} ({file}); {fix}"
        for module, file in core_imports(record).items()
        for ended, fix in ENDING.items()
        if is_within(module, ended)
    ]


def _api(record: PluginRecord) -> list[str]:
    kind = KINDS[record.kind]
    if record.api is None or record.api >= kind.api:
        return []
    return [f"it is written for API {record.api} of {kind.name}; register it in {kind.entry_point_group}, too"]


RULES = (
    MinorRule("The requirements of its package admit the next minor version.", _requirements),
    MinorRule("It imports of Dovetail only what plugins may rely on.", _private),
    MinorRule("It imports nothing that ends with this minor version.", _ending),
    MinorRule("It is written for an API version that the next minor version speaks.", _api),
)


@contextmanager
def deprecations_raise(record: PluginRecord) -> Iterator[None]:
    """Turn warnings of what is deprecated into errors where the plugin's own code causes them.

    Warnings of other packages stay warnings: their authors hear of them, and the plugin's cannot mend them.
    """
    package = re.escape(record.target.partition(":")[0].partition(".")[0])
    with warnings.catch_warnings():
        for category in DEPRECATIONS:
            warnings.filterwarnings("error", category=category, module=rf"{package}(\.|$)")
        yield
