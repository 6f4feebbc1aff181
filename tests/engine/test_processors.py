"""Logits processors in an engine: whoever asks for one gets it, in any batch and schedule, and nobody else notices."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, Field

from dovetail import LLM
from dovetail import SamplingParams as Params
from dovetail.contracts.errors import ConfigError, PluginError, RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRows
from dovetail.messages import SamplerParams, Submit
from dovetail_backends.logits_processors import MAX_SIZE, NoRepeatNgram, NoRepeatOptions, NoRepeatParams
from dovetail_testing.engine import serve, tokens

NAMES = ["no-repeat-ngram"]


def banned(ids: Sequence[int], size: int) -> set[int]:
    """The tokens that would say a run of `size` tokens again, in a loop."""
    last = tuple(ids[len(ids) - size + 1 :]) if size > 1 else ()
    starts = range(len(ids) - size + 1)
    return {ids[i + size - 1] for i in starts if tuple(ids[i : i + size - 1]) == last} if len(ids) >= size else set()


@pytest.mark.parametrize("window", [16, 23, 4096])
def test_what_is_banned_is_what_a_loop_finds(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts shorter and longer than the window, step after step, with prompts that count and that do not."""
    monkeypatch.setattr(NoRepeatNgram, "options", NoRepeatOptions(window=window))
    rng, vocab, rows = random.Random(window), 7, 12
    processor = NoRepeatNgram(vocab, rows, torch.device("cpu"))
    texts, sizes = [], []
    for row in range(rows):
        ids = [rng.randrange(rng.choice([2, vocab])) for _ in range(rng.randrange(1, 60))]
        size, prompt, num_prompt = rng.randrange(1, 6), rng.random() < 0.7, rng.randrange(1, len(ids) + 1)
        processor.admit(row, NoRepeatParams(size=size, prompt=prompt), ids, num_prompt)
        texts.append(ids if prompt else ids[num_prompt:])
        sizes.append(size)
    for _ in range(40):
        chosen = rng.sample(range(rows), rng.randrange(1, rows))
        batch = LogitsRows(torch.tensor(chosen), torch.zeros(len(chosen), dtype=torch.int64))
        logits = torch.zeros(len(chosen), vocab)
        processor.apply(logits, batch)
        for line, row in zip(logits, chosen, strict=True):
            found = {token for token in range(vocab) if line[token] < 0}
            assert found == banned(texts[row][-window:], sizes[row]), (texts[row], sizes[row])
        said = [rng.randrange(vocab) for _ in chosen]
        processor.drawn(batch, torch.tensor(said))
        for row, token in zip(chosen, said, strict=True):
            texts[row] = [*texts[row], token]


def test_a_window_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest run has to fit."""
    monkeypatch.setattr(NoRepeatNgram, "options", NoRepeatOptions(window=MAX_SIZE - 1))
    with pytest.raises(ConfigError, match="window 15 is less than 16 tokens"):
        NoRepeatNgram(7, 2, torch.device("cpu"))


def repeats(ids: Sequence[int], size: int) -> bool:
    """Whether any run of tokens comes twice."""
    runs = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return len(set(runs)) < len(runs)


def submits(sizes: Sequence[int | None], max_tokens: int = 60, **more: Any) -> list[Submit]:
    """Requests that begin alike, some with a processor."""
    return [
        Submit(
            rid="",
            prompt_ids=[1, 2, 3, 4, 5, 6 + i],
            params=SamplerParams(
                max_tokens=max_tokens,
                temperature=i % 2 * 0.8,
                seed=i,
                ignore_eos=True,
                processors={} if size is None else {"no-repeat-ngram": {"size": size, "prompt": True}},
                **more,
            ),
        )
        for i, size in enumerate(sizes)
    ]


@cache
def undisturbed(folder: Path, sizes: tuple[int | None, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """What requests say without processors, and with them in one large step."""
    plain = serve(folder, submits([None] * len(sizes)))
    return [tokens(d) for d in plain], [tokens(d) for d in serve(folder, submits(sizes), logits_processors=NAMES)]


@pytest.mark.parametrize(
    "changes",
    [{"overlap_on_cpu": True}, {"max_total_tokens": 160, "page_size": 4}, {"chunked_prefill_size": 4}],
    ids=["overlapped", "retracted", "chunked"],
)
def test_only_who_asks_is_changed(changes: dict[str, Any], qwen3: Path) -> None:
    """No run comes twice, beside neighbours that say what they say alone; in any schedule, after retraction, too."""
    sizes = [2, None, 3, None, 1, 2]
    together = [tokens(d) for d in serve(qwen3, submits(sizes), logits_processors=NAMES, **changes)]
    plain, whole = undisturbed(qwen3, tuple(sizes))
    for i, (size, ids) in enumerate(zip(sizes, together, strict=True)):
        if size is None:
            assert ids == plain[i]
        else:
            assert not repeats([1, 2, 3, 4, 5, 6 + i, *ids], size)
    assert together == whole


def test_a_request_goes_on_in_another_engine(qwen3: Path) -> None:
    """What it had said there counts here."""
    [whole] = serve(qwen3, submits([2]), logits_processors=NAMES)
    ids = tokens(whole)
    [asked] = submits([2])
    rest = Submit(rid="", prompt_ids=asked.prompt_ids, params=asked.params, output_ids=ids[:25])
    [found] = serve(qwen3, [rest], logits_processors=NAMES)
    assert tokens(found) == ids[25:]


def test_log_probabilities_penalties_and_drafts_beside_it(qwen3: Path) -> None:
    """Log probabilities stay the model's own; with a speculator such requests go without drafts, others with."""
    more = {"logprobs": 1, "frequency_penalty": 0.2}
    plain = serve(qwen3, submits([2, None], **more), logits_processors=NAMES)
    drafting = serve(qwen3, submits([2, None], **more), logits_processors=NAMES, speculator="ngram")
    assert [tokens(d) for d in drafting] == [tokens(d) for d in plain]
    assert all(p.logprob is not None for d in plain[0] for p in d.logprobs or ())


class FaultParams(BaseModel):
    fault: str = "none"
    token: int = Field(0, ge=0)


class Faulty(LogitsProcessor):
    """Does what the request says."""

    Params = FaultParams

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self.faults: dict[int, FaultParams] = {}

    def admit(self, row: int, params: FaultParams, ids: Sequence[int], num_prompt: int) -> None:
        if params.fault == "admit":
            raise KeyError("lost")
        self.faults[row] = params

    def release(self, row: int) -> None:
        if self.faults.pop(row).fault == "release":
            raise OSError("kept")

    def apply(self, logits: torch.Tensor, batch: LogitsRows) -> None:
        for line, row in zip(logits, batch.rows.tolist(), strict=True):
            params = self.faults[row]
            if params.fault == "apply":
                raise ZeroDivisionError("by nothing")
            if params.fault == "nan":
                line[5] = float("nan")
            if params.fault == "all":
                line[:] = float("-inf")
            if params.fault == "only":
                line[torch.arange(len(line)) != params.token] = float("-inf")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model with a processor of this file beside the built-in."""
    with LLM(max_total_tokens=4096, logits_processors=[Faulty, "no-repeat-ngram"]) as made:
        yield made


FAULTY = f"{__name__}.Faulty"


def ask(llm: LLM, given: Any, **more: Any) -> Any:
    """One reply of a few tokens."""
    params = Params(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logits_processors": given, **more})
    [reply] = llm.generate("The capital of France is", params, use_tqdm=False)
    return reply


@pytest.mark.parametrize(
    ("fault", "why"),
    [("admit", "failed: KeyError"), ("apply", "ZeroDivisionError"), ("nan", "not finite")],
)
def test_a_processor_at_fault_ends_who_asked_for_it(fault: str, why: str, llm: LLM) -> None:
    """Its neighbour's reply is what it is alone, and the next request is served."""
    alone = ask(llm, {}, max_tokens=20)
    bad = Params(temperature=0, max_tokens=20, logits_processors={FAULTY: {"fault": fault}})
    good = Params(temperature=0, max_tokens=20, ignore_eos=True)
    broken, other = llm.generate(["The capital of France is"] * 2, [bad, good], use_tqdm=False)
    assert broken.finish_reason == "abort"
    assert why in broken.message
    assert (other.token_ids, other.finish_reason) == (alone.token_ids, "length")
    assert len(ask(llm, {FAULTY: {}}).token_ids) == 8


@pytest.mark.parametrize(("fault", "ends"), [("admit", "abort"), ("release", "length")])
def test_the_next_request_does_not_end_for_the_one_before(fault: str, ends: str, llm: LLM) -> None:
    """A row is given back only where it was taken, and what that raises is no step's."""
    assert ask(llm, {FAULTY: {"fault": fault}}).finish_reason == ends
    assert ask(llm, {}).finish_reason == "length"


def test_a_processor_that_leaves_nothing_is_gone_without(llm: LLM) -> None:
    """All tokens forbidden, or all that a grammar allows: the step is as without it."""
    assert ask(llm, {FAULTY: {"fault": "all"}}).token_ids == ask(llm, {}).token_ids
    forced = ask(llm, {FAULTY: {"fault": "only", "token": 3}}, regex="yes|no", ignore_eos=False)
    assert forced.text in ("yes", "no")
    assert set(ask(llm, {FAULTY: {"fault": "only", "token": 3}}).token_ids) == {3}


def test_several_take_part_in_one_request(llm: LLM) -> None:
    """Each sees what the one before it left."""
    given = {FAULTY: {"fault": "only", "token": 3}, "no_repeat_ngram": {"size": 1, "prompt": False}}
    found = ask(llm, given).token_ids
    assert found[0] == 3
    assert found.count(3) < 8  # forbidden once it was said: then the step goes without both


WRONG: list[tuple[Any, str]] = [
    ({"no-repeat": {"size": 2}}, "'no-repeat' is no logits processor of this server; served: "),
    ({"no-repeat-ngram": {}}, "no-repeat-ngram: size: field required"),
    ({"no-repeat-ngram": {"size": 0}}, "no-repeat-ngram: size: should be greater than or equal to 1"),
    ({"no-repeat-ngram": {"size": "2"}}, "no-repeat-ngram: size: should be a valid integer"),
    ({"no-repeat-ngram": {"Size": 2}}, "'Size' is unknown; did you mean 'size'?"),
    ({"no-repeat-ngram": {"size": 2}, "No_Repeat_Ngram": {"size": 3}}, "'no-repeat-ngram' is given twice"),
]


@pytest.mark.parametrize(("given", "why"), WRONG, ids=[json.dumps(given) for given, _ in WRONG])
def test_what_a_request_may_say_is_declared(given: Any, why: str, llm: LLM) -> None:
    """An unknown processor, an unknown or a wrong parameter: the message names it."""
    with pytest.raises(RequestError) as caught:
        ask(llm, given)
    assert why in str(caught.value)
    assert caught.value.param == "logits_processors"


def test_none_is_served_unless_named() -> None:
    """Without the flag the message says so; what is no plugin is refused at the start."""
    with LLM(max_total_tokens=1024) as plain, pytest.raises(RequestError, match="start the server with --logits-proc"):
        ask(plain, {"no-repeat-ngram": {"size": 2}})
    with pytest.raises(PluginError, match=r"--logits-processors 'nothing': not installed"):
        LLM(max_total_tokens=1024, logits_processors=["nothing"])
