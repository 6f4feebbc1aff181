"""The names that requests may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from dovetail_server.errors import catalogue as errors
from dovetail_server.http.addresses import DEPLOYMENT
from dovetail_server.schema.models import DEFAULT_MODEL
from dovetail_server.schema.tags import OPENAI, TAGS


class Served(msgspec.Struct, frozen=True):
    """The names of the one model that a server has.

    Attributes:
        names: Those that are listed; the first is the usual one.
        aliases: Patterns of further names that mean the first: `API=PATTERN` on the routes of an API, `PATTERN` on all.
    """

    names: list[str]
    aliases: list[str]

    def name(self, asked: str | None, tag: str = OPENAI) -> str:
        """Return the name a reply carries. A request that names none, or SGLang's `default`, means the first.

        Args:
            asked: What the body names.
            tag: Of the route.

        Raises:
            RequestError: A 404 that lists the served names, also for that of the address.
        """
        deployment = DEPLOYMENT.get()
        if deployment is not None and not self.takes(deployment, tag):
            raise errors.model_not_found(deployment[:128], self.names)
        if asked is not None and not self.takes(asked, tag):
            raise errors.model_not_found(asked, self.names)
        return asked if asked is not None and asked in self.names else self.names[0]

    def takes(self, name: str, tag: str = OPENAI) -> bool:
        """Whether a request on a route of this tag may ask for a name."""
        return name in self.names or name == DEFAULT_MODEL or any(_is_alias(name, tag, each) for each in self.aliases)


def _is_alias(name: str, tag: str, alias: str) -> bool:
    api, _, pattern = alias.rpartition("=")
    return (not api or tag in TAGS[api]) and fnmatchcase(name, pattern)


def check_deployment(names: Sequence[str]) -> None:
    """Raise unless the model that the address names is among those of several, if it names one.

    Raises:
        RequestError: A 404 that lists them.
    """
    name = DEPLOYMENT.get()
    if name is not None and name not in (*names, DEFAULT_MODEL):
        raise errors.model_not_found(name[:128], list(names))
