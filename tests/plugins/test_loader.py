"""The loader: each role imports what it needs, checked against plan and contract; every failure names its plugin."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.plugins import PluginPlan, Registry, load, make_plan
from dovetail.plugins.loader import nearest_plugin
from dovetail_testing.site import FakeSite

MODELS = "dovetail.models.v1"
ATTENTION = "dovetail.attention_backends.v1"

MODEL = """
from dovetail.contracts.model import ModelPlugin

class Model(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    @classmethod
    def config_from_hf(cls, hf): ...
    @classmethod
    def build(cls, config, ctx): ...
    @classmethod
    def weight_map(cls, config): ...

class Half(ModelPlugin):
    @classmethod
    def build(cls, config, ctx): ...

class Outer:
    Inner = Model

class Stranger: ...
"""

BACKEND = """
from dovetail.contracts.attention import AttentionBackend, AttentionCaps

class Backend(AttentionBackend):
    caps = AttentionCaps(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}))
    def __init__(self, config, kv_pool, device): ...
    def forward_extend(self, q, k, v, layer, batch, out): ...
    def forward_decode(self, q, k, v, layer, batch, out): ...
"""

ANY_DEVICE = {"matches": {"device": ["*"]}}


def plan_for(site: FakeSite, **names: str) -> PluginPlan:
    return make_plan(Registry.scan(path=[str(site.root)]), **names)  # type: ignore[arg-type]


def failure(site: FakeSite, target: str, source: str = MODEL) -> str:
    """Return the message of loading a model plugin with this target."""
    site.add("acme", "1.2", {MODELS: {"AcmeForCausalLM": target}}, {"acme_model.py": source})
    with pytest.raises(PluginError) as caught:
        load(plan_for(site, model="AcmeForCausalLM"), "engine")
    return str(caught.value)


def test_loads_the_class(site: FakeSite) -> None:
    """The object that the entry point names is returned by name, qualified name, and in the list of its kind."""
    site.add("acme", "1.2", {MODELS: {"AcmeForCausalLM": "acme_model:Outer.Inner"}}, {"acme_model.py": MODEL})
    loaded = load(plan_for(site, model="AcmeForCausalLM"), "engine")
    cls = loaded.get("model", "AcmeForCausalLM")
    assert cls is sys.modules["acme_model"].Model
    assert loaded.get("model", "acme:AcmeForCausalLM") is cls
    assert [(p.name, c) for p, c in loaded.all("model")] == [("AcmeForCausalLM", cls)]
    assert loaded.states() == [("model", "acme:AcmeForCausalLM", "loaded", "")]


def test_other_roles_import_nothing(site: FakeSite) -> None:
    """A process whose role does not need a plugin does not import it, and says so when asked for it."""
    site.add("acme", "1.2", {MODELS: {"AcmeForCausalLM": "acme_model:Model"}}, {"acme_model.py": MODEL})
    loaded = load(plan_for(site, model="AcmeForCausalLM"), "api")
    assert "acme_model" not in sys.modules
    assert loaded.all("model") == []
    with pytest.raises(PluginError, match="not in the plan of the api process, which holds: none"):
        loaded.get("model", "AcmeForCausalLM")


def test_unselected_plugins_are_never_imported(site: FakeSite) -> None:
    """A broken plugin that nobody asked for breaks nothing."""
    site.add("acme", "1.2", {MODELS: {"AcmeForCausalLM": "acme_model:Model"}}, {"acme_model.py": MODEL})
    site.add("bad", "1.0", {MODELS: {"BadForCausalLM": "bad_model:Bad"}}, {"bad_model.py": "raise SystemExit(1)"})
    load(plan_for(site, model="AcmeForCausalLM"), "engine")
    assert "bad_model" not in sys.modules


def test_import_error_names_plugin_and_cause(site: FakeSite) -> None:
    """An exception at import, SystemExit included, becomes one line with plugin, package, cause and fix."""
    assert failure(site, "acme_model:Model", "raise RuntimeError('no licence')") == (
        "model 'AcmeForCausalLM' of acme 1.2: importing acme_model raised RuntimeError: no licence; "
        "upgrade acme or report this to its author"
    )


def test_system_exit_at_import_is_contained(site: FakeSite) -> None:
    """A module that calls sys.exit does not end the process."""
    assert "importing acme_model raised SystemExit: 3" in failure(site, "acme_model:Model", "raise SystemExit(3)")


def test_missing_dependency_names_it(site: FakeSite) -> None:
    """A plugin that misses a package says which to install."""
    assert failure(site, "acme_model:Model", "import no_such_kernels.fast").endswith(
        "No module named 'no_such_kernels'; install the package that provides 'no_such_kernels', which acme needs"
    )


def test_dependency_of_another_version_names_both(site: FakeSite) -> None:
    """A plugin that wants a module which an installed package does not have is told to fit the versions."""
    assert failure(site, "acme_model:Model", "import dovetail.no_such_part").endswith(
        "install versions of acme and dovetail-llm that fit each other"
    )


def test_missing_module_names_the_package(site: FakeSite) -> None:
    """An entry point to a module that the package lacks asks for a reinstall."""
    assert failure(site, "acme_gone:Model").endswith(
        "No module named 'acme_gone'; reinstall acme: its entry point names a module that it does not contain"
    )


def test_missing_attribute(site: FakeSite) -> None:
    """An entry point to an attribute that does not exist names both."""
    assert failure(site, "acme_model:Absent") == (
        "model 'AcmeForCausalLM' of acme 1.2: acme_model has no attribute 'Absent'; "
        "correct the entry point and reinstall the package"
    )


@pytest.mark.parametrize("target", ["acme_model:Stranger", "acme_model:MODEL"])
def test_wrong_base_class(site: FakeSite, target: str) -> None:
    """An object that is no subclass of the contract is refused with the contract's name."""
    assert failure(site, target, MODEL + "\nMODEL = 'text'\n") == (
        f"model 'AcmeForCausalLM' of acme 1.2: {target} is not a subclass of dovetail.contracts.model.ModelPlugin; "
        "subclass it, or correct the entry point"
    )


def test_missing_methods_are_named(site: FakeSite) -> None:
    """A class that leaves abstract methods out is refused at start, not at the first request."""
    assert failure(site, "acme_model:Half") == (
        "model 'AcmeForCausalLM' of acme 1.2: Half does not implement config_from_hf, weight_map; implement them"
    )


def test_version_must_be_the_planned_one(site: FakeSite) -> None:
    """A child that finds another version than was planned refuses to go on."""
    info = site.add("acme", "1.2", {MODELS: {"AcmeForCausalLM": "acme_model:Model"}}, {"acme_model.py": MODEL})
    plan = plan_for(site, model="AcmeForCausalLM")
    info.joinpath("METADATA").write_text("Metadata-Version: 2.4\nName: acme\nVersion: 1.3\n")
    with pytest.raises(PluginError, match=r"of acme 1\.2: version 1\.3 is installed now; restart the server"):
        load(plan, "engine")
    info.joinpath("METADATA").unlink()
    info.joinpath("entry_points.txt").unlink()
    info.rmdir()
    with pytest.raises(PluginError, match="its distribution is not installed in this process's environment"):
        load(plan, "engine")


def test_unknown_role() -> None:
    """A role that does not exist is refused with the possible ones."""
    with pytest.raises(PluginError, match="role 'server': unknown; possible: api, engine, worker, compiler"):
        load(PluginPlan(), "server")


def test_auto_takes_the_next_candidate_with_a_warning(site: FakeSite, caplog: pytest.LogCaptureFixture) -> None:
    """A candidate that fails is passed over with one warning and reported as failed; the next one serves."""
    site.add(
        "acme",
        "1.2",
        {ATTENTION: {"a-first": "acme_broken:Backend", "b-second": "acme_backend:Backend"}},
        {"acme_broken.py": "raise OSError('no driver')", "acme_backend.py": BACKEND},
        manifest={"attention_backend": {"a-first": ANY_DEVICE, "b-second": ANY_DEVICE}},
    )
    loaded = load(plan_for(site, attention_backend="auto"), "engine")
    with caplog.at_level(logging.WARNING, "dovetail.plugins"):
        assert [planned.name for planned, _ in loaded.all("attention_backend")] == ["b-second"]
        assert [planned.name for planned, _ in loaded.all("attention_backend")] == ["b-second"]
    (warning,) = caplog.records
    assert "auto passes over a candidate: attention_backend 'a-first' of acme 1.2" in warning.getMessage()
    assert [state[:3] for state in loaded.states()] == [
        ("attention_backend", "acme:b-second", "loaded"),
        ("attention_backend", "acme:a-first", "failed"),
    ]


def test_auto_imports_only_what_is_reached(site: FakeSite) -> None:
    """The second candidate is not imported while the first one serves."""
    site.add(
        "acme",
        "1.2",
        {ATTENTION: {"a-first": "acme_backend:Backend", "b-second": "acme_other:Backend"}},
        {"acme_backend.py": BACKEND, "acme_other.py": BACKEND},
        manifest={"attention_backend": {"a-first": ANY_DEVICE, "b-second": ANY_DEVICE}},
    )
    planned, _ = next(load(plan_for(site, attention_backend="auto"), "engine").candidates("attention_backend"))
    assert planned.name == "a-first"
    assert "acme_other" not in sys.modules


def test_auto_with_every_candidate_broken(site: FakeSite) -> None:
    """`auto` whose candidates all fail is an error that gives each one's reason."""
    site.add(
        "acme",
        "1.2",
        {ATTENTION: {"only": "acme_broken:Backend"}},
        {"acme_broken.py": "raise OSError('no driver')"},
        manifest={"attention_backend": {"only": ANY_DEVICE}},
    )
    loaded = load(plan_for(site, attention_backend="auto"), "engine")
    with pytest.raises(PluginError, match=r"'auto': every candidate failed: .*only.*OSError: no driver"):
        loaded.all("attention_backend")


def test_two_plugins_of_one_name_are_kept_apart(site: FakeSite) -> None:
    """Hook plugins of two packages with one name load side by side under their qualified names."""
    site.add("acme", entry_points={"dovetail.hooks.v1": {"extra": "acme_hooks:A"}}, files={"acme_hooks.py": "A = 1"})
    site.add("zeta", entry_points={"dovetail.hooks.v1": {"extra": "zeta_hooks:A"}}, files={"zeta_hooks.py": "A = 2"})
    plan = make_plan(Registry.scan(path=[str(site.root)]), hooks=["acme:extra", "zeta:extra"])
    loaded = load(plan, "api")
    assert (loaded.get("hooks", "acme:extra"), loaded.get("hooks", "zeta:extra")) == (1, 2)


CHILD = """
import importlib.metadata, json, sys

def forbidden(*args, **kwargs):
    raise SystemExit("a child process must discover nothing")

from dovetail.plugins import PluginPlan, load
importlib.metadata.distributions = importlib.metadata.entry_points = forbidden
plan = PluginPlan.decode(sys.stdin.buffer.read())
loaded = load(plan, sys.argv[1])
print(json.dumps({
    "loaded": [[planned.name, cls.__name__] for kind in ("model", "hooks") for planned, cls in loaded.all(kind)],
    "modules": sorted(name for name in sys.modules if name.startswith("acme_")),
}))
"""


@pytest.mark.parametrize("role", ["api", "engine", "worker", "compiler"])
def test_every_role_loads_its_part_of_one_plan(site: FakeSite, role: str) -> None:
    """A spawned process of each role loads exactly what the plan says, without looking for anything."""
    site.add(
        "acme",
        "1.2",
        {MODELS: {"AcmeForCausalLM": "acme_model:Model"}, "dovetail.hooks.v1": {"acme": "acme_hooks:Hooks"}},
        {"acme_model.py": MODEL, "acme_hooks.py": "class Hooks: ..."},
        manifest={"hooks": {"acme": {"roles": ["api", "compiler"]}}},
    )
    plan = make_plan(Registry.scan(path=[str(site.root)]), model="AcmeForCausalLM", hooks=["acme"])
    command = [sys.executable, "-c", CHILD, role]
    env = {**os.environ, "PYTHONPATH": str(site.root)}
    done = subprocess.run(command, input=plan.encode(), capture_output=True, check=False, env=env)
    assert done.returncode == 0, done.stderr.decode()
    in_engine = role in ("engine", "worker")
    assert json.loads(done.stdout) == {
        "loaded": [["AcmeForCausalLM", "Model"]] if in_engine else [["acme", "Hooks"]],
        "modules": ["acme_model"] if in_engine else ["acme_hooks"],
    }


def test_code_of_the_server_is_no_plugins() -> None:
    """A package's other modules are its plugin's; of ours only the module that a plugin names."""
    plan = make_plan(Registry.scan(), api=["openai"], tool_parser="hermes")

    def found(*modules: str) -> str:
        frames: list[Any] = [SimpleNamespace(f_globals={"__name__": module}) for module in modules]
        nearest = nearest_plugin(frames, plan)
        return "" if nearest is None else nearest[0].name

    assert found("json", "dovetail_server.http.asgi", "dovetail.engine.core") == ""
    assert found("dovetail_server.http.asgi", "dovetail_server.apis.routes") == "openai"
    assert found("json", "dovetail_parsers.families.headed_calls", "dovetail_server.apis.routes") == "hermes"
