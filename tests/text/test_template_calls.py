"""What single calls of a chat template may cost, and what the functions that are bounded are for."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from dovetail.text.chat.budget import INLINE
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.inline import InlineCostError

COLLIDING = "range(0, {num} * (2 ** 61 - 1), 2 ** 61 - 1)"
"""Numbers with one hash."""


@pytest.mark.parametrize(
    "expression",
    [
        "5 | round(-30000000)",
        "'{0:{1}}'.format('x', '300000000') | length",
        "'{0:{1}{1}{1}}'.format('x', 300) | length",
        "'{{{0:{1}}'.format('x', '300000000') | length",
        "('{0:99999}' * 3000).format('x') | length",
        "('{0}' * 100000).format('') | length",
        "'%-*d' % (99999999, 1)",
        "'%.*f' % (99999999, 1.5)",
        "'%%%-*d' % (99999999, 1)",
        "'%-*d' | format(99999999, 1)",
        "('%(a)99999s' * 3000) % {'a': 'x'}",
        "('\\u00e9' * 100000).encode('punycode') | length",
        "('\\u00e9.' * 100000).encode('idna') | length",
        "('\\ufdfa' * 400000).encode('ascii', 'namereplace') | length",
        "'x'.encode('unknown-' ~ messages | length)",
        "('a' * 200000).strip('b' * 200000 ~ 'a') | length",
        "('a' * 200000) | trim('b' * 200000 ~ 'a') | length",
        "strftime_now('%9999d' * 10000) | length",
        "{}.fromkeys(" + COLLIDING.format(num=30000) + ") | length",
        "([{'a': 1}] * 400) | sort(attribute='a,' * 100000) | length",
        "([{'a': 1}] * 400) | groupby('a,' * 100000) | length",
    ],
)
def test_one_call_of_a_template_takes_no_long(expression: str) -> None:
    """Each is one function between two checks of the time: some took seconds or 500 MB, the first any time."""
    chat = ChatTemplate(
        {"default": "{% if messages | length == 3 %}{{ " + expression + " }}{% endif %}"}, limits=INLINE
    )
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(InlineCostError):
            chat.render(messages)
        took, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert took < 0.5  # of which most is tracing
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'{0} {{}} {1:>5}'.format(1795878246, 'x')", "1795878246 {}     x"),
        ("'%5.1f%% %s' % (12.25, 'x')", " 12.2% x"),
        ("5.678 | round(1)", "5.7"),
        ("1234 | round(-2)", "1200"),
        ("'é'.encode('utf-8') | length", "2"),
        ("'é'.encode().decode(encoding='utf_8')", "é"),
        ("' x\n'.strip()", "x"),
        ("'-x-' | trim('-')", "x"),
        ("dict([['a', 1]]).a", "1"),
        ("{}.fromkeys(['a'], 1).a", "1"),
        ("([{'a': {'b': 2}}, {'a': {'b': 1}}] | sort(attribute='a.b'))[0].a.b", "1"),
    ],
)
def test_what_those_functions_are_for_works(expression: str, text: str) -> None:
    """Also in the server's process."""
    chat = ChatTemplate({"default": "{{ " + expression + " }}"}, limits=INLINE)
    assert chat.render([{"role": "user", "content": "hi"}]).text == text
