"""Tests of the parser as Dovetail finds it: by name, through the installed entry point."""

from dataclasses import dataclass

from dovetail.contracts import Markers, ParserRequest
from dovetail.plugins import Registry, load, make_plan


@dataclass
class Template:
    source: str


def installed_parser():
    plan = make_plan(Registry.scan(), reasoning_parser="acme-r2")
    return load(plan, "api").get("reasoning_parser", "acme-r2")()


def test_spec_declares_the_tags():
    """Reasoning stands between the tags, and nothing around them is trimmed."""
    spec = installed_parser().spec(None, Template(""), ParserRequest())
    assert spec.reasoning == Markers("<r>", "</r>", after_start="", before_end="", after_end="")
    assert spec.tools is None


def test_detects_its_own_template_only():
    """A template that writes the tag is recognised; another one is not."""
    assert installed_parser().detect(Template("{{ '<r>' }}")) == 1.0
    assert installed_parser().detect(Template("{{ '<think>' }}")) == 0.0
