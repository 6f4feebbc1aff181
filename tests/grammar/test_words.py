"""Tokens that a request may say at all, and words that it may not, through a real engine."""

from __future__ import annotations

import math

import pytest
from grammar_demo import Demo, Result, fixed, json_option

PROMPT = "What is the capital of France?"


def said(demo: Demo, text: str) -> tuple[int, ...]:
    return tuple(demo.tokenizer.encode(text, add_special_tokens=False))


def ask(demo: Demo, **options: object) -> Result:
    return demo.generate(prompt=demo.prompt(PROMPT), temperature=0, max_tokens=30, **options)


def test_a_word_that_would_come_does_not(demo: Demo) -> None:
    """What the model says is banned, as one token or as several; its other tokens may be said apart."""
    plain = ask(demo)
    assert "Paris" in plain.text
    at = next(
        i
        for i in range(len(plain.ids))
        if "Paris" in demo.tokenizer.decode(plain.ids[: i + 1], skip_special_tokens=True)
    )
    single = ask(demo, bad_words=((plain.ids[at],),))
    assert plain.ids[at] not in single.ids
    before = tuple(plain.ids[at - 2 : at])
    several = ask(demo, bad_words=((*before, plain.ids[at]),))
    assert several.ids[:at] == plain.ids[:at]
    assert several.ids[at] != plain.ids[at]
    elsewhere = ask(demo, bad_words=((*before[::-1], plain.ids[at]),))
    assert elsewhere.ids == plain.ids


def test_nothing_but_what_is_allowed_is_said(demo: Demo) -> None:
    """Only tokens of the list come, until the limit where no end of the reply is among them."""
    yes, no = said(demo, "yes")[0], said(demo, "no")[0]
    found = demo.generate(prompt=demo.prompt(PROMPT), max_tokens=12, allowed_token_ids=(yes, no))
    assert set(found.ids) <= {yes, no}
    assert (len(found.ids), found.finish and found.finish.reason) == (12, "length")
    end = demo.tokenizer.eos_token_ids[0]
    ended = ask(demo, allowed_token_ids=(end,), min_tokens=0)
    assert (ended.ids, ended.finish and ended.finish.reason) == ([end], "stop")


def test_rules_go_beside_a_grammar_and_a_budget(demo: Demo) -> None:
    """A grammar keeps to its language without the banned word; thinking ends where its budget does."""
    # The first token is banned: once "true" has begun, a grammar has no other way out.
    grammar = demo.generate(json_option({"type": "boolean"}), bad_words=(said(demo, "true")[:1],), temperature=0)
    assert grammar.text == "false"
    think = demo.generate(
        prompt=demo.prompt(PROMPT, thinking=True),
        thinking=demo.thinking("open", budget=3),
        bad_words=(said(demo, "Paris"),),
        temperature=0,
    )
    assert "</think>" in demo.tokenizer.decode(think.ids, skip_special_tokens=False)


def test_rules_that_leave_nothing_end_the_request_with_the_reason(demo: Demo) -> None:
    """A grammar that wants what is not allowed is the request's fault; its neighbour is served."""
    yes = said(demo, "yes")[:1]
    bad, good = demo.together([demo.one(fixed("never"), allowed_token_ids=yes), demo.one(fixed("never"))])
    assert bad.finish is not None
    assert (bad.finish.reason, bad.finish.code) == ("abort", "grammar_failed")
    assert "allowed_token_ids" in (bad.finish.message or "")
    assert bad.ids == []  # nor is a token sent that neither allows
    assert good.text == "never"


@pytest.mark.parametrize("logprobs", [0, 3])
def test_named_tokens_have_their_log_probabilities(demo: Demo, logprobs: int) -> None:
    """Each position tells those of the named tokens, beside the best, of the reply and of the prompt."""
    ids = (*said(demo, " Paris")[:1], 7)
    named = {"logprobs": logprobs, "prompt_logprobs": 0, "prompt_logprobs_start": 0, "logprob_token_ids": ids}
    with_names, without = demo.together(
        [
            demo.one(prompt=demo.prompt(PROMPT), temperature=0, max_tokens=9, **options)
            for options in (named, {"logprobs": 8})
        ]
    )
    assert with_names.ids == without.ids
    rows = [row for delta in with_names.deltas for row in delta.logprobs or ()]
    best = [row for delta in without.deltas for row in delta.logprobs or ()]
    assert len(rows) == len(with_names.ids) > 5
    for row, other in zip(rows, best, strict=True):
        assert [item.token_id for item in row.named] == list(ids)
        assert len(row.top) == logprobs
        for item in row.named:
            known = {t.token_id: t.logprob for t in other.top}.get(item.token_id)
            assert known is None or math.isclose(known, item.logprob, abs_tol=1e-4)
    prompt = [row for delta in with_names.deltas for row in delta.prompt_logprobs or ()]
    assert [len(row.named) for row in prompt] == [0, *[2] * (len(prompt) - 1)]
    assert not any(row.named for row in best)
