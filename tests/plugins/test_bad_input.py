"""Every way in which a plugin that was asked for can be unusable: exit code 2, one line, package, reason and fix."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError, said
from dovetail.demo import MODEL_DIR
from dovetail.runtime.start import load
from dovetail_server.cli import serve
from dovetail_testing.engine import make_core
from dovetail_testing.site import FakeSite

pytestmark = pytest.mark.usefixtures("light_servers")
PARSERS = "dovetail.reasoning_parsers.v1"
BACKENDS = "dovetail.attention_backends.v1"
HOOKS = "dovetail.hooks.v1"
PARSER = """
from dataclasses import dataclass
from dovetail.contracts import FormatSpec, Markers, ReasoningParser
{before}

class Parser(ReasoningParser):
{body}
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
"""
DUMMY = ("--load-format", "dummy", "--tokenizer-path", str(MODEL_DIR))
HEAD = (
    "import sys, time\nfrom dovetail.contracts import HealthCheck, RouteSet, hookimpl\nmodule = sys.modules[__name__]\n"
)
BACKEND = """
from dovetail.contracts.attention import AttentionBackend, AttentionCaps

class Backend(AttentionBackend):
    caps = AttentionCaps(devices=frozenset({devices}), dtypes=frozenset({{"float32", "bfloat16"}}))
    def __init__(self, config, kv_pool, device):
        raise ValueError("no kernels for you")
    def forward_extend(self, q, k, v, layer, batch, out): ...
    def forward_decode(self, q, k, v, layer, batch, out): ...
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> object:
    """Serve with these flags in this process; the one line of the error."""

    def run(*flags: str) -> str:
        assert serve.main([*flags, "--port", "0"]) == 2
        lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("[20")]
        assert len(lines) == 1, lines
        return lines[0].removeprefix("dovetail serve: error: ")

    return run


def parser(site: FakeSite, before: str = "", body: str = "", name: str = "acme", group: str = PARSERS) -> None:
    source = PARSER.format(before=before, body=body)
    site.add(name, "1.2", {group: {"acme-r2": f"{name}_parser:Parser"}}, {f"{name}_parser.py": source})


def hooks(site: FakeSite, source: str, name: str = "acme", **facts: object) -> None:
    manifest = {"hooks": {"acme": facts}} if facts else None
    site.add(name, "1.2", {HOOKS: {"acme": f"{name}_hooks:module"}}, {f"{name}_hooks.py": HEAD + source}, manifest)


def in_a_process(site: FakeSite, *flags: str) -> str:
    """Serve in a process of its own; its last line."""
    environment = {**os.environ, "PYTHONPATH": str(site.root)}
    command = [sys.executable, "-m", "dovetail_server", *flags, "--port", "0", "--num-threads", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1].removeprefix("dovetail serve: error: ")


def in_the_engine(**changes: object) -> str:
    """Make an engine as its process would; the error that the parent is told."""
    with pytest.raises(PluginError) as caught:
        make_core(MODEL_DIR, **changes)
    return str(caught.value)


def test_unknown_name(site: FakeSite, failure) -> None:
    """A name that is not installed shows what is, the nearest, and where to look."""
    parser(site)
    message = failure("--reasoning-parser", "acme-r3")
    assert message.startswith("--reasoning-parser 'acme-r3': not installed; installed: acme-r2, ")
    assert "; did you mean acme-r2?; to add one, pip install a package that provides it" in message


def test_two_packages_with_one_name(site: FakeSite, failure) -> None:
    """Neither of two packages wins; both qualified names are shown."""
    parser(site)
    parser(site, name="zeta")
    assert failure("--reasoning-parser", "acme-r2") == (
        "--reasoning-parser 'acme-r2': provided by 2 packages; choose one: acme:acme-r2 or zeta:acme-r2"
    )


def test_no_such_attribute(site: FakeSite, failure) -> None:
    """An entry point to an attribute that the module lacks."""
    site.add("acme", "1.2", {PARSERS: {"acme-r2": "acme_parser:Gone"}}, {"acme_parser.py": ""})
    assert failure("--reasoning-parser", "acme-r2") == (
        "reasoning_parser 'acme-r2' of acme 1.2: acme_parser has no attribute 'Gone'; "
        "correct the entry point and reinstall the package"
    )


def test_import_error(site: FakeSite, failure) -> None:
    """A module that needs a package which is not there."""
    parser(site, before="import acme_kernels.fast")
    assert failure("--reasoning-parser", "acme-r2") == (
        "reasoning_parser 'acme-r2' of acme 1.2: importing acme_parser raised ModuleNotFoundError: "
        "No module named 'acme_kernels'; install the package that provides 'acme_kernels', which acme needs"
    )


def test_exception_at_construction(site: FakeSite, failure) -> None:
    """A parser that cannot be made."""
    parser(site, body="    def __init__(self):\n        raise OSError('no licence file')\n")
    assert failure("--reasoning-parser", "acme-r2") == (
        "reasoning_parser 'acme-r2' of acme 1.2: Parser.__init__ raised OSError: no licence file; "
        "upgrade acme or report this to its author"
    )


def test_exception_at_construction_in_the_engine(site: FakeSite) -> None:
    """A backend that cannot be made."""
    source = BACKEND.format(devices='{"cpu", "cuda"}')
    site.add("acme", "1.2", {BACKENDS: {"acme-fast": "acme_backend:Backend"}}, {"acme_backend.py": source})
    assert in_the_engine(attention_backend="acme-fast") == (
        "--attention-backend 'acme-fast' cannot serve this model: attention_backend 'acme-fast' of acme 1.2: "
        "it cannot be made: ValueError: no kernels for you; use --attention-backend auto for one that can"
    )


def test_import_error_in_the_engine(site: FakeSite) -> None:
    """A backend that cannot be imported."""
    site.add("acme", "1.2", {BACKENDS: {"acme-fast": "acme_backend:Backend"}}, {"acme_backend.py": "1 / 0"})
    assert in_the_engine(attention_backend="acme-fast") == (
        "attention_backend 'acme-fast' of acme 1.2: importing acme_backend raised ZeroDivisionError: division by zero; "
        "upgrade acme or report this to its author"
    )


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            "ctx.operation('super_norm', H=8)",
            r"operation 'super_norm': unknown; possible: rms_norm, .* \(while {who} is built",
        ),
        (
            "ctx.operation('rms_norm', F=8)",
            r"operation 'rms_norm': widths \['F'\] were given, .* \(while {who} is built",
        ),
        ("object()", r"{who}: build\(\) returned object; return a torch\.nn\.Module \("),
    ],
)
def test_a_model_that_asks_for_what_is_not_there(site: FakeSite, body: str, wanted: str) -> None:
    """An operation that no table has, widths that it does not have, or no module: the line names the package."""
    source = f"""
from dovetail_models.qwen3 import Qwen3
class Model(Qwen3):
    @classmethod
    def build(cls, config, ctx): return {body}
"""
    site.add("acme", "1.2", {"dovetail.models.v1": {"acme-any": "acme_model:Model"}}, {"acme_model.py": source})
    who = r"model 'acme-any' of acme 1\.2"
    with pytest.raises(PluginError) as caught:
        make_core(MODEL_DIR, model_impl="acme-any")
    assert re.match(wanted.format(who=who), said(caught.value))


def test_a_set_whose_devices_are_one_word(site: FakeSite) -> None:
    """Each of its letters would be a kind of device: the line says what to write."""
    source = """
from dovetail.contracts import Claim, KernelSet
class Worded(KernelSet):
    devices = "cpu"
    def serves(self, ask): return "no"
    def make(self, ask): return None
"""
    site.add("acme", "1.2", {"dovetail.kernels.v1": {"worded": "worded:Worded"}}, {"worded.py": source})
    assert in_the_engine(kernels=["worded", "auto"]).startswith(
        "kernels 'worded' of acme 1.2: devices = 'cpu' is no set of names; give frozenset({'cpu'})"
    )


def test_a_kernel_that_does_not_do_what_its_set_claims(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called before weights are read; the line names the operation, its widths and what comes of the call."""
    source = """
from dovetail.contracts import Claim, KernelSet
class Liar(KernelSet):
    devices = frozenset({"cpu"})
    def serves(self, ask): return Claim(ask.rows) if ask.op == "rms_norm" else "no"
    def make(self, ask): return lambda x, weight, eps: x[:, 1:]
"""
    site.add("acme", "1.2", {"dovetail.kernels.v1": {"liar": "liar:Liar"}}, {"liar.py": source})
    monkeypatch.setattr(load, "load_checkpoint", lambda *given: pytest.fail("weights are read"))
    for given in (["liar"], ["liar", "auto"]):
        line = in_the_engine(kernels=given)
        assert re.match(r"kernels 'liar' of acme 1\.2: it claims rms_norm H=\d+ in \w+, and a call of 3 rows ", line)
        assert line.endswith("; leave it out of --kernels, or report this to its author")


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (
            "dovetail.reasoning_parsers.v9",
            "made for API 9 of reasoning_parser; this dovetail speaks 1; upgrade dovetail-llm",
        ),
        ("dovetail.reasoning_parsers.v0", "made for API 0 of reasoning_parser; this dovetail speaks 1; upgrade acme"),
        (
            "dovetail.reasoning_parsers",
            "group 'dovetail.reasoning_parsers' has no API version; use 'dovetail.reasoning_parsers.v1'",
        ),
    ],
)
def test_wrong_api_version(site: FakeSite, failure, group: str, reason: str) -> None:
    """A plugin for an API that is not spoken is refused without being imported."""
    parser(site, before="raise SystemExit('imported')", group=group)
    assert failure("--reasoning-parser", "acme-r2") == (
        f"--reasoning-parser 'acme-r2': installed but not usable: acme 1.2 is incompatible: {reason}"
    )


def test_a_manifest_that_lies_about_devices(site: FakeSite) -> None:
    """A backend whose manifest says CPU and whose class does not: the class's word counts, and the start ends."""
    source = BACKEND.format(devices='{"cuda"}')
    groups = {BACKENDS: {"acme-fast": "acme_backend:Backend"}}
    facts = {"attention_backend": {"acme-fast": {"devices": ["cpu"], "matches": {"device": ["cpu"]}}}}
    site.add("acme", "1.2", groups, {"acme_backend.py": source}, manifest=facts)
    assert in_the_engine(attention_backend="acme-fast") == (
        "--attention-backend 'acme-fast' cannot serve this model: attention_backend 'acme-fast' of acme 1.2: "
        "device 'cpu' is not supported; it runs on cuda; use --attention-backend auto for one that can"
    )


def test_a_manifest_that_lies_about_packages(site: FakeSite, failure) -> None:
    """A manifest that needs a package which does not exist rules its plugin out, by name."""
    groups = {PARSERS: {"acme-r2": "acme_parser:Parser"}}
    site.add("acme", "1.2", groups, manifest={"reasoning_parser": {"acme-r2": {"packages": ["acme-kernels"]}}})
    assert failure("--reasoning-parser", "acme-r2") == (
        "--reasoning-parser 'acme-r2': acme-r2 of acme 1.2 cannot be used: it needs acme-kernels; "
        "run: pip install acme-kernels"
    )


def test_colliding_routes(site: FakeSite, failure) -> None:
    """Two plugins of one name that bring one route: the start ends, and parameters' names do not tell them apart."""
    source = "@hookimpl\ndef dovetail_routes(ctx):\n    return RouteSet(routes={{'/stats/{{{0}}}': print}})\n"
    hooks(site, source.format("id"))
    hooks(site, source.format("key"), name="zeta")
    assert failure("--plugin", "acme:acme,zeta:acme") == (
        "route /x/acme/stats/{key}: acme:acme and zeta:acme both bring it; disable one of them"
    )


def test_routes_of_the_wrong_type(site: FakeSite, failure) -> None:
    """A hook that returns something else than it should is named with what it returned."""
    hooks(site, "@hookimpl\ndef dovetail_routes(ctx):\n    return {'/stats': print}\n")
    assert failure("--plugin", "acme") == (
        "hooks 'acme' of acme 1.2: dovetail_routes returned {'/stats': <built-in function print>}; "
        "return a dovetail.contracts.RouteSet or None"
    )
    hooks(site, "@hookimpl\ndef dovetail_stat_loggers(ctx):\n    return 5\n")
    sys.modules.pop("acme_hooks")
    assert failure("--plugin", "acme") == (
        "hooks 'acme' of acme 1.2: dovetail_stat_loggers returned 5, which is no dovetail.contracts.StatLogger; "
        "return an instance"
    )


@pytest.mark.parametrize("path", ["stats", "/../v1/models"])
def test_malformed_routes(site: FakeSite, failure, path: str) -> None:
    """A path that does not begin with a slash, or climbs, is refused."""
    hooks(site, f"@hookimpl\ndef dovetail_routes(ctx):\n    return RouteSet(routes={{{path!r}: print}})\n")
    assert failure("--plugin", "acme") == (
        f"hooks 'acme' of acme 1.2: route {path!r} must begin with '/' and lead to an ASGI application"
    )


def test_a_route_of_the_servers_own() -> None:
    """A route that the server has already is refused with the plugin's name."""
    from dovetail_server.serving.hooks import ApiHooks

    found = ApiHooks()
    found.add_route("/x/acme/stats", print, "acme:acme")
    found.check_free([re.compile("^/v1/models$")])
    with pytest.raises(PluginError) as caught:
        found.check_free([re.compile("^/x/.*$")])
    assert str(caught.value) == "route /x/acme/stats: acme:acme brings it and Dovetail has it; disable the plugin"


OPTIONS = "@dataclass\nclass Options:\n    top_k: int = 4\n    fast: bool = False\n"


def test_options_of_the_wrong_type(site: FakeSite, failure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The flag, variable or line is named with the value, what is possible, and whose option it is."""
    parser(site, before=OPTIONS, body="    Options = Options\n")
    named = ("--reasoning-parser", "acme-r2")
    reason = "'many' should be a valid integer, unable to parse string as an integer"
    owner = "it is an option of reasoning_parser 'acme-r2' of acme 1.2"
    assert failure(*named, "--acme-r2.top-k", "many") == f"--acme-r2.top-k: {reason}; {owner}"
    monkeypatch.setenv("DOVETAIL_PLUGIN__ACME_R2__TOP_K", "many")
    variable = "environment variable DOVETAIL_PLUGIN__ACME_R2__TOP_K"
    assert failure(*named) == f"{variable}: {reason}; {owner}"
    monkeypatch.delenv("DOVETAIL_PLUGIN__ACME_R2__TOP_K")
    file = tmp_path / "config.yaml"
    file.write_text("plugins:\n  acme-r2:\n    top-k: many\n")
    assert failure(*named, "--config", str(file)) == (
        f"'plugins.acme-r2.top-k' in the configuration file: {reason}; {owner}"
    )


def test_unknown_options(site: FakeSite, failure, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that the plugin does not have suggests the nearest; one for a plugin that is not selected says so."""
    parser(site, before=OPTIONS, body="    Options = Options\n")
    named = ("--reasoning-parser", "acme-r2")
    assert failure(*named, "--acme-r2.topk=5") == (
        "--acme-r2.topk: unknown; did you mean 'top_k'?; it is an option of reasoning_parser 'acme-r2' of acme 1.2"
    )
    message = failure(*named, "--acme.top-k=5")
    assert message.startswith("--acme.top-k: plugin 'acme' is not selected; selected: Qwen3ForCausalLM, ")
    assert message.endswith("; name it, for example with --plugin acme")
    monkeypatch.setenv("DOVETAIL_PLUGIN__ACME__FAST", "1")
    assert failure(*named, "--acme.top-k=5") == message  # also where a variable for other runs stands before it
    assert (
        failure(*named, "--acme-r2.top-k=5", "--acme-r2.top_k", "6") == "--acme-r2.top_k is given twice; give it once"
    )


def test_a_plugin_that_hangs_when_imported(site: FakeSite, failure) -> None:
    """The time-out names the plugin and what it was doing."""
    parser(site, before="import time\ntime.sleep(60)")
    assert failure("--reasoning-parser", "acme-r2", "--plugin-timeout", "0.2") == (
        "reasoning_parser 'acme-r2' of acme 1.2: importing acme_parser did not end within 0.2 s; "
        "fix or disable the plugin, or raise --plugin-timeout"
    )


def test_a_plugin_that_hangs_when_started(site: FakeSite, failure) -> None:
    """As above in the HTTP process, also where the plugin swallows every exception."""
    body = (
        "    while True:\n        try:\n            time.sleep(60)\n        except Exception:\n            continue\n"
    )
    hooks(site, "@hookimpl\ndef dovetail_process_start(ctx):\n" + body)
    assert failure("--plugin", "acme", "--plugin-timeout", "1") == (
        "hooks 'acme' of acme 1.2: dovetail_process_start did not end within 1 s; "
        "fix or disable the plugin, or raise --plugin-timeout"
    )


MODEL = """
from dovetail.contracts import ModelPlugin

class Model(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    @classmethod
    def config_from_hf(cls, hf): ...
    @classmethod
    def build(cls, config, ctx): ...
    @classmethod
    def weight_map(cls, config): ...
"""


@pytest.mark.full
def test_a_plugin_that_hangs_when_started_in_the_engine(site: FakeSite, tmp_path: Path) -> None:
    """As above in the engine process: the parent prints it."""
    site.add("light", "1.0", {"dovetail.models.v1": {"AcmeForCausalLM": "light:Model"}}, {"light.py": MODEL})
    (tmp_path / "config.json").write_text('{"architectures": ["AcmeForCausalLM"]}')
    hooks(site, "@hookimpl\ndef dovetail_process_start(ctx):\n    time.sleep(60)\n", roles=["engine"])
    # Built-ins are imported under the same limit, on a busy machine for more than a second.
    assert in_a_process(site, str(tmp_path), *DUMMY, "--plugin", "acme", "--plugin-timeout", "10") == (
        "hooks 'acme' of acme 1.2: dovetail_process_start did not end within 10 s; "
        "fix or disable the plugin, or raise --plugin-timeout"
    )


NO_DISK = "@hookimpl\ndef dovetail_process_start(ctx):\n    raise OSError('no disk')\n"
SAID = "hooks 'acme' of acme 1.2: dovetail_process_start raised OSError: no disk"


def test_a_hook_that_fails_at_start(site: FakeSite, failure) -> None:
    """A hook that raises at start ends the start."""
    hooks(site, NO_DISK)
    assert failure("--plugin", "acme") == SAID


@pytest.mark.full
def test_a_hook_that_fails_at_the_start_of_the_engine(site: FakeSite) -> None:
    """As above in the engine process: the parent prints it."""
    hooks(site, NO_DISK, roles=["engine"])
    assert in_a_process(site, "--plugin", "acme") == SAID


def test_broken_packages_that_nobody_asked_for_break_nothing(site: FakeSite) -> None:
    """With one broken package of each kind installed, the plan is made and the chosen plugins load."""
    from dovetail.plugins import KINDS, Registry, load, make_plan

    for kind in KINDS.values():
        name = f"broken-{kind.name.replace('_', '-')}"
        module = name.replace("-", "_")
        files = {f"{module}.py": "raise SystemExit('imported')"}
        facts = {kind.name: {"Broken": {"devices": 5}}}
        site.add(name, "0.1", {kind.entry_point_group: {"Broken": f"{module}:Broken"}}, files, manifest=facts)
    plan = make_plan(Registry.scan(), model="Qwen3ForCausalLM", reasoning_parser="qwen3", attention_backend="auto")
    assert {name for kind, name, state, _ in load(plan, "api").states()} == {"dovetail-llm:qwen3"}
    assert not [name for name in sys.modules if name.startswith("broken_")]
