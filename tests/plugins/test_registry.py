"""The registry: how a name becomes a plugin, and what is said when it does not."""

from __future__ import annotations

import logging

import pytest

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.errors import PluginError
from dovetail.plugins.records import PluginRecord, PluginState
from dovetail.plugins.registry import Registry
from dovetail_testing.site import FakeSite

REASONING = "dovetail.reasoning_parsers.v1"
MODELS = "dovetail.models.v1"
ADVICE = "to add one, pip install a package that provides it (`dovetail plugin list` shows what is there)"


def scanned(site: FakeSite, **kwargs: object) -> Registry:
    return Registry.scan(path=[str(site.root)], **kwargs)  # type: ignore[arg-type]


def resolve(site: FakeSite, name: str, kind: str = "reasoning_parser") -> PluginRecord:
    return scanned(site).resolve(kind, name)


def failure(site: FakeSite, name: str, kind: str = "reasoning_parser") -> str:
    with pytest.raises(PluginError) as caught:
        resolve(site, name, kind)
    return str(caught.value)


@pytest.fixture
def builtins(site: FakeSite) -> FakeSite:
    """Two reasoning parsers and a model of a made-up `dovetail-llm`."""
    site.add(
        DISTRIBUTION,
        "0.1.0",
        {
            REASONING: {"deepseek-r1": "builtin:R1", "qwen3": "builtin:Qwen3"},
            MODELS: {"Qwen3ForCausalLM": "builtin:Qwen3Model"},
        },
        manifest={"reasoning_parser": {"qwen3": {"aliases": ["qwen-3"]}}},
    )
    return site


@pytest.mark.parametrize(
    "name", ["deepseek-r1", "deepseek_r1", "DeepSeek-R1", " deepseek-r1", "Dovetail_LLM:deepseek_r1"]
)
def test_names_are_normalised(builtins: FakeSite, name: str) -> None:
    """Case, `_` against `-`, and a qualifying distribution do not matter."""
    assert resolve(builtins, name).target == "builtin:R1"


def test_alias_resolves(builtins: FakeSite) -> None:
    """An alias from the manifest, normalised too, names its plugin."""
    assert resolve(builtins, "Qwen_3").name == "qwen3"


def test_model_names_are_exact(builtins: FakeSite) -> None:
    """An architecture is the exact string of config.json; a near miss is an error with a hint."""
    assert resolve(builtins, "Qwen3ForCausalLM", "model").target == "builtin:Qwen3Model"
    message = failure(builtins, "qwen3ForCausalLM", "model")
    assert message == (
        "architecture 'qwen3ForCausalLM': not installed; installed: Qwen3ForCausalLM; "
        f"did you mean Qwen3ForCausalLM?; {ADVICE}"
    )


def test_unknown_name_says_what_is_installed(builtins: FakeSite) -> None:
    """An unknown name names the flag, what was given, what is installed, close matches and what to do."""
    assert failure(builtins, "qwen") == (
        f"--reasoning-parser 'qwen': not installed; installed: deepseek-r1, qwen3; did you mean qwen3?; {ADVICE}"
    )


def test_unknown_name_without_neighbours_gives_no_hint(builtins: FakeSite) -> None:
    """A name far from all others is not answered with a guess."""
    assert failure(builtins, "zebra") == (
        f"--reasoning-parser 'zebra': not installed; installed: deepseek-r1, qwen3; {ADVICE}"
    )


def test_unknown_name_with_nothing_installed(builtins: FakeSite) -> None:
    """Where no plugin of the kind is installed the message says so."""
    assert failure(builtins, "xgrammar", "grammar_backend").startswith(
        "--grammar-backend 'xgrammar': not installed; installed: none; "
    )


def test_builtin_wins_its_name_with_one_warning(builtins: FakeSite, caplog: pytest.LogCaptureFixture) -> None:
    """A built-in keeps its bare name; one warning names the third party and how to reach it."""
    builtins.add("acme", "2.0", {REASONING: {"Qwen3": "acme:Qwen3"}})
    registry = scanned(builtins)
    with caplog.at_level(logging.WARNING, "dovetail.plugins"):
        assert registry.resolve("reasoning_parser", "qwen3").distribution == DISTRIBUTION
        assert registry.resolve("reasoning_parser", "QWEN3").distribution == DISTRIBUTION
    assert [record.getMessage() for record in caplog.records] == [
        "--reasoning-parser 'qwen3' is the built-in of dovetail-llm 0.1.0; "
        "acme 2.0 has the same name and is reached as acme:Qwen3"
    ]
    assert registry.resolve("reasoning_parser", "acme:qwen3").distribution == "acme"
    (theirs,) = [r for r in registry.records if r.distribution == "acme"]
    assert theirs.reason == "dovetail-llm:qwen3 has this name too; use acme:Qwen3"


def test_builtin_alias_is_kept_too(builtins: FakeSite) -> None:
    """Installing a package does not change what a built-in's alias means."""
    builtins.add("acme", "2.0", {REASONING: {"qwen-3": "acme:Qwen3"}})
    assert resolve(builtins, "qwen-3").distribution == DISTRIBUTION


def test_two_third_parties_are_an_error_when_used(builtins: FakeSite) -> None:
    """Two packages with one name are listed; using the bare name shows both qualified names."""
    builtins.add("acme", entry_points={REASONING: {"r2": "acme:R2"}})
    builtins.add("zeta", entry_points={REASONING: {"R2": "zeta:R2"}})
    assert failure(builtins, "r2") == (
        "--reasoning-parser 'r2': provided by 2 packages; choose one: acme:r2 or zeta:R2"
    )
    assert resolve(builtins, "zeta:r2").target == "zeta:R2"
    assert scanned(builtins).names("reasoning_parser") == ["acme:r2", "deepseek-r1", "qwen3", "zeta:R2"]


def test_alias_of_another_package_is_ambiguous(builtins: FakeSite) -> None:
    """Between packages a name does not win over an alias: installing one must not redirect the other's users."""
    builtins.add("acme", entry_points={REASONING: {"r2": "acme:R2"}})
    builtins.add(
        "zeta",
        entry_points={REASONING: {"zeta-r2": "zeta:R2"}},
        manifest={"reasoning_parser": {"zeta-r2": {"aliases": ["r2"]}}},
    )
    assert "choose one: acme:r2 or zeta:zeta-r2" in failure(builtins, "r2")


def test_own_name_beats_own_alias(site: FakeSite) -> None:
    """Within one package a plugin's name wins over the alias of a sibling."""
    site.add(
        "acme",
        entry_points={REASONING: {"r1": "acme:R1", "r2": "acme:R2"}},
        manifest={"reasoning_parser": {"r2": {"aliases": ["r1"]}}},
    )
    assert resolve(site, "r1").target == "acme:R1"


def test_one_package_with_one_name_twice(site: FakeSite) -> None:
    """A package that registers two spellings of one name gets an error that names both targets."""
    site.add("acme", entry_points={REASONING: {"r-2": "acme:A", "r_2": "acme:B"}})
    assert failure(site, "acme:r2x").startswith("--reasoning-parser 'acme:r2x': not installed")
    assert failure(site, "r-2") == (
        "--reasoning-parser 'r-2': acme 1.0 registers it twice, as acme:A and acme:B; "
        "remove one of the entry points and reinstall it"
    )


def test_unusable_plugin_says_why(site: FakeSite) -> None:
    """A name whose only plugin is blocked or incompatible gives package, version, state, reason and fix."""
    site.add("acme", "1.5", {"dovetail.reasoning_parsers.v9": {"r2": "acme:R2"}, REASONING: {"r3": "acme:R3"}})
    assert failure(site, "r2") == (
        "--reasoning-parser 'r2': installed but not usable: acme 1.5 is incompatible: made for API 9 of "
        "reasoning_parser; this dovetail speaks 1; upgrade dovetail-llm"
    )
    with pytest.raises(PluginError, match=r"acme 1\.5 is blocked: on the deny list; take acme off it to use it"):
        scanned(site, deny=["acme"]).resolve("reasoning_parser", "r3")


def test_blocking_a_builtin_frees_its_name(builtins: FakeSite) -> None:
    """A user who denies a built-in can give its bare name to the package that replaces it."""
    builtins.add("acme", entry_points={REASONING: {"qwen3": "acme:Qwen3"}})
    registry = scanned(builtins, deny=["dovetail-llm:qwen3"])
    assert registry.resolve("reasoning_parser", "qwen3").distribution == "acme"


def test_add_registers_like_an_entry_point() -> None:
    """A plugin added by a hook resolves by name and alias and carries its distribution."""
    registry = Registry()
    registry.for_kind("tool_parser", "acme", "1.2").add("t1", "acme.tools:T1", aliases=["t-one"])
    record = registry.resolve("tool_parser", "T_one")
    assert (record.qualified, record.version, record.target, record.api) == ("acme:t1", "1.2", "acme.tools:T1", 1)
    registry.for_kind("tool_parser", "acme", "1.2").add("t1", "acme.tools:T1")
    assert len(registry.records) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sampler", "x", "a:b"), "acme: sampler 'x': unknown kind; possible: model, attention_backend"),
        (("model", "x", "a.b"), "acme: model 'x': target 'a.b' is not of the form 'module:attr'"),
        (("model", "Taken", "a:other"), "acme: model 'Taken': already registered as 'a:one'; give the second one"),
    ],
)
def test_add_refuses_mistakes(arguments: tuple[str, str, str], message: str) -> None:
    """An unknown kind, a target that is no string of the right form, and a second target for a name are errors."""
    registry = Registry()
    registry.add("model", "Taken", "a:one", distribution="acme")
    with pytest.raises(PluginError) as caught:
        registry.add(*arguments, distribution="acme")
    assert str(caught.value).startswith(message)


def test_add_refuses_unknown_facts() -> None:
    """A fact that no manifest may hold is refused by name."""
    with pytest.raises(PluginError, match="acme: model 'x': unknown fact 'alias'; possible: aliases, devices"):
        Registry().for_kind("model", "acme", "1").add("x", "a:b", alias=["y"])


def test_mark_moves_a_record_through_its_states(builtins: FakeSite) -> None:
    """What became of a plugin shows in the listing; a blocked one stays blocked."""
    registry = scanned(builtins, deny=["dovetail-llm:qwen3"])
    registry.mark("reasoning_parser", "dovetail-llm:deepseek-r1", "failed", "no such attribute")
    registry.mark("reasoning_parser", "dovetail-llm:qwen3", "loaded")
    states = {item["name"]: (item["state"], item["reason"]) for item in registry.listing()["data"]}
    assert states["deepseek-r1"] == ("failed", "no such attribute")
    assert states["qwen3"][0] == PluginState.BLOCKED


def test_listing_is_sorted_and_whole(builtins: FakeSite) -> None:
    """The listing has every record, models first, then by name."""
    builtins.add("acme", entry_points={REASONING: {"aaa": "acme:A"}, "dovetail.odd.v1": {"x": "acme:X"}})
    names = [(item["kind"], item["name"]) for item in scanned(builtins).listing()["data"]]
    assert names == [
        ("model", "Qwen3ForCausalLM"),
        ("reasoning_parser", "aaa"),
        ("reasoning_parser", "deepseek-r1"),
        ("reasoning_parser", "qwen3"),
        ("odd", "x"),
    ]
