"""The kinds of plugin, their entry-point groups and API versions, and how names compare.

A plugin's key is (kind, name). Names compare case-insensitively with `_` equal to `-`, except model architectures,
which are the exact string of `config.json`. `distribution:name` names one plugin of one package.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ROLES = ("api", "engine", "worker", "compiler")
"""Kinds of process: HTTP server, engine, a tensor-parallel rank beside it, grammar compiler."""

MANIFEST_GROUP = "dovetail.manifest"
"""Entry points of this group name a top-level package that holds a `dovetail-plugins.json`."""

KIT_GROUP = "dovetail.conformance"
"""Entry points of this group name conformance classes: a package's own samples and configurations."""

SDK_API, SDK_MINOR = 1, 0
"""The version of `dovetail.sdk`, which grows as that of a kind."""


class PluginKind(NamedTuple):
    """One kind of plugin. All that goes over kinds reads this table: plan, loader, flags, list, scaffold, docs, kit.

    Attributes:
        name: As in `PlannedPlugin.kind`, manifests and `GET /v1/plugins`.
        group: Entry-point group without the version: `dovetail.models`.
        roles: The processes that import a selected plugin of this kind; hook plugins declare theirs in a manifest.
        contract: `module:attr` of the class that a plugin subclasses, or None for hooks.
        label: How a name of this kind is given by a user: the flag, or a word.
        kit: `module:attr` of its conformance class.
        about: What a new package of it says of itself; `{name}` is the plugin's.
        setting: The setting that names the plugin; "" where none does.
        many: It names any number of them, all of which are loaded; a list.
        without: Of a kind of which there may be many, the word that asks for none; `auto`, alone or behind names, then
            asks for those that say in their manifest that they fit. "": only names are given.
        default: The plugin of every engine that names none; "" where there need not be one.
        fact: `auto` looks for a plugin of this kind only if this fact is known of the model; "" always.
        watched: Core modules that loading such a plugin must not change, besides what every kind must leave alone.
        api: The API version this Dovetail speaks.
        oldest_api: The oldest API version it still speaks, through an adapter.
        minor: How often the API of this version has grown since its first release. A plugin says the lowest it needs.
    """

    name: str
    group: str
    roles: tuple[str, ...]
    contract: str | None
    label: str
    kit: str
    about: str
    setting: str = ""
    many: bool = False
    without: str = ""
    default: str = ""
    fact: str = ""
    watched: tuple[str, ...] = ()
    api: int = 1
    oldest_api: int = 1
    minor: int = 0

    @property
    def hook(self) -> str:
        """The hook through which plugins of this kind are registered at start; "" for hooks themselves."""
        return "" if self.contract is None else self.group.replace(".", "_")

    @property
    def entry_point_group(self) -> str:
        """The group that a package of today uses: `dovetail.models.v1`."""
        return f"{self.group}.v{self.api}"

    def usage(self, name: str) -> str:
        """Return how a user names a plugin: where `auto` may stand behind names, what it finds does the rest."""
        return f"{self.label} {name}{',auto' if self.without else ''}"

    def supports_api(self, api: int) -> bool:
        """Whether a plugin written for `api` can be used."""
        return self.oldest_api <= api <= self.api

    def too_new(self, plugin: object) -> str:
        """Return why a plugin that needs a later minor version cannot be used, or "" where it can.

        One that says it in no number cannot, either.
        """
        spoken = {"needs_minor": (self.name, self.api, self.minor), "needs_sdk": ("dovetail.sdk", SDK_API, SDK_MINOR)}
        for attr, (name, api, minor) in spoken.items():
            needed = getattr(plugin, attr, 0)
            if not isinstance(needed, int):
                return f"{attr} = {needed!r} is no number of a minor version, such as {minor}"
            if needed > minor:
                return f"it needs API {api}.{needed} of {name}, this dovetail speaks {api}.{minor}"
        return ""


_IN_ENGINE = ("engine", "worker")
_PARSING = ("dovetail.sdk.formats.output", "dovetail.sdk.formats.json_calls")
_KIT = "dovetail_testing.conformance"

KINDS: dict[str, PluginKind] = {
    kind.name: kind
    for kind in (
        PluginKind(
            name="model",
            group="dovetail.models",
            roles=_IN_ENGINE,
            contract="dovetail.contracts.model:ModelPlugin",
            label="architecture",
            kit=f"{_KIT}.model:ModelConformance",
            about="The model architecture {name} for Dovetail",
            watched=(
                "dovetail.sdk.layers.transformer",
                "dovetail.sdk.layers.embedding",
                "dovetail.runtime.checkpoint.weights",
            ),
            minor=6,
        ),
        PluginKind(
            name="attention_backend",
            group="dovetail.attention_backends",
            roles=_IN_ENGINE,
            contract="dovetail.contracts.attention:AttentionBackend",
            label="--attention-backend",
            kit=f"{_KIT}.attention:AttentionBackendConformance",
            about="The attention backend {name} for Dovetail",
            setting="attention_backend",
            watched=("dovetail.cache.pool", "dovetail.sdk.layers.attention", "dovetail.runtime.graphs.batch"),
            minor=4,
        ),
        PluginKind(
            name="kernels",
            group="dovetail.kernels",
            roles=_IN_ENGINE,
            contract="dovetail.contracts.kernels:KernelSet",
            label="--kernels",
            kit=f"{_KIT}.kernels:KernelSetConformance",
            about="The kernel set {name} for Dovetail",
            setting="kernels",
            many=True,
            without="plain",
            watched=(
                "dovetail.sdk.layers.ops.reference",
                "dovetail.sdk.layers.ops.mixture",
                "dovetail.sdk.layers.norm",
                "dovetail.runtime.kernels.binding",
            ),
            minor=1,
        ),
        PluginKind(
            name="reasoning_parser",
            group="dovetail.reasoning_parsers",
            roles=("api",),
            contract="dovetail.contracts.reasoning:ReasoningParser",
            label="--reasoning-parser",
            kit=f"{_KIT}.parsers:ReasoningParserConformance",
            about="Lets Dovetail read the reasoning of {name} models",
            setting="reasoning_parser",
            watched=_PARSING,
        ),
        PluginKind(
            name="tool_parser",
            group="dovetail.tool_parsers",
            roles=("api",),
            contract="dovetail.contracts.tools:ToolParser",
            label="--tool-call-parser",
            kit=f"{_KIT}.parsers:ToolParserConformance",
            about="Lets Dovetail read the tool calls of {name} models",
            setting="tool_call_parser",
            watched=_PARSING,
        ),
        PluginKind(
            name="grammar_backend",
            group="dovetail.grammar_backends",
            roles=("api", "engine", "compiler"),
            contract="dovetail.contracts.grammar:GrammarBackend",
            label="--grammar-backend",
            kit=f"{_KIT}.grammar:GrammarBackendConformance",
            about="The grammar backend {name} for Dovetail",
            minor=2,
            setting="grammar_backend",
        ),
        PluginKind(
            name="processor",
            group="dovetail.processors",
            roles=("api",),
            contract="dovetail.contracts.processor:ImageProcessor",
            label="--processor",
            kit=f"{_KIT}.processor:ImageProcessorConformance",
            about="Lets Dovetail show images to {name} models",
            setting="processor",
        ),
        PluginKind(
            name="quantization",
            group="dovetail.quantizations",
            roles=_IN_ENGINE,
            contract="dovetail.contracts.quantization:Quantization",
            label="--quantization",
            kit=f"{_KIT}.quantization:QuantizationConformance",
            about="Lets Dovetail load checkpoints quantised as {name}",
            setting="quantization",
            fact="quantization",
            watched=("dovetail.sdk.layers.plain", "dovetail.sdk.layers.linear", "dovetail.runtime.checkpoint.weights"),
            minor=5,
        ),
        PluginKind(
            name="checkpoint",
            group="dovetail.checkpoints",
            roles=("api", *_IN_ENGINE),
            contract="dovetail.contracts.checkpoint:CheckpointFormat",
            label="--load-format",
            kit=f"{_KIT}.checkpoint:CheckpointConformance",
            about="Lets Dovetail load checkpoints in the format {name}",
            many=True,
        ),
        PluginKind(
            name="device",
            group="dovetail.devices",
            roles=("api", *_IN_ENGINE),
            contract="dovetail.contracts.device:Device",
            label="--device",
            kit=f"{_KIT}.device:DeviceConformance",
            about="Lets Dovetail compute on {name}",
        ),
        PluginKind(
            name="schedule_policy",
            group="dovetail.schedule_policies",
            roles=("engine",),
            contract="dovetail.contracts.scheduling:SchedulePolicy",
            label="--schedule-policy",
            kit=f"{_KIT}.scheduling:SchedulePolicyConformance",
            about="The schedule policy {name} for Dovetail",
            setting="schedule_policy",
            default="fcfs",
            watched=("dovetail.engine.scheduler", "dovetail.engine.policy"),
            minor=1,
        ),
        PluginKind(
            name="speculator",
            group="dovetail.speculators",
            roles=("engine",),
            contract="dovetail.contracts.speculation:Speculator",
            label="--speculator",
            kit=f"{_KIT}.speculation:SpeculatorConformance",
            about="The speculator {name} for Dovetail",
            setting="speculator",
            watched=("dovetail.engine.scheduler", "dovetail.engine.speculation"),
        ),
        PluginKind(
            name="logits_processor",
            group="dovetail.logits_processors",
            roles=("api", *_IN_ENGINE),
            contract="dovetail.contracts.logits:LogitsProcessor",
            label="--logits-processors",
            kit=f"{_KIT}.logits:LogitsProcessorConformance",
            about="The logits processor {name} for Dovetail",
            setting="logits_processors",
            many=True,
            watched=("dovetail.runtime.sampling.sampler",),
        ),
        PluginKind(
            name="api",
            group="dovetail.apis",
            roles=("api",),
            contract="dovetail.contracts.api:Api",
            label="--apis",
            kit=f"{_KIT}.api:ApiConformance",
            about="The API {name} for Dovetail",
            setting="apis",
            many=True,
        ),
        PluginKind(
            name="hooks",
            group="dovetail.hooks",
            roles=("api",),
            contract=None,
            label="--plugin",
            kit=f"{_KIT}.hooks:HooksConformance",
            about="The plugin {name} for Dovetail",
            watched=("dovetail.sdk.formats.output",),
            minor=1,
        ),
    )
}

_KIND_OF_GROUP = {kind.group: kind for kind in KINDS.values()}


def split_group(group: str) -> tuple[PluginKind | None, int | None]:
    """Split an entry-point group into its kind and API version; None for what is not recognised."""
    base, dot, version = group.rpartition(".v")
    if dot and version.isdecimal():
        return _KIND_OF_GROUP.get(base), int(version)
    return _KIND_OF_GROUP.get(group), None


def normalise(kind: str, name: str) -> str:
    """Return the form of `name` in which two names of `kind` are compared."""
    name = name.strip()
    if not name.isascii():  # two spellings of one text look alike in every message
        from unicodedata import normalize

        name = normalize("NFKC", name)
    return name if kind == "model" else name.replace("_", "-").lower()


def normalise_distribution(name: str) -> str:
    """Return a distribution's name as package indexes compare it: `Acme_Parser` is `acme-parser`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def split_qualified(name: str) -> tuple[str | None, str]:
    """Split `distribution:name` into its normalised distribution (None for a bare name) and the name."""
    distribution, colon, rest = name.partition(":")
    return (normalise_distribution(distribution), rest.strip()) if colon else (None, name)
