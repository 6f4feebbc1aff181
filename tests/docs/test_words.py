"""The checker of words finds what it is for, and its exceptions are few."""

from __future__ import annotations

import check_words
import pytest


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("A request is turned away.", "'turned away': write rejected"),
        ("Whoever comes late waits.", "'Whoever': write user"),
        (" ".join(["word"] * 41) + ".", "a sentence of 41 words"),
        (" ".join(["One two three four five."] * 18), "a paragraph of 90 words"),
    ],
)
def test_a_finding_names_what_is_wrong(text: str, finding: str) -> None:
    """With what to write, or with its length."""
    assert [problem for problem in check_words.check(text) if problem.startswith(finding)]


def test_code_tables_and_measurements_are_not_prose() -> None:
    """Neither their words nor their lengths count, but a table's words do."""
    long = " ".join(["word"] * 50)
    for text in (f"```\nwhoever {long}\n```", f"<!-- results: x -->\n{long}\n<!-- results end -->", "`whoever`"):
        assert list(check_words.check(text)) == []
    assert list(check_words.check(f"| {long} |")) == []
    assert list(check_words.check("| whoever |"))


def test_exceptions_are_few_and_have_reasons() -> None:
    """At most ten."""
    assert len(check_words.EXCEPTIONS) <= 10
    assert all(check_words.EXCEPTIONS.values())


def test_pages_have_no_findings() -> None:
    """Nor the help texts and the docstrings of public names; `make check` says the same."""
    assert {path for path, _ in check_words.pages()} >= {"README.md", "docs/api.md", "docs/design/README.md"}
    assert list(check_words.findings()) == []
