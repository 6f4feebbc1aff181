"""The plugin plan: what every process loads. Made once by the main process, frozen, and passed on at spawn.

`make_plan` turns the names a user gave, and `auto`, into plugins, on metadata alone. It travels as msgpack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from typing import Any

import msgspec

from dovetail.contracts.errors import PluginError
from dovetail.plugins.kinds import KINDS, PluginKind, split_qualified
from dovetail.plugins.options import option_key
from dovetail.plugins.records import PluginRecord, PluginState
from dovetail.plugins.registry import Registry
from dovetail.plugins.time_limit import DEFAULT_TIMEOUT_S

AUTO = "auto"
PLAIN = "none"
"""In a manifest's `reads`: a checkpoint without a `quant_method`."""
OWN = "dovetail"
"""As `model_impl`: the plugin that is named as the architecture, and no other."""

Facts = Mapping[str, str]
"""What is known of the server: `device`, `architecture`, `quantization`, `vision`; "" or `auto` for what is not."""
Options = Mapping[str, Mapping[str, Any]]
"""Settings by plugin name, plain values."""
Select = Callable[[str, Facts], str | None]
"""Answers `auto` for (kind, facts) with a name, or None to leave the choice to the manifests."""


class PlannedPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin of a plan.

    Attributes:
        kind: A key of `KINDS`.
        name: The name it is registered under.
        target: `module:attr`.
        distribution: The package that registers it; "" for one added without a package.
        version: That package's version; checked again before loading.
        api: The API version it is written for.
        roles: The processes that import it.
        options: Its settings, plain values.
        requested: Asked for by name. False for a candidate of `auto`, whose failure passes to the next one.
        file: Path of the `--plugin-file` that holds it, whose digest is then the version; "" for an installed one.
        preferred: A hook's answer to `auto`: taken if it serves, whatever else does.
        use: What it is for where several of its kind share the work: `prefill` or `decode`; "" for everything.
    """

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    api: int
    roles: tuple[str, ...]
    options: dict[str, Any] = {}
    requested: bool = True
    file: str = ""
    use: str = ""
    preferred: bool = False

    @property
    def qualified(self) -> str:
        """`distribution:name`."""
        return f"{self.distribution}:{self.name}"


class PluginPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every plugin that may be loaded, in order; candidates of `auto` best first.

    `timeout_s` is the time that each plugin gets to be imported or started; 0 for no limit.
    """

    plugins: tuple[PlannedPlugin, ...] = ()
    timeout_s: float = DEFAULT_TIMEOUT_S

    def of_kind(self, kind: str) -> tuple[PlannedPlugin, ...]:
        """Return the plugins of one kind, in order."""
        return tuple(plugin for plugin in self.plugins if plugin.kind == kind)

    def for_role(self, role: str) -> tuple[PlannedPlugin, ...]:
        """Return what a process of this role loads, in order."""
        return tuple(plugin for plugin in self.plugins if role in plugin.roles)

    def encode(self) -> bytes:
        """Return the plan as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> PluginPlan:
        """Read what `encode` wrote.

        Raises:
            PluginError: The bytes are not a plan.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise PluginError(f"plugin plan: cannot be read: {error}; start all processes from one release") from error


def make_plan(
    registry: Registry,
    *,
    prefill_attention_backend: str | None = None,
    decode_attention_backend: str | None = None,
    hooks: Sequence[str] = (),
    device: str = AUTO,
    quant_method: str = "",
    vision: str = "",
    model_impl: str = AUTO,
    options: Options | None = None,
    select: Select | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **names: str | Sequence[str] | None,
) -> PluginPlan:
    """Choose the plugins of a server and mark them `selected` in the registry. Imports none of them.

    Args:
        registry: What is installed.
        prefill_attention_backend: Name of the one that computes prompts; None or `auto` for `attention_backend`.
        decode_attention_backend: Name of the one that computes the other tokens; as above.
        hooks: Names of the enabled hook plugins.
        device: Name of the device, or `auto` where it is not known yet: then no plugin is refused for it, and with a
            model all that take part in `auto` are planned.
        quant_method: What `quantization_config` of the model's `config.json` names, "" if it has none.
        vision: The `model_type` of its `vision_config`, "" if it has none or that is not known.
        model_impl: Which plugin serves the model: `dovetail` the one named as its architecture, a name that one; `auto`
            the first, and where there is none the best that says in its manifest that it serves it.
        options: Settings by plugin name, plain values.
        select: Asked first for every `auto`; usually the `dovetail_select` hook.
        timeout_s: Time that each plugin gets to be imported or started; 0 for no limit.
        names: The plugin of each other kind of `KINDS` by the kind's name: its name, or `auto`; None selects none, or
            with a model the kind's default if that is installed. That of `model` is a Hugging Face architecture string.
            Several names where the kind may have any number.

    Raises:
        PluginError: A name is unknown, ambiguous or not usable here, or `auto` finds no attention backend.
        TypeError: There is no such kind.
    """
    single, lists = _by_kind(names)
    model = single.get("model")
    asked_device, device = device, split_qualified(device)[1]
    if registry.of_kind("device") and (model or device != AUTO):
        single["device"] = asked_device
    facts = {"device": device, "architecture": model or "", "quantization": quant_method, "vision": vision}
    method = (quant_method or PLAIN) if model else ""
    planned: list[PlannedPlugin] = []
    for kind, row in KINDS.items():
        default = row.default if row.default and row.default in registry.names(kind) else None
        name = single.get(kind) or (default if model else None)
        if name == AUTO and _has_no_use(registry, kind, facts, model_impl):
            name = None
        if name == AUTO and kind != "model":
            found = _answer_auto(registry, kind, facts, select, options or {})
            planned += found
            name = None if found else default
        if name is not None and kind == "model":
            name = model_plugin(registry, name, model_impl, device)
        if name is not None:
            is_named = kind == "model" and model_impl not in (AUTO, OWN)
            with _naming(kind, "--model-impl" if is_named else row.label):
                planned.append(by_name(registry, kind, name, device, options or {}, method))
        wanted = tuple(dict.fromkeys(lists.get(kind, ())))
        if wanted != (row.without,):
            planned += _in_order(registry, row, wanted, facts, select, options or {})
    for use, half in (("prefill", prefill_attention_backend), ("decode", decode_attention_backend)):
        if half is not None and half != AUTO:
            planned.append(_half(registry, use, half, device, options or {}))
    for name in dict.fromkeys(hooks):
        planned.append(by_name(registry, "hooks", name, device, options or {}))
    return PluginPlan(plugins=tuple(planned), timeout_s=timeout_s)


def _by_kind(names: Mapping[str, str | Sequence[str] | None]) -> tuple[dict[str, str], dict[str, Sequence[str]]]:
    """Divide names into those of kinds that have one plugin, and of kinds that may have several."""
    if unknown := names.keys() - (KINDS.keys() - {"hooks", "device"}):
        raise TypeError(f"make_plan: {min(unknown)} is no kind of plugin; possible: {', '.join(KINDS)}")
    lists: dict[str, Sequence[str]] = {}
    single: dict[str, str] = {}
    for kind, value in names.items():
        if value is not None and KINDS[kind].many:
            lists[kind] = [value] if isinstance(value, str) else value
        elif isinstance(value, str):
            single[kind] = value
        elif value is not None:
            raise TypeError(f"make_plan: {kind}={value!r}: give one name")
    return single, lists


def _has_no_use(registry: Registry, kind: str, facts: Facts, impl: str) -> bool:
    """Whether `auto` selects none for a model: it lacks what the kind is for, or what serves it reads text alone."""
    fact, model = KINDS[kind].fact, facts["architecture"]
    if fact and not facts[fact]:
        return True
    return kind == "processor" and bool(model) and model_plugin(registry, model, impl, facts["device"]) != model


def _in_order(
    registry: Registry, row: PluginKind, wanted: Sequence[str], facts: Facts, select: Select | None, options: Options
) -> list[PlannedPlugin]:
    """Return the plugins of a list of names; `auto` at its end stands for what fits beside those that are named."""
    given = f"{row.label} {','.join(wanted)!r}"
    if row.without and row.without in wanted:
        raise PluginError(f"{given}: {row.without!r} stands alone; give it, or names")
    names = [name for name in wanted if not (row.without and name == AUTO)]
    if len(names) < len(wanted) and wanted[-1] != AUTO:
        raise PluginError(f"{given}: {AUTO!r} goes last, behind the names; give {','.join([*names, AUTO])}")
    found = [by_name(registry, row.name, name, facts["device"], options) for name in names]
    if len(names) < len(wanted):
        named = {planned.qualified for planned in found}
        fitting = _answer_auto(registry, row.name, facts, select, options)
        found += [planned for planned in fitting if planned.qualified not in named]
    return found


def model_plugin(registry: Registry, architecture: str, impl: str = AUTO, device: str = AUTO) -> str:
    """Return the name of the plugin that serves an architecture; that of the architecture if nothing does.

    Args:
        registry: What is installed.
        architecture: Of the model's `config.json`.
        impl: As `model_impl` of `make_plan`.
        device: As there.
    """
    if impl not in (AUTO, OWN):
        return impl
    if impl == OWN or any(record.answers_to(split_qualified(architecture)[1]) for record in registry.of_kind("model")):
        return architecture
    found = candidates(registry, "model", {"device": device, "architecture": architecture})
    return found[0].qualified if found else architecture


def candidates(registry: Registry, kind: str, facts: Facts) -> list[PluginRecord]:
    """Return the plugins of `kind` that `auto` may take, best first, by their manifests' facts.

    A plugin takes part when its manifest has `matches`, every fact in it fits, its devices include this one, and the
    packages it needs are installed. The one that constrains more facts goes first, then exact values before patterns,
    then built-ins, then by name.

    Args:
        registry: What is installed.
        kind: A key of `KINDS`.
        facts: What is known: `device`, `architecture`, `quantization`, `vision`. An unknown one is `auto` or "", and
            fits every pattern.
    """
    fitting = [r for r in registry.of_kind(kind) if r.usable and _fits(r, facts)]
    return sorted(fitting, key=_specificity)


def _answer_auto(
    registry: Registry, kind: str, facts: Facts, select: Select | None, options: Options
) -> list[PlannedPlugin]:
    """Return the candidates for `auto`, a hook's answer first; it is the user's plugin's choice, so it must exist."""
    chosen: list[PluginRecord] = []
    if select is not None and (answer := select(kind, facts)) is not None:
        chosen.append(registry.resolve(kind, answer))
    answered = bool(chosen)
    chosen += [record for record in candidates(registry, kind, facts) if record not in chosen]
    if not chosen and (fact := KINDS[kind].fact):
        raise PluginError(
            f"{KINDS[kind].label} 'auto': the model's {fact} is {facts[fact]!r}, and no installed plugin says in its "
            f"manifest that it reads that; installed: {', '.join(registry.names(kind)) or 'none'}"
        )
    if not chosen and kind == "attention_backend":
        raise PluginError(
            f"{KINDS[kind].label} 'auto': no installed backend says in its manifest that it serves device "
            f"{facts['device']!r}; installed: {', '.join(registry.names(kind)) or 'none'}; name one of them"
        )
    found = [_planned(registry, record, options, requested=False) for record in chosen]
    if answered:
        found[0] = msgspec.structs.replace(found[0], preferred=True)
    return found


def by_name(registry: Registry, kind: str, name: str, device: str, options: Options, method: str = "") -> PlannedPlugin:
    """Plan the plugin that is asked for by name; `method` is the checkpoint's `quant_method`, "" where it is unknown.

    Raises:
        PluginError: It is unknown, or by what its package says cannot be used here; nothing was imported.
    """
    record = registry.resolve(kind, name)
    why_not = _why_not(record, device) or _why_not_read(record, method)
    if why_not is not None:
        raise PluginError(
            f"{KINDS[kind].label} {name!r}: {record.name} of {record.distribution} {record.version} "
            f"cannot be used: {why_not}"
        )
    return _planned(registry, record, options, requested=True)


def _half(registry: Registry, use: str, name: str, device: str, options: Options) -> PlannedPlugin:
    """Plan the attention backend of one half of the work; errors name that half's flag."""
    kind = KINDS["attention_backend"]
    with _naming(kind.name, kind.label.replace("--", f"--{use}-")):
        found = by_name(registry, kind.name, name, device, options)
    return msgspec.structs.replace(found, use=use)


@contextmanager
def _naming(kind: str, flag: str) -> Iterator[None]:
    """Name the flag that was given, in errors about a plugin of a kind, in place of the kind's own."""
    try:
        yield
    except PluginError as error:
        raise PluginError(str(error).replace(KINDS[kind].label, flag, 1)) from None


def _planned(registry: Registry, record: PluginRecord, options: Options, *, requested: bool) -> PlannedPlugin:
    if requested:
        registry.mark(record.kind, record.qualified, PluginState.SELECTED)
    return msgspec.structs.replace(as_planned(record), options=_options_of(options, record.name), requested=requested)


def as_planned(record: PluginRecord) -> PlannedPlugin:
    """Return a record as a plan holds it, without options and not asked for: for looking at plugins, not serving."""
    return PlannedPlugin(
        kind=record.kind,
        name=record.name,
        target=record.target,
        distribution=record.distribution,
        version=record.version,
        api=record.api or KINDS[record.kind].api,
        roles=record.facts.roles or KINDS[record.kind].roles,
        requested=False,
        file=record.file,
    )


def _options_of(options: Options, name: str) -> dict[str, Any]:
    key = option_key(name)
    return {
        option: value for owner, given in options.items() if option_key(owner) == key for option, value in given.items()
    }


def _why_not(record: PluginRecord, device: str) -> str | None:
    """Say why the manifest's facts rule a plugin out here, with the fix, or None."""
    devices = record.facts.devices
    if devices and device not in (AUTO, *devices):
        fix = f"choose another, or --device {devices[0]} where there is one"
        return f"it runs on {', '.join(devices)}, not on {device}; {fix}"
    # Found by a folder's name: metadata, which takes milliseconds to parse, is not read.
    missing = [package for package in record.facts.packages if not any(distributions(name=package))]
    if missing:
        return f"it needs {', '.join(missing)}; run: pip install {' '.join(missing)}"
    return None


def _why_not_read(record: PluginRecord, method: str) -> str | None:
    """Say why the manifest's facts rule a quantisation out for this checkpoint, with the fix, or None."""
    reads = record.facts.reads
    if not reads or not method or method in reads:
        return None
    here = "is plain" if method == PLAIN else f"has quant_method {method!r}"
    possible = ", ".join("plain ones" if one == PLAIN else one for one in reads)
    return f"it reads {possible}, and this checkpoint {here}; leave --quantization out, or give such a checkpoint"


def _fits(record: PluginRecord, facts: Facts) -> bool:
    matches = record.facts.matches
    if matches is None or _why_not(record, facts.get("device", AUTO)) is not None:
        return False
    return all(
        value in ("", AUTO) or any(fnmatchcase(value, pattern) for pattern in patterns)
        for patterns, value in ((patterns, facts.get(fact, "")) for fact, patterns in matches.items())
    )


def _specificity(record: PluginRecord) -> tuple[int, int, bool, str]:
    """Sort key: most constrained facts, then most exact values, then built-in, then name."""
    matches = record.facts.matches or {}
    narrow = [patterns for patterns in matches.values() if "*" not in patterns]
    exact = sum(not any(char in pattern for char in "*?[") for patterns in narrow for pattern in patterns)
    return -len(narrow), -min(exact, len(narrow)), not record.builtin, record.name
