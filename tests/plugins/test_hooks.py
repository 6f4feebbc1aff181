"""Hooks: only enabled plugins are called, in order, each on its own, and mistakes are named."""

from __future__ import annotations

import inspect
import logging
import sys

import pytest

from dovetail.contracts import CliCommands, ConfigDraft
from dovetail.contracts.errors import PluginError
from dovetail.plugins import HookManager, Registry, hookspecs, load, make_plan
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.manager import REGISTRATION_HOOKS
from dovetail_testing.site import FakeSite

HOOKS = "dovetail.hooks.v1"
HEAD = "import sys\nfrom dovetail.contracts import HealthCheck, RouteSet, hookimpl\nmodule = sys.modules[__name__]\n"


def enable(site: FakeSite, **sources: str) -> HookManager:
    """Install one hooks plugin per keyword and enable them in that order."""
    for name, source in sources.items():
        site.add(name, "1.0", {HOOKS: {name: f"{name}_hooks:module"}}, {f"{name}_hooks.py": HEAD + source})
    return HookManager.enable(Registry.scan(path=[str(site.root)]), list(sources))


def failure(site: FakeSite, **sources: str) -> str:
    with pytest.raises(PluginError) as caught:
        enable(site, **sources)
    return str(caught.value)


def test_only_enabled_plugins_are_imported(site: FakeSite) -> None:
    """An installed hooks plugin that is not enabled is not imported."""
    site.add("idle", entry_points={HOOKS: {"idle": "idle_hooks:module"}}, files={"idle_hooks.py": "raise SystemExit"})
    assert enable(site, acme="").settings() == []
    assert "idle_hooks" not in sys.modules


@pytest.mark.parametrize("kind", sorted(REGISTRATION_HOOKS))
def test_registration_hooks_reach_the_plan(site: FakeSite, kind: str) -> None:
    """What a registration hook adds resolves by name and belongs to the hook's package, for every kind."""
    source = f"""
@hookimpl
def {REGISTRATION_HOOKS[kind]}(registry):
    registry.add("Made", "acme_made:Made", aliases=["Alias"], matches={{}})
"""
    site.add("acme", "1.0", {HOOKS: {"acme": "acme_hooks:module"}}, {"acme_hooks.py": HEAD + source})
    registry = Registry.scan(path=[str(site.root)])
    HookManager.enable(registry, ["acme"])
    record = registry.resolve(kind, "Alias")
    assert (record.name, record.distribution, record.version, record.target) == (
        "Made",
        "acme",
        "1.0",
        "acme_made:Made",
    )
    (planned,) = make_plan(registry, **{kind: "Made"}).plugins
    assert planned.target == "acme_made:Made"


def test_every_kind_chosen_by_name_has_a_registration_hook() -> None:
    """Each kind but hooks itself can be registered by a hook of its own."""
    assert set(REGISTRATION_HOOKS) == set(KINDS) - {"hooks"}


def test_every_hook_is_documented_and_every_spec_is_a_hook() -> None:
    """Each function of the hook page is a hook with a docstring, and its name starts with `dovetail_`."""
    functions = [f for f in vars(hookspecs).values() if inspect.isfunction(f) and f.__module__ == hookspecs.__name__]
    assert len(functions) == 11 + len(REGISTRATION_HOOKS)
    assert all(f.__name__.startswith("dovetail_") and inspect.getdoc(f) for f in functions)


def test_hooks_are_called_in_the_order_enabled(site: FakeSite) -> None:
    """The plugin enabled first is called first and its answer to `auto` wins."""
    source = "@hookimpl\ndef dovetail_select(kind, facts):\n    return {!r} if kind == 'tool_parser' else None\n"
    hooks = enable(site, b_first=source.format("one"), a_second=source.format("two"))
    assert hooks.select("tool_parser", {}) == "one"
    assert hooks.select("model", {}) is None


def test_one_failing_implementation_does_not_stop_the_others(site: FakeSite, caplog: pytest.LogCaptureFixture) -> None:
    """Every implementation runs although the first raises; at stop the failure is logged, at start it is raised."""
    bad = "@hookimpl\ndef dovetail_process_start(ctx):\n    raise OSError('no disk')\n" + (
        "@hookimpl\ndef dovetail_process_stop(ctx):\n    raise OSError('gone')\n"
    )
    good = (
        "seen = []\n@hookimpl\ndef dovetail_process_start(ctx):\n    seen.append((ctx.role, ctx.rank, ctx.plugin))\n"
        + ("@hookimpl\ndef dovetail_process_stop():\n    seen.append('stop')\n")
    )
    hooks = enable(site, bad=bad, good=good)
    with pytest.raises(PluginError) as caught:
        hooks.start("api", rank=2)
    assert str(caught.value) == "hooks 'bad' of bad 1.0: dovetail_process_start raised OSError: no disk"
    with caplog.at_level(logging.WARNING, "dovetail.plugins"):
        hooks.stop("api")
    assert [r.getMessage() for r in caplog.records] == [
        "hooks 'bad' of bad 1.0: dovetail_process_stop raised OSError: gone"
    ]
    assert sys.modules["good_hooks"].seen == [("api", 2, "good"), "stop"]


def test_all_failures_are_named(site: FakeSite) -> None:
    """Two plugins that fail to register are both named in one message."""
    bad = "@hookimpl\ndef dovetail_models(registry):\n    registry.add('X', 'no-target')\n"
    message = failure(site, one=bad, two=bad)
    assert message.count("dovetail_models raised PluginError") == 2
    assert "hooks 'one' of one 1.0" in message
    assert "hooks 'two' of two 1.0" in message


def test_unknown_hook_is_refused_with_the_nearest(site: FakeSite) -> None:
    """A misspelt hook is an error at start that suggests the right name."""
    message = failure(site, acme="@hookimpl\ndef dovetail_model(registry): ...\n")
    assert "hooks 'acme' of acme 1.0: PluginValidationError: unknown hook 'dovetail_model'" in message
    assert message.endswith("did you mean dovetail_models?")


def test_unknown_argument_is_refused(site: FakeSite) -> None:
    """An implementation that asks for an argument the hook does not have is an error at start."""
    message = failure(site, acme="@hookimpl\ndef dovetail_select(kind, request): ...\n")
    assert "Argument(s) {'request'} are declared in the hookimpl but can not be found in the hookspec" in message


def test_class_and_wrapper_are_refused(site: FakeSite) -> None:
    """A class instead of an instance, and a hook wrapper, are refused with what to write instead."""
    assert "acme_hooks:module is a class; name a module or an instance" in failure(site, acme="class module: ...\n")
    message = failure(site, zeta="@hookimpl(wrapper=True)\ndef dovetail_settings():\n    return (yield)\n")
    assert message.endswith("dovetail_settings is a hook wrapper; write a plain implementation")


def test_instance_with_methods_works_in_a_child(site: FakeSite) -> None:
    """An instance serves as a plugin, is loaded from the plan in a child, and is told its options and role."""
    source = """
class Plugin:
    @hookimpl
    def dovetail_health(self, ctx):
        return HealthCheck(name=ctx.plugin, check=lambda: ctx.options["say"])
module = Plugin()
"""
    site.add("acme", "1.0", {HOOKS: {"acme": "acme_hooks:module"}}, {"acme_hooks.py": HEAD + source})
    registry = Registry.scan(path=[str(site.root)])
    plan = make_plan(registry, hooks=["acme"], options={"acme": {"say": "unwell"}})
    (result,) = HookManager(load(plan, "api").all("hooks")).in_process("dovetail_health", "api")
    assert (result.value.name, result.value.check()) == ("acme", "unwell")


def test_proposed_defaults_yield_to_the_user(site: FakeSite) -> None:
    """A plugin's default holds with its reason unless the user configured the setting."""
    source = """
@hookimpl
def dovetail_configure(draft, facts):
    draft.set("page_size", facts["page"], why="the kernel needs it")
    draft.set("port", 1, why="mine")
"""
    draft = ConfigDraft(known=frozenset({"page_size", "port"}), configured={"port": 30000})
    enable(site, acme=source).configure(draft, {"page": 64})
    assert draft.defaults() == {"page_size": 64}
    assert [(p.key, p.why, p.plugin, p.applied) for p in draft.proposals] == [
        ("page_size", "the kernel needs it", "acme", True),
        ("port", "mine", "acme", False),
    ]


def test_contradicting_defaults_are_an_error(site: FakeSite) -> None:
    """Two plugins that propose different values for one setting are both named; neither wins."""
    source = "@hookimpl\ndef dovetail_configure(draft):\n    draft.set('page_size', {}, why='fast')\n"
    hooks = enable(site, acme=source.format(16), zeta=source.format(64))
    with pytest.raises(PluginError, match=r"acme proposes 16 \(fast\) and zeta 64 \(fast\); set it yourself"):
        hooks.configure(ConfigDraft(known=frozenset({"page_size"})), {})
    with pytest.raises(PluginError, match="setting 'page_size': unknown"):
        hooks.configure(ConfigDraft(known=frozenset()), {})


def test_cli_commands_are_collected_and_do_not_collide(site: FakeSite) -> None:
    """A sub-command carries its plugin; one that is taken is refused with its owner."""
    source = "@hookimpl\ndef dovetail_cli_commands(commands):\n    commands.add('tune', 'acme:main', help='Tune.')\n"
    commands = CliCommands(reserved=frozenset({"serve"}))
    enable(site, acme=source).cli_commands(commands)
    assert (commands.commands["tune"].plugin, commands.commands["tune"].target) == ("acme", "acme:main")
    with pytest.raises(PluginError, match="command 'tune': acme has one of this name already"):
        commands.add("tune", "x:y", help="")
    with pytest.raises(PluginError, match="command 'serve': dovetail has one of this name already"):
        commands.add("serve", "x:y", help="")
