"""A request goes on in another engine: prompt and output so far are all that what follows depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.messages import Admitted, GrammarOption, MarkedThinking, Marker, SamplerParams, Submit, TokenDelta
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.engine import make_core

NUM = 24
LONG = {"max_tokens": NUM, "ignore_eos": True}
REGEX = (GrammarOption(backend="llguidance", kind="regex", source="([a-z]{2}[0-9]){6,40}"),)
TOKENIZER = Tokenizer.load(MODEL_DIR)
START, END = (Marker(text, tuple(TOKENIZER.encode(text, add_special_tokens=False))) for text in ("<<a>>", "<<b>>"))
THINKING = MarkedThinking(state="in", start=START, end=END, budget=6)
"""Its markers are text of several tokens."""
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {}),
    "seeded": ({"seed": 5, "top_p": 0.95}, {}),
    "penalties": (
        {"seed": 6, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {},
    ),
    "bias": ({"temperature": 0.0, "logit_bias": {7: 4.0, 9: -100.0}}, {}),
    "logprobs": ({"seed": 7, "logprobs": 3, "prompt_logprobs": 2}, {}),
    "min-tokens": ({"seed": 8, "ignore_eos": False, "stop_token_ids": tuple(range(60)), "min_tokens": 20}, {}),
    "grammar": ({"seed": 9, "ignore_eos": False}, {"grammar": REGEX}),
    "greedy-grammar": ({"temperature": 0.0, "ignore_eos": False}, {"grammar": REGEX}),
    "thinking": ({"seed": 10, "ignore_eos": False}, {"grammar": REGEX, "thinking": THINKING}),
    "budget": ({"seed": 11}, {"thinking": THINKING}),
    "minimum-of-a-grammar": ({"seed": 12, "min_tokens": 18, "ignore_eos": False}, {"grammar": REGEX}),
}

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no products in bfloat16"
)


@pytest.fixture(
    scope="module",
    params=[("float32", False), ("float32", True), pytest.param(("bfloat16", False), marks=needs_bfloat16)],
    ids=["steps", "overlap", "bfloat16"],
)
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """The demo model. Its cache is flushed before every request: it is as good as a new engine."""
    dtype, overlap = request.param
    made = make_core(MODEL_DIR, grammar_backend="llguidance", dtype=dtype, overlap_on_cpu=overlap)
    yield made
    made.close()


def submit_of(way: str) -> Submit:
    params, more = WAYS[way]
    prompt = [(7 * i + len(way)) % 90 + 4 for i in range(21)]
    return Submit(rid=way, prompt_ids=prompt, params=SamplerParams(**{**LONG, **params}), **more)


def run(core: EngineCore, *submits: Submit, num: int | None = None) -> dict[int, list[TokenDelta]]:
    """The deltas of requests that begin together, until the end or until each has so many tokens."""
    core.pages.flush()
    found: dict[int, list[TokenDelta]] = {submit.handle: [] for submit in submits}
    for submit in submits:
        core.handle(submit)
    while core.has_work:
        for delta in core.step().deltas:
            found[delta.handle].append(delta)
    return found


def texts(deltas: list[TokenDelta]) -> tuple[Any, ...]:
    """All that a client sees of them."""
    ids = [token for delta in deltas for token in delta.ids]
    logprobs = [row.logprob for delta in deltas for row in delta.logprobs or ()]
    return ids, logprobs, deltas[-1].finish, deltas[-1].grammar_option


@pytest.mark.first(6)
@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
def test_a_request_goes_on_anywhere_as_it_would_have(core: EngineCore, way: str) -> None:
    """Cut after any number of tokens and resumed in an engine that knows nothing of it, the rest is the same.

    After any number of a few, step by step in float32; after some, where steps overlap or numbers are rounded.
    """
    submit = msgspec.structs.replace(submit_of(way), handle=1000)
    whole = run(core, submit)[1000]
    ids, logprobs, finish, step = texts(whole)
    assert len(ids) >= 10
    is_plain = core.settings.dtype == "float32" and not core.settings.overlap_on_cpu
    cuts = (*range(1, 7), *range(7, len(ids), 5)) if is_plain else range(1, len(ids), 7)
    rest = {
        cut: msgspec.structs.replace(
            submit,
            handle=cut,
            output_ids=ids[:cut],
            cached_tokens=3,
            num_retractions=1,
            grammar_option=step,
            again=True,
        )
        for cut in cuts
    }
    found = run(core, *rest.values())
    for cut in cuts:
        more, shown, end, at = texts(found[cut])
        assert ids[:cut] + more == ids, f"cut after {cut}"
        assert (shown, end, at) == (pytest.approx(logprobs[cut:], abs=1e-4), finish, step)
        last = found[cut][-1]
        assert (last.cached_tokens, last.num_retractions, last.prompt_tokens) == (3, 1, 21)
        assert all(delta.prompt_logprobs is None for delta in found[cut])


def test_a_grammar_goes_on_with_the_way_that_was_enforced(core: EngineCore) -> None:
    """Of several ways, the one that the text so far is of is enforced, and no other."""
    broken = GrammarOption(backend="missing", kind="regex", source="[a-z]+")
    submit = msgspec.structs.replace(submit_of("grammar"), grammar=(broken, *REGEX), handle=1)
    ids, _, finish, step = texts(run(core, submit)[1])
    assert step == 1
    again = msgspec.structs.replace(submit, handle=2, output_ids=ids[:7], grammar_option=step, again=True)
    more, _, end, at = texts(run(core, again)[2])
    assert (ids[:7] + more, end, at) == (ids, finish, 1)


def test_output_that_its_grammar_does_not_allow_ends_the_request(core: EngineCore) -> None:
    """What cannot be followed is told, not guessed."""
    submit = msgspec.structs.replace(submit_of("grammar"), handle=3, output_ids=[40, 40, 40], grammar_option=0)
    [delta] = run(core, submit)[3]
    assert delta.finish is not None
    assert delta.finish.code == "grammar_failed"


def test_a_client_hears_who_takes_part_before_the_step(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are announced once, before the first step that they are part of, those with grammars on arrival."""
    order: list[Any] = []
    monkeypatch.setattr(core, "send", lambda message: order.append(message))
    launch = core.executor.stepper.launch

    def noted(plan: Any) -> Any:
        order.append("step")
        return launch(plan)

    monkeypatch.setattr(core.executor.stepper, "launch", noted)
    run(core, *(msgspec.structs.replace(submit_of(way), handle=i) for i, way in enumerate(["greedy", "grammar"], 1)))
    as_times = [each for each in order if each != "step"]
    assert as_times == [Admitted([2]), Admitted([1])]
    assert order[:3] == [*as_times, "step"]
