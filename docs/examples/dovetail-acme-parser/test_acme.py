"""The conformance kit, and what the parser's author wants to see with their own eyes."""

from dovetail.plugins import Registry, load, make_plan
from dovetail_testing import ReasoningParserConformance, Sample
from dovetail_testing.parsers import parse_chunks


class TestAcme(ReasoningParserConformance):
    name = "acme-r2"
    samples = (
        Sample("<r>think</r>answer", reasoning="think", content="answer"),
        Sample("think</r>answer", reasoning="think", content="answer", prompt_tail="<r>"),
        Sample("answer", content="answer"),
    )
    auto_templates = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<r>{{ m.reasoning_content }}</r>{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    )


def installed_parser():
    plan = make_plan(Registry.scan(), reasoning_parser="acme-r2")
    return load(plan, "api").get("reasoning_parser", "acme-r2")()


def test_reads_the_format_however_it_is_cut():
    """Reasoning and answer come out whole wherever the stream is split."""
    text = "<r>think </r>answer"
    for cut in range(len(text) + 1):
        reply = parse_chunks(installed_parser(), [text[:cut], text[cut:]])
        assert (reply.reasoning, reply.content) == ("think ", "answer")


def test_reasoning_opened_by_the_template():
    """Where the template writes the opening tag, the output starts inside reasoning."""
    reply = parse_chunks(installed_parser(), ["think</r>answer"], prompt_tail="<r>")
    assert (reply.reasoning, reply.content) == ("think", "answer")


def test_answer_without_reasoning():
    """A reply without tags is all answer."""
    reply = parse_chunks(installed_parser(), ["answer"])
    assert (reply.reasoning, reply.content) == (None, "answer")
