"""The conformance kit, with samples of what the format allows and of what is no call."""

from dovetail_testing import Sample, ToolParserConformance


class TestCallTools(ToolParserConformance):
    name = "call-tools"
    samples = (
        Sample('<call>f({"a": 1})</call>', tool_calls=[("f", '{"a": 1}')]),
        Sample('Well.\n<call>f({"a": "})</b>"})</call>', content="Well.", tool_calls=[("f", '{"a": "})</b>"}')]),
        Sample("<call>ping()</call>", tool_calls=[("ping", "{}")]),
        Sample('<call>a.b({"x": [{}]})</call><call>c()</call>', tool_calls=[("a.b", '{"x": [{}]}'), ("c", "{}")]),
        Sample("<call>no call</call>", content="<call>no call</call>"),
    )
