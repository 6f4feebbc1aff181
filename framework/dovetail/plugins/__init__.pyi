"""The names that the package offers, each once, for type checkers and the package itself."""

from dovetail.plugins.kinds import KINDS as KINDS, ROLES as ROLES
from dovetail.plugins.loader import LoadedPlugins as LoadedPlugins, load as load
from dovetail.plugins.manager import HookManager as HookManager
from dovetail.plugins.plan import PlannedPlugin as PlannedPlugin, PluginPlan as PluginPlan, make_plan as make_plan
from dovetail.plugins.records import PluginRecord as PluginRecord, PluginState as PluginState
from dovetail.plugins.registry import Registry as Registry
