"""Speculators in an engine: the text is the same as without, whoever drafts, and what is at fault is named once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_models import Example
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.speculation import DraftRequest, Speculator
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams as EngineParams
from dovetail.messages import Submit
from dovetail_backends.speculators import Last, Ngram, NgramOptions, continued, last_match
from dovetail_testing.conformance.speculation import Drafted
from dovetail_testing.engine import make_core

TEXT = "The cat sat on the mat. The dog sat on the log. "


def found(ids: Sequence[int], least: int, most: int, num: int) -> list[int]:
    """What `ngram` drafts, in a loop."""
    for length in range(min(most, len(ids) - 1), least - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if ids[place - length : place] == ids[len(ids) - length :]:
                text = list(ids)
                while len(text) < len(ids) + num:
                    text.append(text[place + len(text) - len(ids)])
                return text[len(ids) :]
    return []


def test_a_draft_is_what_followed_the_longest_match() -> None:
    """Random tokens of few kinds: the last place of the longest match, and past the end it goes on from itself."""
    rng = random.Random(2)
    for _ in range(600):
        ids = [rng.randrange(rng.choice((2, 3, 6))) for _ in range(rng.randrange(1, 40))]
        least, most, num = rng.randrange(1, 4), rng.randrange(4, 7), rng.randrange(1, 9)
        place = last_match(np.array(ids, dtype=np.int32), least, most)
        drafts = [] if place is None else continued(np.array(ids, dtype=np.int32), place, num)
        assert drafts == found(ids, least, most, num), (ids, least, most)


def test_how_much_is_drafted_follows_what_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many where nothing held, twice as many where all did, between one and `max_drafts`."""
    monkeypatch.setattr(Ngram, "options", NgramOptions(max_drafts=8))
    speculator, request = Ngram(), Drafted([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 1, 64)
    widths = []
    for step in range(8):
        [drafts] = speculator.draft([request])
        widths.append(len(drafts))
        said = [*drafts, 0, 1, 2] if step >= 4 else [100 + step, 1, 2]
        request.ids = array("i", [*request.ids, *said])
    assert isinstance(request.memo, Last)
    assert widths == [8, 4, 2, 1, 1, 2, 4, 8]


@pytest.mark.parametrize("wrong", [{"max_drafts": 0}, {"min_match": 7}, {"lookback": 3}, {"min_match": 0}], ids=str)
def test_options_that_do_not_go_together_are_refused(wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has all of them."""
    monkeypatch.setattr(Ngram, "options", NgramOptions(**wrong))
    with pytest.raises(ConfigError, match="give 1 or more drafts, and 1 <= min_match <= max_match < lookback"):
        Ngram()


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    """The demo model without and with drafts."""
    with LLM(max_total_tokens=8192) as plain, LLM(max_total_tokens=8192, speculator="ngram") as drafting:
        yield plain, drafting


def seen(replies: Any) -> Any:
    """All that a caller gets."""
    return [(r.text, list(r.token_ids), r.finish_reason, r.matched_stop, rounded(r)) for r in replies]


def rounded(reply: Any) -> Any:
    """Log probabilities; their last bits depend on the batch."""
    return [(p.token_id, round(p.logprob, 3)) for p in reply.logprobs or ()]


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 4},
    "two choices": {"temperature": 1.0, "seed": 9, "n": 2},
    "a stop string within drafts": {"temperature": 0, "stop": ["on the"]},
    "a stop string that is kept": {"temperature": 0, "stop": ["dog sa", "log."], "include_stop_str_in_output": True},
    "log probabilities": {"temperature": 0, "logprobs": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "bias and a minimum": {"temperature": 0.7, "seed": 1, "min_tokens": 30, "logit_bias": {5: 4.0}},
    "a pattern": {"temperature": 0.8, "seed": 3, "regex": "(The [a-z]+ sat on the [a-z]+[.] ){4}"},
}


@pytest.mark.first(5)
@pytest.mark.parametrize("case", ASKED)
def test_replies_are_those_without_drafts(case: str, llms: tuple[LLM, LLM]) -> None:
    """Prompts that repeat, one that does not, and one prompt twice: text, tokens, ends and usage are equal."""
    plain, drafting = llms
    params = SamplingParams(max_tokens=32, **ASKED[case])
    prompts = [TEXT * 4, TEXT * 4, "1, 2, 3, 1, 2, 3, 1, 2, 3, 1,", "The capital of France is"]
    expected = seen(plain.generate(prompts, params, use_tqdm=False))
    assert seen(drafting.generate(prompts, params, use_tqdm=False)) == expected


def test_text_that_repeats_takes_fewer_steps(qwen3: Path) -> None:
    """A reply that goes round and round comes several tokens a step, and the load tells how many were right."""
    params = EngineParams(max_tokens=200, temperature=0, ignore_eos=True)
    steps = []
    for speculator in (None, "ngram"):
        core = make_core(qwen3, speculator=speculator)
        core.handle(Submit(rid="", handle=1, prompt_ids=[5, 6, 7] * 9, params=params))
        said: list[int] = []
        while core.has_work:
            said += [token for delta in core.step().deltas for token in delta.ids]
        steps.append((said, core.step_count))
    (plain, plain_steps), (drafted, drafted_steps) = steps
    assert drafted == plain
    assert drafted_steps < 0.8 * plain_steps
    stats = core.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens == plain_steps - drafted_steps


class Wrong(Speculator):
    """Does what `fault` says."""

    fault: Any = None

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Fail."""
        return Wrong.fault(requests)  # type: ignore[no-any-return]


FAULTS: dict[str, Any] = {
    "raises": lambda requests: 1 / 0,
    "one too few": lambda requests: [],
    "no sequences": lambda requests: [None for _ in requests],
    "no tokens": lambda requests: [["x"] for _ in requests],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_speculator_at_fault_costs_the_drafts(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies come as without it, and the log names it once."""
    monkeypatch.setattr(Wrong, "fault", FAULTS[fault])
    with LLM(max_total_tokens=2048, speculator=Wrong) as llm:
        [reply] = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len(reply.token_ids) == 12
    named = [record for record in caplog.records if "draft failed" in record.getMessage()]
    assert len(named) == 1
    assert "Wrong" in named[0].getMessage()


def test_ids_outside_the_vocabulary_are_dropped(qwen3: Path) -> None:
    """Drafts count up to the first that is no token of the model."""
    core: EngineCore = make_core(qwen3, speculator="ngram")
    speculation = core.scheduler.speculation
    assert speculation is not None
    speculation._propose = lambda requests: [[1, 1 << 30, 2] for _ in requests]
    params = EngineParams(max_tokens=9, temperature=0, ignore_eos=True)
    core.handle(Submit(rid="", handle=1, prompt_ids=[5, 6, 7], params=params))
    while core.has_work:
        core.step()
    assert core.stats().num_drafted_tokens <= 8


def test_recurrent_layers_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    """One line names both; that no layer wants these tensors is not come to."""
    example = Example("recurrent", "RecurrentForCausalLM")
    folder = example.reference().write_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    save_file({f"other.{name}": tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="--speculator 'ngram': RecurrentForCausalLM has recurrent layers"):
        example.make_engine(folder, speculator="ngram")
