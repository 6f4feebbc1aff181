"""The metadata scan: what it sees, what it says about damage, and that it imports nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dovetail.plugins.clues import score_of
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.records import PluginState
from dovetail.plugins.registry import Registry
from dovetail.plugins.scan import parse_facts, parse_manifest
from dovetail_testing.site import FakeSite

REASONING = "dovetail.reasoning_parsers.v1"


def scanned(site: FakeSite, **kwargs: object) -> Registry:
    return Registry.scan(path=[str(site.root)], **kwargs)  # type: ignore[arg-type]


def test_entry_point_becomes_a_record(site: FakeSite) -> None:
    """An entry point is found with its distribution, version, target and API."""
    site.add("Acme-Parser", "2.1", {REASONING: {"acme-r2": "acme.parser:AcmeR2"}})
    (record,) = scanned(site).records
    assert record.as_dict() == {
        "kind": "reasoning_parser",
        "name": "acme-r2",
        "state": "found",
        "reason": "",
        "distribution": "Acme-Parser",
        "version": "2.1",
        "api": 1,
        "target": "acme.parser:AcmeR2",
        "aliases": [],
        "devices": [],
        "packages": [],
        "location": str(site.root),
    }


def test_scan_imports_nothing(site: FakeSite) -> None:
    """A plugin whose module raises at import, and the package of a manifest, are listed without being imported."""
    site.add(
        "acme",
        entry_points={REASONING: {"acme": "acme_broken:Acme"}},
        files={"acme_broken.py": "raise SystemExit('imported')"},
        manifest={"reasoning_parser": {"acme": {"aliases": ["acme-r2"]}}},
    )
    registry = scanned(site)
    assert registry.records[0].facts.aliases == ("acme-r2",)
    assert not {"acme_broken", "acme_facts"} & set(sys.modules)


def test_other_distributions_are_ignored(site: FakeSite) -> None:
    """A distribution with entry points of other programs, comments and extras in them, gives no record."""
    site.add("tool", entry_points={"console_scripts": {"tool": "tool:main"}})
    info = site.add("acme")
    info.joinpath("entry_points.txt").write_text(
        "# comment\n[pytest11]\nx = y\n\n[ dovetail.hooks.v1 ]\n; comment\nacme = acme.hooks:plugin [extra]\nbroken\n"
    )
    assert [(r.kind, r.name, r.target) for r in scanned(site).records] == [("hooks", "acme", "acme.hooks:plugin")]


@pytest.mark.parametrize(
    ("group", "kind", "reason"),
    [
        (
            "dovetail.tool_parsers.v2",
            "tool_parser",
            "made for API 2 of tool_parser; this dovetail speaks 1; upgrade dovetail-llm",
        ),
        ("dovetail.models.v0", "model", "made for API 0 of model; this dovetail speaks 1; upgrade acme"),
        ("dovetail.hooks", "hooks", "group 'dovetail.hooks' has no API version; use 'dovetail.hooks.v1'"),
        (
            "dovetail.samplers.v1",
            "samplers",
            "unknown entry-point group 'dovetail.samplers.v1'; groups: "
            + ", ".join(kind.entry_point_group for kind in KINDS.values()),
        ),
    ],
)
def test_groups_of_another_api_are_listed_with_the_reason(site: FakeSite, group: str, kind: str, reason: str) -> None:
    """A plugin of another API version or of an unknown kind is listed as incompatible, with the reason and the fix."""
    site.add("acme", entry_points={group: {"acme": "acme:Acme"}})
    (record,) = scanned(site).records
    assert (record.kind, record.state, record.reason) == (kind, PluginState.INCOMPATIBLE, reason)


def test_malformed_target_is_incompatible(site: FakeSite) -> None:
    """An entry point without an attribute is listed as incompatible."""
    site.add("acme", entry_points={REASONING: {"acme": "acme.parser"}})
    (record,) = scanned(site).records
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason == "entry point 'acme.parser' is not of the form 'module:attr'"


def test_shadowed_install_is_reported(site: FakeSite) -> None:
    """Of two installs of one distribution the first on the path is used and the other is listed as shadowed."""
    later = FakeSite(site.root.parent / "later")
    site.add("acme", "2.0", {REASONING: {"acme": "acme:Two"}})
    later.add("Acme", "1.0", {REASONING: {"acme": "acme:One", "acme-old": "acme:Old"}})
    registry = Registry.scan(path=[str(site.root), str(later.root)])
    assert [(r.name, r.version, r.state) for r in registry.records] == [
        ("acme", "2.0", PluginState.FOUND),
        ("acme", "1.0", PluginState.SHADOWED),
        ("acme-old", "1.0", PluginState.SHADOWED),
    ]
    assert registry.records[1].reason == f"hidden by Acme 2.0 at {site.root}; uninstall one of the two"
    assert registry.resolve("reasoning_parser", "acme").version == "2.0"


def test_install_without_plugins_shadows_too(site: FakeSite) -> None:
    """An earlier install that registers nothing hides a later one that does, as it does for Python."""
    later = FakeSite(site.root.parent / "later")
    site.add("acme", "2.0")
    later.add("acme", "1.0", {REASONING: {"acme": "acme:One"}})
    (record,) = Registry.scan(path=[str(site.root), str(later.root)]).records
    assert record.state is PluginState.SHADOWED


def test_folder_twice_on_the_path_is_no_shadow(site: FakeSite) -> None:
    """A folder that stands twice on the path is one install."""
    site.add("acme", entry_points={REASONING: {"acme": "acme:Acme"}})
    registry = Registry.scan(path=[str(site.root), str(site.root)])
    assert [r.state for r in registry.records] == [PluginState.FOUND]


def test_damaged_metadata_breaks_nothing(site: FakeSite) -> None:
    """An undecodable entry_points.txt and a missing METADATA leave the other plugins listed."""
    site.add("broken").joinpath("entry_points.txt").write_bytes(b"[dovetail.hooks.v1]\n\xff = x\n")
    site.add("nameless", entry_points={"dovetail.hooks.v1": {"n": "n:n"}}).joinpath("METADATA").unlink()
    site.add("acme", entry_points={REASONING: {"acme": "acme:Acme"}})
    assert {(r.distribution, r.name) for r in scanned(site).records} == {("(unnamed)", "n"), ("acme", "acme")}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ('{"manifest": 2, "plugins": {}}', 'expected {"manifest": 1, "plugins": …}'),
        ('{"manifest": 1, "plugins": {"hooks": {"a": {"alias": []}}}}', "unknown fact 'alias'; possible: aliases,"),
        ('{"manifest": 1, "plugins": {"hooks": {"a": {"aliases": "b"}}}}', "aliases: expected a list of strings"),
        (
            '{"manifest": 1, "plugins": {"hooks": {"a": {"roles": ["server"]}}}}',
            "unknown role 'server'; possible: api,",
        ),
        ('{"manifest": 1, "plugins": {"hooks": []}}', "plugins.hooks: expected an object"),
    ],
)
def test_wrong_manifest_is_a_problem_not_a_crash(site: FakeSite, text: str, problem: str) -> None:
    """A manifest that cannot be used is reported with its distribution, and the plugin stays listed without facts."""
    site.add("acme", "3.0", {"dovetail.hooks.v1": {"a": "acme:a"}}, manifest={})
    (site.root / "acme_facts/dovetail-plugins.json").write_text(text)
    registry = scanned(site)
    assert registry.records[0].facts.aliases == ()
    assert registry.problems[0].startswith("acme 3.0: manifest of 'acme_facts' ignored: ")
    assert problem in registry.problems[0]


def test_manifest_that_describes_nothing_is_a_problem(site: FakeSite) -> None:
    """Facts of a plugin or kind that the package does not register are reported."""
    site.add(
        "acme", entry_points={"dovetail.hooks.v1": {"a_b": "a:a"}}, manifest={"hooks": {"a-b": {}}, "hook": {"c": {}}}
    )
    assert scanned(site).problems == ["acme 1.0: manifest describes hook 'c', which has no entry point"]


def test_manifest_names_a_top_level_package(site: FakeSite) -> None:
    """A manifest entry point with a dotted or missing package is a problem: finding it would import code."""
    site.add("acme", entry_points={"dovetail.manifest": {"acme": "acme.data"}, "dovetail.hooks.v1": {"a": "a:a"}})
    site.add("other", entry_points={"dovetail.manifest": {"other": "no_such_package"}})
    assert sorted(scanned(site).problems) == [
        "acme 1.0: manifest of 'acme.data' ignored: a manifest entry point names a top-level package",
        "other 1.0: manifest of 'no_such_package' ignored: package 'no_such_package' is not installed",
    ]


def test_manifest_facts_are_kept() -> None:
    """Every fact of the documented form reaches the record."""
    found = parse_manifest(
        {
            "manifest": 1,
            "plugins": {
                "attention_backend": {
                    "fast": {
                        "aliases": ["quick"],
                        "devices": ["cuda"],
                        "packages": ["fast-kernels"],
                        "roles": ["engine"],
                        "matches": {"device": ["cuda"]},
                    }
                }
            },
        }
    )
    facts = found["attention_backend", "fast"]
    assert facts == (("quick",), ("cuda",), ("fast-kernels",), ("engine",), {"device": ("cuda",)}, (), "", (), "")
    row = {"acme4": {"reads": ["acme4", "none"]}}
    found = parse_manifest({"manifest": 1, "plugins": {"quantization": row}})
    assert found["quantization", "acme4"].reads == ("acme4", "none")
    told = {"AcmeForCausalLM": {"config": "acme.facts:Acme"}}
    found = parse_manifest({"manifest": 1, "plugins": {"model": told}})
    assert found["model", "AcmeForCausalLM"].config == "acme.facts:Acme"
    with pytest.raises(ValueError, match="unknown fact 'reads'"):
        parse_manifest({"manifest": 1, "plugins": {"attention_backend": row}})


def test_clues_of_a_parser_are_kept() -> None:
    """What a clue says of a template decides whether it fits; the first that fits gives the score."""
    behind = {"text": "<prompt>", "all": ["<t>"], "none": ["</t>"]}
    clues = [
        {"all": ["a", "b"], "any": ["c", "d"], "none": ["e"], "score": 0.9},
        {"regex": "x+y", "score": 1},
        {"behind": behind, "score": 0.5},
    ]
    row = {"acme": {"clues": clues, "opens": "<t>"}}
    facts = parse_manifest({"manifest": 1, "plugins": {"tool_parser": row}})["tool_parser", "acme"]
    assert facts.opens == "<t>"
    templates = {
        "abc": 0.9, "abd": 0.9, "ab": 0.0, "abce": 0.0, "xxy": 1.0, "<t></t>": 0.0, "</t> <prompt> <t>": 0.5,
        "<prompt> <t> <prompt>": 0.0, "<t>": 0.5, "": 0.0,
    }  # fmt: skip
    assert {source: score_of(facts.clues, source) for source in templates} == templates


@pytest.mark.parametrize(
    ("clues", "problem"),
    [
        ({}, "clues: expected a list of objects"),
        (["<t>"], r"clues\[0\]: expected an object of"),
        ([{"all": ["a"], "most": 1, "score": 1}], r"clues\[0\]: expected an object of"),
        ([{"all": ["a"]}], r"clues\[0\].score: expected a number above 0 and up to 1, got None"),
        ([{"all": ["a"], "score": True}], r"clues\[0\].score: .* got True"),
        ([{"all": ["a"], "score": 1.5}], r"clues\[0\].score: .* got 1.5"),
        ([{"all": ["a"], "score": 1}, {"none": ["a"], "score": 1}], r"clues\[1\]: fits every template"),
        ([{"all": "a", "score": 1}], r"clues\[0\].all: expected a list of strings"),
        ([{"any": ["a", ""], "score": 1}], r"clues\[0\].any: expected a list of strings, none of them empty"),
        ([{"regex": "(", "score": 1}], r"clues\[0\].regex: '\('"),
        ([{"regex": 3, "score": 1}], r"clues\[0\].regex: expected a pattern, got 3"),
        ([{"behind": {"all": ["a"]}, "score": 1}], r"clues\[0\].behind.text: expected a text, got None"),
        ([{"behind": "a", "score": 1}], r"clues\[0\].behind: expected an object"),
    ],
)
def test_a_wrong_clue_is_named(clues: Any, problem: str) -> None:
    """The message says which clue is wrong, and what is possible."""
    with pytest.raises(ValueError, match=problem):
        parse_facts("tool_parser", {"clues": clues})


def test_only_parsers_have_clues() -> None:
    """A fact that nothing would ask of a kind is refused."""
    with pytest.raises(
        ValueError, match="unknown fact 'clues'; possible: aliases, devices, packages, roles, config, matches"
    ):
        parse_facts("model", {"clues": []})
    with pytest.raises(ValueError, match="opens: expected a string, got 3"):
        parse_facts("tool_parser", {"opens": 3})


def test_deny_list_blocks_by_distribution_and_by_name(site: FakeSite) -> None:
    """A denied distribution or `distribution:name` is listed as blocked, whatever its spelling."""
    site.add("acme", entry_points={REASONING: {"a_1": "acme:A", "b": "acme:B"}})
    site.add("Other.Pkg", entry_points={REASONING: {"c": "other:C"}})
    registry = scanned(site, deny=["ACME:a-1", "other_pkg"])
    assert {r.name: r.state.value for r in registry.records} == {"a_1": "blocked", "b": "found", "c": "blocked"}
