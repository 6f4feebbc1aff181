"""The plan: what `auto` and names become, on metadata alone, and how it travels."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dovetail.base.distribution import DISTRIBUTION
from dovetail.contracts.errors import PluginError
from dovetail.plugins import PluginPlan, Registry, make_plan
from dovetail.plugins.plan import candidates
from dovetail_testing.site import FakeSite

ATTENTION = "dovetail.attention_backends.v1"


@pytest.fixture
def registry(site: FakeSite) -> Registry:
    """A built-in reference backend, two for CUDA, one of a third party, and one plugin of each other kind."""
    site.add(
        DISTRIBUTION,
        "0.1.0",
        {
            ATTENTION: {"torch_native": "b:Native", "triton": "b:Triton", "fa3": "b:Fa3"},
            "dovetail.models.v1": {"Qwen3ForCausalLM": "b:Qwen3"},
            "dovetail.reasoning_parsers.v1": {"qwen3": "b:Parser"},
            "dovetail.tool_parsers.v1": {"hermes": "b:Hermes"},
            "dovetail.grammar_backends.v1": {"outlines": "b:Outlines"},
        },
        manifest={
            "attention_backend": {
                "torch_native": {"devices": ["cpu", "cuda"], "matches": {"device": ["*"]}},
                "triton": {"devices": ["cuda"], "matches": {"device": ["cuda"]}},
                "fa3": {
                    "devices": ["cuda"],
                    "packages": ["no-such-flash"],
                    "matches": {"device": ["cuda"], "architecture": ["*"]},
                },
            }
        },
    )
    site.add(
        "acme",
        "2.0",
        {
            ATTENTION: {"acme-fast": "acme:Fast", "acme-quiet": "acme:Quiet"},
            "dovetail.hooks.v1": {"acme": "acme:hooks"},
        },
        manifest={
            "attention_backend": {"acme-fast": {"matches": {"device": ["cuda"]}}},
            "hooks": {"acme": {"roles": ["api", "engine"]}},
        },
    )
    return Registry.scan(path=[str(site.root)])


def names(plan: PluginPlan, kind: str = "attention_backend") -> list[str]:
    return [planned.name for planned in plan.of_kind(kind)]


def test_plan_carries_everything_a_child_needs(registry: Registry) -> None:
    """A planned plugin has target, distribution, version, API, roles and options."""
    plan = make_plan(registry, tool_parser="Hermes", options={"hermes": {"limit": 3}})
    (planned,) = plan.plugins
    assert (planned.kind, planned.name, planned.target) == ("tool_parser", "hermes", "b:Hermes")
    assert (planned.distribution, planned.version, planned.api) == (DISTRIBUTION, "0.1.0", 1)
    assert (planned.roles, planned.options, planned.requested) == (("api",), {"limit": 3}, True)


def test_plan_travels_unchanged(registry: Registry) -> None:
    """A plan with every kind is equal after msgpack."""
    plan = make_plan(
        registry,
        model="Qwen3ForCausalLM",
        attention_backend="auto",
        reasoning_parser="qwen3",
        tool_parser="hermes",
        grammar_backend="outlines",
        hooks=["acme", "acme"],
        options={"acme": {"a": [1, 2.5, "x", None, {"b": True}]}},
    )
    assert PluginPlan.decode(plan.encode()) == plan
    assert len(plan.of_kind("hooks")) == 1


def test_damaged_plan_is_a_plugin_error() -> None:
    """Bytes that are no plan give a typed error, not a decoder's."""
    with pytest.raises(PluginError, match="plugin plan: cannot be read"):
        PluginPlan.decode(b"\x81\xa7plugins\x01")


def test_roles_come_from_kind_or_manifest(registry: Registry) -> None:
    """Each process is given what its role needs and no more; a hooks plugin's manifest declares its roles."""
    plan = make_plan(
        registry,
        model="Qwen3ForCausalLM",
        attention_backend="torch_native",
        reasoning_parser="qwen3",
        grammar_backend="outlines",
        hooks=["acme"],
    )
    by_role = {role: [p.name for p in plan.for_role(role)] for role in ("api", "engine", "worker", "compiler")}
    assert by_role == {
        "api": ["qwen3", "outlines", "acme"],
        "engine": ["Qwen3ForCausalLM", "torch_native", "outlines", "acme"],
        "worker": ["Qwen3ForCausalLM", "torch_native"],
        "compiler": ["outlines"],
    }


def test_auto_orders_candidates_by_facts(registry: Registry) -> None:
    """The narrower match goes first, a built-in before a third party, and what needs a missing package not at all."""
    assert names(make_plan(registry, attention_backend="auto", device="cuda")) == [
        "triton",
        "acme-fast",
        "torch_native",
    ]


def test_auto_leaves_out_other_devices(registry: Registry) -> None:
    """On CPU only what runs there is a candidate, and a plugin without `matches` never is."""
    assert names(make_plan(registry, attention_backend="auto", device="cpu")) == ["torch_native"]


def test_auto_with_unknown_device_keeps_all(registry: Registry) -> None:
    """Where the device is not known yet no candidate is dropped for it: the engine asks each with `why_not`."""
    assert names(make_plan(registry, attention_backend="auto")) == ["triton", "acme-fast", "torch_native"]


def test_candidates_of_auto_are_not_requested(registry: Registry) -> None:
    """A candidate may fail and is not marked selected; a name asked for may not and is."""
    plan = make_plan(registry, attention_backend="auto", reasoning_parser="qwen3", device="cpu")
    assert [p.requested for p in plan.plugins] == [False, True]
    assert {r.name for r in registry.records if r.state == "selected"} == {"qwen3"}


def test_select_hook_goes_first(registry: Registry) -> None:
    """The hook's answer heads the candidates, even one that takes no part in `auto` by itself."""

    def select(kind: str, facts: Mapping[str, str]) -> str | None:
        assert facts == {"device": "cuda", "architecture": "", "quantization": "", "vision": ""}
        return "acme-quiet" if kind == "attention_backend" else None

    plan = make_plan(registry, attention_backend="auto", device="cuda", select=select)
    assert names(plan) == ["acme-quiet", "triton", "acme-fast", "torch_native"]


def test_select_hook_with_unknown_answer(registry: Registry) -> None:
    """A hook that names what is not installed is an error, not ignored."""
    with pytest.raises(PluginError, match="--attention-backend 'nope': not installed"):
        make_plan(registry, attention_backend="auto", select=lambda kind, facts: "nope")


def test_auto_without_candidates_is_an_error_for_attention(site: FakeSite) -> None:
    """`auto` that finds no attention backend names the device and what is installed."""
    site.add("acme", entry_points={ATTENTION: {"acme-fast": "acme:Fast"}})
    with pytest.raises(PluginError) as caught:
        make_plan(Registry.scan(path=[str(site.root)]), attention_backend="auto", device="cpu")
    assert str(caught.value) == (
        "--attention-backend 'auto': no installed backend says in its manifest that it serves device 'cpu'; "
        "installed: acme-fast; name one of them"
    )


def test_auto_without_candidates_selects_no_parser(registry: Registry) -> None:
    """For the other kinds `auto` without candidates selects nothing."""
    assert make_plan(registry, reasoning_parser="auto").plugins == ()


def test_auto_can_match_the_architecture(site: FakeSite) -> None:
    """A manifest's pattern on the architecture decides whether a parser is a candidate."""
    site.add(
        "acme",
        entry_points={"dovetail.reasoning_parsers.v1": {"any": "a:A", "llama": "a:L", "exact": "a:E"}},
        manifest={
            "reasoning_parser": {
                "any": {"matches": {}},
                "llama": {"matches": {"architecture": ["Llama*"]}},
                "exact": {"matches": {"architecture": ["LlamaForCausalLM"]}},
            }
        },
    )
    registry = Registry.scan(path=[str(site.root)])
    llama = {"device": "cpu", "architecture": "LlamaForCausalLM"}
    assert [r.name for r in candidates(registry, "reasoning_parser", llama)] == ["exact", "llama", "any"]
    qwen = {"device": "cpu", "architecture": "Qwen3ForCausalLM"}
    assert [r.name for r in candidates(registry, "reasoning_parser", qwen)] == ["any"]


def test_named_plugin_for_another_device_is_refused(registry: Registry) -> None:
    """A backend asked for by name that cannot run on the device is an error with version and fix; no fallback."""
    with pytest.raises(PluginError) as caught:
        make_plan(registry, attention_backend="triton", device="cpu")
    assert str(caught.value) == (
        "--attention-backend 'triton': triton of dovetail-llm 0.1.0 cannot be used: it runs on cuda, not on cpu; "
        "choose another, or --device cuda where there is one"
    )


def test_named_plugin_with_missing_package_is_refused(registry: Registry) -> None:
    """A backend asked for by name whose package is missing says what to install."""
    with pytest.raises(PluginError, match="it needs no-such-flash; run: pip install no-such-flash"):
        make_plan(registry, attention_backend="fa3", device="cuda")


def test_unknown_hooks_plugin(registry: Registry) -> None:
    """An unknown name given to --plugin is refused like any other."""
    with pytest.raises(PluginError, match=r"--plugin .acne.: not installed; installed: acme; did you mean acme"):
        make_plan(registry, hooks=["acne"])


def test_errors_name_the_flag_that_was_given(registry: Registry) -> None:
    """Of a kind that several flags name, too."""
    with pytest.raises(PluginError, match=r"^--model-impl 'nope': not installed; installed: Qwen3ForCausalLM; to add"):
        make_plan(registry, model="Qwen3ForCausalLM", model_impl="nope")
    with pytest.raises(PluginError, match=r"^architecture 'Other': not installed"):
        make_plan(registry, model="Other", model_impl="dovetail")
    with pytest.raises(PluginError, match=r"^--decode-attention-backend 'nope': not installed"):
        make_plan(registry, decode_attention_backend="nope")


def test_auto_stands_behind_names(site: FakeSite) -> None:
    """Of a kind that has any number: what is named comes first and is not taken twice, and a hook is asked."""
    kernels = {"dovetail.kernels.v1": {name: f"a:{name}" for name in ("one", "two", "other")}}
    fits = {"matches": {"device": ["cpu"]}}
    site.add("acme", "1.0", kernels, manifest={"kernels": {"one": fits, "two": fits}})
    found = Registry.scan(path=[str(site.root)])

    def planned(*given: str, **more: object) -> list[tuple[str, bool]]:
        plan = make_plan(found, device="cpu", kernels=given, **more)  # type: ignore[arg-type]  # two kinds of values
        return [(each.name, each.requested) for each in plan.of_kind("kernels")]

    assert planned("auto") == [("one", False), ("two", False)]
    assert planned("other", "auto") == [("other", True), ("one", False), ("two", False)]
    assert planned("two", "auto") == [("two", True), ("one", False)]
    assert planned("one", "auto", select=lambda kind, facts: "other") == [
        ("one", True), ("other", False), ("two", False),
    ]  # fmt: skip
    assert planned("plain") == []
    for wrong, said in (("auto,one", "give one,auto"), ("plain,auto", "'plain' stands alone")):
        with pytest.raises(PluginError, match=said):
            planned(*wrong.split(","))
