"""All that a plugin author reads: one module per kind of plugin, and this package offers the names of all.

Importing it imports neither torch nor pydantic, and each contract only when one of its names is used.
"""

from dovetail.contracts.offered import offered

__all__, __getattr__ = offered(__name__, __file__)
