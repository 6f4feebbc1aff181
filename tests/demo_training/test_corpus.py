"""What the corpus teaches is right: samples are well formed, answers follow, held-out items stay unseen."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from demo_training import evaluate
from demo_training.corpus import Sample, draw, held_out_samples, is_held_out, render
from demo_training.corpus import greetings as greetings_module
from demo_training.corpus.capitals import capital, capital_yes_no
from demo_training.corpus.dressing import dress
from demo_training.corpus.geography import ALIASES, COUNTRIES
from demo_training.corpus.greetings import greeting
from demo_training.corpus.invented import (
    invented_among_real,
    invented_capital,
    invented_country,
    invented_name,
    is_a_country,
)
from demo_training.corpus.nested import nested_extraction, nested_facts, open_json
from demo_training.corpus.parallel import parallel_calls, parallel_results
from demo_training.corpus.sample import Skill
from demo_training.corpus.spelling import letters, spelling
from demo_training.corpus.tools import two_calls
from demo_training.corpus.turns import own_words, running_total, several_turns
from demo_training.evaluate import Answer, answer, rows_of, table_of, write_json
from dovetail.contracts.reasoning import ParserRequest
from dovetail.demo import MODEL_DIR
from dovetail.sdk.formats.output import FormatParser, fold
from dovetail.text.parsing.stream import NoTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer as DovetailTokenizer
from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
from dovetail_parsers.tools.hermes import HermesTools

SKILLS: tuple[Skill, ...] = (
    nested_facts, nested_extraction, open_json, two_calls, parallel_calls, parallel_results, invented_country,
    is_a_country, invented_capital, invented_among_real, letters, spelling, several_turns, greeting,
)  # fmt: skip


def taught(skill: Skill, count: int, seed: int = 3) -> list[Sample]:
    """Returns training samples of one skill, undressed."""
    rng = Random(seed)
    return [draw(rng, skill) for _ in range(count)]


def completion(sample: Sample) -> str:
    """Returns what the model is taught to write, without the end of the turn."""
    return render(sample).completion.removesuffix("<|im_end|>")


@pytest.mark.parametrize("skill", SKILLS)
def test_samples_are_well_formed(skill: Skill) -> None:
    """Dressed samples fit the context, alternate between the roles, and leave no placeholder unfilled."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    rng = Random(5)
    for _ in range(150):
        sample = dress(rng, draw(rng, skill), draw)
        document = render(sample)
        assert sum(len(tokenizer.encode(text).ids) for text in (document.prompt, document.completion)) <= 2048
        assert not re.search(r"\{[a-z]\}", f"{sample.ask}{sample.answer}{sample.thought}"), sample
        assert sample.ask.strip()
        assert sample.answer.strip() or sample.calls
        roles = [message["role"] for message in sample.history if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_items_are_not_taught(skill: Skill) -> None:
    """Of every skill there are held-out samples, none of whose questions occurs in training."""
    held_out = held_out_samples(skill, 25, seed=4)
    assert len(held_out) > 10
    assert all(sample.held_out for sample in held_out)
    known = {json.dumps([sample.history, sample.ask, sample.after]) for sample in taught(skill, 800)}
    if skill is not greeting:  # 'salut' and 'Salut' are one question, typed in a hurry
        assert not known & {json.dumps([sample.history, sample.ask, sample.after]) for sample in held_out}


def test_a_held_out_name_or_word_is_never_taught() -> None:
    """Made-up countries and new words are held out whole: under no other question do they occur in training."""
    names = {name for rng in [Random(6)] for name in (invented_name(rng) for _ in range(1500))}
    unseen = {name for name in names if is_held_out(f"invented|{name}")}
    assert len(unseen) > 20
    rng = Random(6)
    asked = " ".join(
        draw(rng, skill).ask for skill in (invented_country, invented_capital, is_a_country) for _ in range(2000)
    )
    assert not unseen & set(re.findall(r"\w+", asked))
    spelled = {sample.keys[0].split("|")[1] for sample in held_out_samples(letters, 60) if "new" in sample.skill}
    assert len(spelled) > 10
    assert not any(set(sample.keys[0].split("|")[1:2]) & spelled for sample in taught(spelling, 2000))


def _first_json(text: str) -> Any:
    """Returns the first JSON object in a text."""
    return json.JSONDecoder().raw_decode(text, text.index("{"))[0]


def _shape(value: Any) -> Any:
    """Returns keys and types of a JSON value; of a list, those of its first entry."""
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return [_shape(value[0])] if isinstance(value, list) else type(value).__name__


@pytest.mark.parametrize("skill", [nested_facts, nested_extraction])
def test_nested_answers_match_what_the_question_shows(skill: Skill) -> None:
    """The answer validates against the schema of the question, or has the shape of its form."""
    schemas = forms = deep = 0
    for sample in taught(skill, 400):
        value = json.loads(sample.answer)
        deep += any(isinstance(item, (dict, list)) for item in value.values())
        text = "".join(message["content"] for message in sample.history) + sample.ask
        if "{" not in text:
            continue
        shown = _first_json(text)
        if shown.get("type") == "object" and "properties" in shown:
            jsonschema.Draft202012Validator.check_schema(shown)
            jsonschema.validate(value, shown, jsonschema.Draft202012Validator)
            assert list(shown["properties"]) == list(value)
            schemas += 1
        else:
            assert _shape(shown) == _shape(value)
            forms += 1
    assert schemas > 150
    assert forms > 40
    assert deep > 320


def test_a_schema_refuses_what_differs() -> None:
    """The schemas are no empty ones: an answer without one of its keys is invalid."""
    refused = total = 0
    for sample in taught(nested_extraction, 200):
        text = "".join(message["content"] for message in sample.history) + sample.ask
        if '"properties"' in text:
            value = json.loads(sample.answer)
            value.pop(next(iter(value)))
            total += 1
            refused += not jsonschema.Draft202012Validator(_first_json(text)).is_valid(value)
    assert refused == total > 50


def test_json_that_a_grammar_begins_is_true_whatever_its_keys() -> None:
    """The brace is part of the prompt, so a plain question still gets words; a wrong fact under any key is wrong."""
    begun = [sample for sample in taught(open_json, 200) if sample.given]
    assert len(begun) > 80
    for sample in begun:
        document = render(sample)
        assert document.prompt.endswith('</think>\n\n{"')
        rest = document.completion.removesuffix("<|im_end|>")
        assert Answer(sample, document.prompt, rest).right
        assert not Answer(sample, document.prompt, 'capital": "Atlantis"}').right


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("skill", [two_calls, parallel_calls])
def test_the_calls_reach_a_client(skill: Skill, think: bool) -> None:
    """The parsers that the server chooses for the model read every call, in order, with its arguments."""
    for sample in taught(skill, 60):
        sample.think = think
        spec = HermesTools().extend(
            Qwen3Reasoning().spec(DovetailTokenizer.load(MODEL_DIR), NoTemplate(), ParserRequest()), []
        )
        parser = FormatParser(spec)
        parser.prime(render(sample).prompt[-40:])
        reply = fold([*parser.feed((), completion(sample)), *parser.finish("stop")])
        assert sample.calls is not None
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [
            (call["name"], call["arguments"]) for call in sample.calls
        ]
        assert bool(reply.reasoning) == think


def test_calls_fit_the_offered_functions() -> None:
    """Different functions are called, each with arguments that its parameters allow."""
    for sample in taught(parallel_calls, 200):
        assert sample.tools is not None
        assert sample.calls is not None
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        assert len(offered) == len(sample.tools)
        assert len({call["name"] for call in sample.calls}) == len(sample.calls) > 1
        for call in sample.calls:
            jsonschema.validate(call["arguments"], offered[call["name"]])


def test_letters_are_counted_as_they_are_spelled() -> None:
    """The spelling in an answer is the word, and the count is that of the letter in it."""
    for sample in taught(letters, 400):
        marks = sample.thought.split("\n")[:-1]
        word = "".join(mark[0] for mark in marks)
        assert word in sample.ask
        found = re.search(r"letter (\w) appears (once|\d+ times) in (\w+)", sample.answer)
        wanted = found[1] if found else "aeiou"
        count = sum(letter in wanted for letter in word)
        assert [mark for mark in marks if " " in mark] == [
            f"{letter} {i}" for i, letter in enumerate((each for each in word if each in wanted), 1)
        ]
        if found:
            assert found[2] == ("once" if count == 1 else f"{count} times")
            assert found[3] == word
        if not sample.think:
            assert sample.answer.startswith(", ".join(marks) + ": ")


def _distance(first: str, second: str) -> int:
    """Counts the slips between two names: letters added, dropped, replaced or swapped."""
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def test_an_invented_name_is_no_misspelt_country() -> None:
    """Every invented name is at least two slips from every country, every alias and every capital."""
    rng = Random(8)
    real = {name.lower() for each in COUNTRIES for name in (each.bare, each.capital, *ALIASES.get(each.name, ()))}
    for _ in range(150):
        name = invented_name(rng).lower()
        assert all(_distance(name, other) > 1 for other in real if abs(len(other) - len(name)) < 2), name


def test_an_invented_country_gets_no_capital() -> None:
    """No answer about a name that is no country names a capital for it."""
    for sample in taught(invented_country, 300):
        if sample.answer.startswith("{"):
            assert json.loads(sample.answer)["capital"] is None
        else:
            assert sample.answer.startswith("I do not know a country named ")


def test_yes_and_no_follow_from_the_capital() -> None:
    """Half of the cities asked about are the capital; the verdict says whether, in the reasoning and in the answer."""
    capitals = {
        name: each.capital for each in COUNTRIES for name in (each.name, *ALIASES.get(each.name, ()), each.bare)
    }
    found = taught(capital_yes_no, 2000)
    for sample in found:
        name = sample.answer.removeprefix("The capital of ").split(" is ")[0]
        asked = sample.thought.removeprefix("The user asks about ").split(", and the capital of ")[0]
        assert asked in sample.ask
        assert name in sample.ask
        verdict = "yes." if asked == capitals[name] else "no."
        assert sample.answer.endswith(f"so {verdict}")
        assert sample.thought.endswith(verdict)
    assert 0.45 < sum(sample.answer.endswith("yes.") for sample in found) / len(found) < 0.56


def test_running_totals_add_up() -> None:
    """Each turn's sum is right and begins with the result of the turn before."""
    for sample in taught(running_total, 200):
        before = None
        answers = [turn["content"] for turn in sample.history if turn["role"] == "assistant"]
        for text in [*answers, sample.answer]:
            a, sign, b, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)\.", text).groups()  # type: ignore[union-attr]
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)
            assert before in (None, a)
            before = result


def test_own_words_are_quoted_exactly() -> None:
    """The user's questions and the model's answers come back word for word."""
    for sample in taught(own_words, 200):
        said = [turn["content"] for turn in sample.history]
        quoted = re.search(r'"(.*)"$', sample.answer)
        if quoted:
            assert quoted[1] == (said[0] if "first" in sample.answer else said[-2])
        else:
            assert sample.answer == said[-1]


def test_nothing_comes_before_a_conversation() -> None:
    """The dressing puts no other turns before a conversation whose beginning may be asked for."""
    rng = Random(2)
    for _ in range(300):
        sample = draw(rng, several_turns)
        turns = copy.deepcopy(sample.history)
        assert [turn for turn in dress(rng, sample, draw).history if turn["role"] != "system"] == turns


def test_greetings_are_answered_in_their_language() -> None:
    """No greeting stands in both languages, and each language has its own answers."""
    german, french = (
        {text.lower().strip(" !?.") for asks, _ in table for text in asks}
        for table in (greetings_module._GERMAN, greetings_module._FRENCH)
    )
    assert not german & french
    assert all("h" in sample.answer for sample in taught(greeting, 50) if sample.skill.endswith("German"))
    assert {sample.skill for sample in taught(greeting, 50)} == {"greetings in German", "greetings in French"}


def test_an_evaluation_that_runs_out_of_time_says_so() -> None:
    """Nothing is written after the deadline, and what has no answer is not counted as wrong."""
    tokenizer = _Words()
    assert answer(None, tokenizer, taught(letters, 3), until=0.0) == []


@pytest.mark.parametrize(("until", "answered"), [(9.0, 1), (11.0, 2)])
def test_an_answer_that_time_cuts_off_is_left_out(monkeypatch: pytest.MonkeyPatch, until: float, answered: int) -> None:
    """Of a batch that the deadline ends, only the answers that had ended count."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(monotonic=lambda: clock.now))
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left")
    ended, open_ = tokenizer("Yes.<|im_end|>").input_ids, tokenizer("Yes, and so on").input_ids[:2]
    width = max(len(ended), len(open_))

    def generate(input_ids: torch.Tensor, max_time: float, **_: Any) -> torch.Tensor:
        assert max_time == until
        clock.now = 10.0
        written = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in (ended, (open_ * width)[:width])]
        return torch.cat([input_ids, torch.tensor(written)], dim=1)

    model = SimpleNamespace(
        device="cpu", generate=generate, generation_config=SimpleNamespace(eos_token_id=[tokenizer.eos_token_id])
    )
    assert len(answer(model, tokenizer, taught(capital, 2), until=until)) == answered


class _Words:
    """A tokenizer that counts words."""

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": text.split()})


def test_the_evaluation_writes_json(tmp_path: Path) -> None:
    """Counts per skill and mode, and their sums, as JSON; the table says the same in percent."""
    samples = taught(spelling, 2)
    for sample in samples:
        sample.skill, sample.think = "spelling", False
    right = [Answer(sample, "", sample.answer) for sample in samples]
    wrong = [Answer(samples[0], "", "?"), right[1]]
    rows = rows_of(right, wrong)
    write_json(rows, 2, tmp_path / "counts.json")
    assert json.loads((tmp_path / "counts.json").read_text()) == {
        "asked": 2,
        "greedy": {"right": 2, "items": 2},
        "sampled": {"right": 1, "items": 2},
        "rows": [
            {
                "skill": "spelling",
                "thinking": False,
                "greedy": {"right": 2, "items": 2},
                "sampled": {"right": 1, "items": 2},
            }
        ],
    }
    assert table_of(rows).splitlines()[-1] == "| spelling | off | 2 | 100.0 | 50.0 |"
