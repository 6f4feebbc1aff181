"""The mixture of skills, the stream of training documents, and the held-out samples."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

from demo_training.corpus import (
    arithmetic,
    basics,
    capitals,
    chat,
    comparison,
    definitions,
    greetings,
    history,
    invented,
    jokes,
    nested,
    parallel,
    spelling,
    stories,
    structured,
    tools,
    turns,
)
from demo_training.corpus import documented as documented_lines
from demo_training.corpus.dressing import dress
from demo_training.corpus.render import Document, render
from demo_training.corpus.sample import Sample, Skill

WEIGHTS: Final[dict[Skill, float]] = {
    capitals.capital: 8,
    capitals.capital_back: 5,
    capitals.capital_yes_no: 12,
    capitals.continent: 2.5,
    capitals.language_or_currency: 2,
    capitals.about_country: 2,
    capitals.capital_raw: 4,
    capitals.country_facts_raw: 1,
    capitals.capital_list: 3,
    capitals.name_list: 1,
    capitals.inhabitants: 0.8,
    capitals.unknown_fact: 1,
    capitals.group_of_capitals: 2,
    capitals.capital_follow_up: 1.5,
    capitals.capital_then_fact: 0.8,
    invented.invented_country: 5.5,
    invented.is_a_country: 1.2,
    invented.invented_capital: 1.2,
    invented.invented_among_real: 1.5,
    comparison.compare: 10,
    arithmetic.addition: 6,
    arithmetic.subtraction: 9,
    arithmetic.multiplication: 8,
    arithmetic.division: 1.5,
    arithmetic.power: 4,
    arithmetic.word_problem: 2,
    arithmetic.counting: 2.5,
    arithmetic.extremes: 2.5,
    history.period_summary: 1,
    history.period_deeds: 1.5,
    history.period_question: 1.5,
    definitions.definition: 5,
    definitions.definition_raw: 0.7,
    jokes.joke: 1.5,
    chat.small_talk: 2.5,
    chat.say: 3,
    chat.unknown: 2,
    chat.outside: 2.5,
    chat.remember: 2,
    chat.noise: 0.7,
    greetings.greeting: 2,
    turns.several_turns: 8,
    basics.opposite: 1,
    basics.calendar: 0.8,
    basics.fact: 2.5,
    basics.verse: 0.8,
    basics.needle: 2,
    basics.translation: 1.5,
    spelling.letters: 5,
    spelling.spelling: 3.5,
    structured.capital_json: 3,
    structured.country_json: 4,
    structured.list_json: 0.6,
    structured.extraction: 3,
    structured.person_json: 0.4,
    structured.sentiment: 1,
    structured.email_or_sql: 1,
    nested.nested_facts: 4,
    nested.nested_extraction: 4,
    nested.open_json: 2,
    tools.tool_call: 8,
    tools.two_calls: 2,
    tools.call_again: 1,
    tools.tool_result: 4,
    tools.two_results: 0.7,
    parallel.parallel_calls: 4,
    parallel.parallel_results: 1.5,
    stories.story_short: 2,
    stories.story_long: 2.5,
    documented_lines.documented: 4,
}
"""How often each skill is drawn, relative to the others."""

_SKILLS: Final = tuple(WEIGHTS)
_CUMULATIVE: Final = [sum(list(WEIGHTS.values())[: i + 1]) for i in range(len(WEIGHTS))]


def _polish(sample: Sample) -> Sample:
    """Mends the doubled full stop after a capital that ends in one."""
    sample.answer = sample.answer.replace("D.C..", "D.C.")
    sample.expect = tuple(text.replace("D.C..", "D.C.") for text in sample.expect)
    return sample


def draw(rng: Random, skill: Skill | None = None, held_out: bool = False) -> Sample:
    """Draws a sample of the wanted split, of a random skill unless one is given.

    Raises:
        LookupError: The skill has no sample in the split.
    """
    for _ in range(5000):
        sample = (skill or rng.choices(_SKILLS, cum_weights=_CUMULATIVE)[0])(rng)
        if sample.held_out == held_out:
            return _polish(sample)
    raise LookupError(f"no {'held-out' if held_out else 'training'} sample of {skill}")


def samples(seed: int, count: int) -> Iterator[Sample]:
    """Yields `count` dressed training samples; the same seed gives the same samples."""
    rng = Random(seed)
    for _ in range(count):
        yield dress(rng, draw(rng), draw)


def documents(seed: int, count: int) -> Iterator[Document]:
    """Yields `count` rendered training documents; the same seed gives the same documents."""
    for sample in samples(seed, count):
        yield render(sample)


def held_out_samples(skill: Skill, count: int, seed: int = 0) -> list[Sample]:
    """Returns up to `count` different held-out samples of `skill`, undressed, half of them with thinking on."""
    rng = Random(seed)
    found: dict[str, Sample] = {}
    for i in range(count * 3):
        try:
            sample = draw(rng, skill, held_out=True)
        except LookupError:
            break
        if sample.think is None:
            sample.think = bool(sample.thought) and not sample.raw and i % 2 == 1
        found.setdefault(f"{sample.history}{sample.ask}{sample.after}{sample.think}", sample)
        if len(found) == count:
            break
    return list(found.values())
