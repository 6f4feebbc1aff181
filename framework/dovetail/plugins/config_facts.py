"""What a model's manifest names to translate `config.json` with, before torch is imported."""

from __future__ import annotations

from importlib import import_module

from dovetail.contracts.errors import PluginError, described
from dovetail.contracts.model import ConfigFacts
from dovetail.plugins.loader import describe, one_process
from dovetail.plugins.plan import as_planned
from dovetail.plugins.records import PluginRecord
from dovetail.plugins.signals import Signalled
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S, Interrupted, time_limit


def config_facts(record: PluginRecord, timeout_s: float = DEFAULT_TIMEOUT_S) -> type[ConfigFacts] | None:
    """Return what a model's manifest names as `config`; None where it names nothing.

    Args:
        record: The model's plugin.
        timeout_s: What importing it may take; 0 for no limit.

    Raises:
        PluginError: It cannot be imported, or is no such class.
    """
    module, _, name = record.facts.config.partition(":")
    if not module:
        return None
    who = describe(as_planned(record))
    try:
        with time_limit(f"{who}: importing {module}", timeout_s), one_process():
            found: type[ConfigFacts] = getattr(import_module(module), name)
            _ = found.config_from_hf, found.tensors, found.unneeded
    except (PluginError, Signalled, Interrupted):
        raise
    except BaseException as error:  # a stranger's module may raise anything
        text = f"{who}: its manifest names {record.facts.config} as config, which raised {described(error)}"
        raise PluginError(f"{text}; upgrade {record.distribution} or report this to its author") from error
    return found
