"""Conversations of several turns whose last question leans on what was said before.

Each thread builds the turns in order and asks about them at the end: the subject changes while the question stays, the
question changes while the subject stays, a result is worked on, a list is asked about, or the user's own words are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Final

from demo_training.corpus.chat import PEOPLE, THINGS, made_up_word
from demo_training.corpus.definitions import DEFINITIONS
from demo_training.corpus.geography import COUNTRIES, WELL_KNOWN, Country
from demo_training.corpus.invented import denial, invented_name
from demo_training.corpus.sample import Message, Sample, capitalised, joined, key_of, pick, pick_skewed
from demo_training.corpus.structured import is_json

Turn = tuple[str, str]
"""What the user says and what the model answers."""

SKILL: Final = "follow-ups over several turns"
_TAUGHT: Final = [country for country in COUNTRIES if country.language and country.currency]
_ORDER: Final = ("first", "second", "third", "fourth", "fifth")
_SUBJECT: Final = {
    "capital": ("What is the capital of {c}?", "Which city is the capital of {c}?", "Tell me the capital of {c}."),
    "continent": ("Which continent is {c} in?", "On which continent is {c}?", "Where is {c}?"),
    "language": (
        "What language do people speak in {c}?",
        "Which language is spoken in {c}?",
        "What do they speak in {c}?",
    ),
    "currency": ("What is the currency of {c}?", "What currency does {c} use?", "What currency is used in {c}?"),
}
_SAME_SUBJECT: Final = {
    "capital": ("And its capital?", "What is its capital?", "What is the capital there?", "And the capital?"),
    "continent": ("Which continent is it on?", "And the continent?", "Where is it?", "Which continent is that on?"),
    "language": (
        "What do they speak there?",
        "And the language?",
        "Which language is spoken there?",
        "What language do they speak?",
    ),
    "currency": (
        "And the currency?",
        "What do they pay with?",
        "What is its currency?",
        "Which currency do they use there?",
    ),
}
_SAME_QUESTION: Final = (
    "And {c}?", "What about {c}?", "How about {c}?", "Now {c}.", "The same for {c}, please.", "And for {c}?", "Next: {c}.",
)  # fmt: skip


def _sample(turns: list[Turn], thought: str, *keys: str) -> Sample:
    """Makes the last of the turns the one to answer."""
    history: list[Message] = []
    for ask, answer in turns[:-1]:
        history += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    ask, answer = turns[-1]
    return Sample(
        SKILL, ask, answer, thought, keys=keys, history=history, expect=(answer,), can_raw=False, can_follow=False,
        plain=True,
    )  # fmt: skip


def _said(country: Country, kind: str) -> str:
    """Answers a question of a kind about a country."""
    return {
        "capital": f"The capital of {country.name} is {country.capital}.",
        "continent": f"{capitalised(country.name)} is in {country.continent}.",
        "language": f"People in {country.name} speak {country.language}.",
        "currency": f"The currency of {country.name} is the {country.currency}.",
    }[kind]


def countries(rng: Random) -> Sample:
    """The country changes, or the question does; at the end the first one may be meant again."""
    country, kind = pick(rng, _TAUGHT), pick(rng, tuple(_SUBJECT))
    turns = [(pick(rng, _SUBJECT[kind]).format(c=country.name), _said(country, kind))]
    seen = [country]
    key = ""
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            country = pick(rng, _TAUGHT)
            seen.append(country)
            form = pick(rng, _SAME_QUESTION)
            ask = form.format(c=country.name)
        else:
            kind = pick(rng, [other for other in _SUBJECT if other != kind])
            form = ask = pick(rng, _SAME_SUBJECT[kind])
        key = key_of("turns", country.name, kind, form)
        turns.append((ask, _said(country, kind)))
    thought = f"The question is about the {kind} of {country.name}."
    if rng.random() < 0.1:
        name = invented_name(rng)
        turns.append((pick(rng, _SAME_QUESTION).format(c=name), denial(name)))
        return _sample(turns, f"I was not taught about {name}.", key_of("invented", name))
    if len(seen) > 1 and rng.random() < 0.2:
        names = [each.name for each in dict.fromkeys(seen)]
        if rng.random() < 0.5:
            ask = pick(rng, ("Which countries did I ask about?", "Which countries did we talk about?"))
            turns.append((ask, f"You asked about {joined(names)}."))
            thought, key = "I will look at what the user asked.", key_of("recap", *names)
        else:
            ask = pick(rng, ("And the first country that I asked about?", "And the same for the first country?"))
            turns.append((ask, _said(seen[0], kind)))
            thought, key = f"The first country was {seen[0].name}.", key_of("turns", seen[0].name, kind, ask)
    return _sample(turns, thought, key)


def running_total(rng: Random) -> Sample:
    """Each turn goes on with the last result: 'Add 7.', 'Double it.'."""
    value, first = rng.randint(1, 60), rng.randint(1, 60)
    turns = [(pick(rng, ("What is {a} + {b}?", "{a} + {b}?", "Add {a} and {b}.")).format(a=value, b=first), "")]
    turns[0] = (turns[0][0], f"{value} + {first} = {value + first}.")
    value += first
    keys: list[str] = []
    for _ in range(rng.randint(1, 4)):
        operand = rng.randint(2, 60)
        kind = rng.random()
        if kind < 0.45 or value < 3:
            ask, sign, result = (
                pick(rng, ("Add {n}.", "Now add {n}.", "Plus {n}?", "And {n} more?", "Add {n} to that.")),
                "+",
                value + operand,
            )
        elif kind < 0.8:
            operand = rng.randint(1, min(60, value))
            forms = ("Take away {n}.", "Subtract {n}.", "Minus {n}?", "Now take {n} away.", "Subtract {n} from that.")
            ask, sign, result = pick(rng, forms), "-", value - operand
        else:
            operand = 2
            ask, sign, result = pick(rng, ("Double it.", "Times 2?", "Now double that.", "Twice that?")), "*", value * 2
            if result > 500:
                ask, sign, result = "Add {n}.", "+", value + 2
        keys = [key_of("total", value, sign, operand)]
        turns.append((ask.format(n=operand), f"{value} {sign} {operand} = {result}."))
        value = result
    return _sample(turns, f"The last result was {turns[-1][1].split(' ')[0]}.", *keys)


def _about_user(rng: Random, kind: str) -> tuple[str, str, str]:
    """Makes up a fact about the user: how it is said, how it is said back, and a key."""
    if kind == "name":
        name = pick(rng, PEOPLE) if rng.random() < 0.5 else made_up_word(rng)
        return pick(rng, ("My name is {v}.", "I am {v}.", "Call me {v}.")).format(v=name), f"your name is {name}", name
    value = pick(rng, THINGS[kind])
    if kind == "job":
        return f"I work as a {value}.", f"you work as a {value}", value
    return f"My {kind} is {value}.", f"your {kind} is {value}", value


def about_the_user(rng: Random) -> Sample:
    """Several facts told in several turns, one of them perhaps corrected, and asked for at the end."""
    kinds = rng.sample(["name", *THINGS], rng.randint(2, 4))
    known: dict[str, tuple[str, str]] = {}
    turns: list[Turn] = []
    for kind in kinds:
        said, back, value = _about_user(rng, kind)
        known[kind] = (back, value)
        turns.append((said, f"Nice to meet you, {value}!" if kind == "name" else "Thank you for telling me."))
        if rng.random() < 0.25:
            country = pick_skewed(rng, COUNTRIES, 1.2)
            turns.append((f"What is the capital of {country.name}?", _said(country, "capital")))
    if rng.random() < 0.3:
        kind = pick(rng, kinds)
        said, back, value = _about_user(rng, kind)
        known[kind] = (back, value)
        turns.append((f"Sorry, that was wrong. {said}", "I will remember that."))
    if rng.random() < 0.25:
        ask = pick(rng, ("What do you know about me?", "What did I tell you about myself?", "Sum up what I told you."))
        turns.append((ask, capitalised(joined([back for back, _ in known.values()])) + "."))
        return _sample(
            turns, "I will say what the user told me.", key_of("told", *sorted(value for _, value in known.values()))
        )
    kind = pick(rng, kinds)
    ask = {"name": "What is my name?", "job": "What is my job?"}.get(kind, f"What is my {kind}?")
    back, value = known[kind]
    turns.append((ask, f"{capitalised(back)}."))
    others = sorted(value for other, (_, value) in known.items() if other != kind)
    return _sample(turns, f"The user told me that {back}.", key_of("told", ask, value, *others))


def _as_json(country: Country, keys: list[str]) -> str:
    """Writes the named facts about a country as JSON."""
    facts = {"country": country.bare, "name": country.bare, "capital": country.capital, "continent": country.continent}
    return json.dumps({key: facts[key] for key in keys}, ensure_ascii=False)


def json_changes(rng: Random) -> Sample:
    """JSON that is asked for again with another country, one more key or one less, or in words."""
    country = pick(rng, COUNTRIES)
    keys = [pick(rng, ("country", "country", "name")), "capital"]
    ask = (
        "Give the capital of {c} as JSON."
        if keys[0] == "country"
        else "Tell me about {c}. Answer in JSON with keys name and capital."
    )
    turns = [(ask.format(c=country.name), _as_json(country, keys))]
    form = ""
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.45:
            country = pick(rng, COUNTRIES)
            form = pick(rng, ("And for {c}?", "Now for {c}.", "The same for {c}, please.", "And {c}?"))
        elif kind < 0.75 and "continent" not in keys:
            keys = [*keys, "continent"]
            form = pick(
                rng,
                ("Add the continent.", "Now with the continent.", "Add the key continent.", "Include the continent."),
            )
        elif len(keys) > 1:
            gone = pick(rng, keys)
            keys = [key for key in keys if key != gone]
            form = pick(rng, ("Leave out the {k}.", "Without the {k}, please.", "Remove the key {k}.")).format(
                k=gone, c="{c}"
            )
        else:
            country = pick(rng, COUNTRIES)
            form = "And for {c}?"
        turns.append((form.format(c=country.name), _as_json(country, keys)))
    key = key_of("turns-json", country.name, form, *keys)
    thought = f"I need JSON with {joined(keys)} for {country.name}."
    if rng.random() < 0.15:
        ask = pick(rng, ("Now in a sentence.", "As plain text, please.", "Say that in words."))
        turns.append((ask, _said(country, "capital")))
        return _sample(turns, "I will say it in words.", key_of("turns-words", country.name, ask))
    sample = _sample(turns, thought, key)
    sample.check, sample.expect, sample.can_tools = is_json(json.loads(sample.answer)), (), False
    return sample


def _lines(chosen: list[Country]) -> str:
    """Lists countries with their capitals."""
    return "\n".join(f"{i}. {capitalised(country.bare)} - {country.capital}" for i, country in enumerate(chosen, 1))


def list_questions(rng: Random) -> Sample:
    """A list, then a question about one of its lines, another line, or only a part of it."""
    count = rng.randint(2, 5)
    chosen = WELL_KNOWN[:count] if rng.random() < 0.3 else rng.sample(COUNTRIES, count)
    ask = pick(rng, ("List {n} countries and their capitals.", "Name {n} countries and their capitals."))
    turns = [(ask.format(n=count), _lines(list(chosen)))]
    names = [country.name for country in chosen]
    if rng.random() < 0.3:
        extra = pick(rng, [country for country in COUNTRIES if country not in chosen])
        turns.append((f"Add {extra.name}.", _lines([*chosen, extra])))
        chosen = [*chosen, extra]
        if rng.random() < 0.3:
            return _sample(turns, f"The list goes on with {extra.name}.", key_of("list-add", extra.name, *names))
    kind = rng.random()
    at = rng.randrange(len(chosen))
    country = chosen[at]
    if kind < 0.5:
        word = "last" if at == len(chosen) - 1 and rng.random() < 0.6 else _ORDER[min(at, 4)] if at < 5 else "last"
        ask = pick(
            rng, ("What was the {w} one?", "Which was the {w} one?", "Repeat the {w} line.", "And the {w} one again?")
        ).format(w=word)
        line = f"The {word} one was {country.name}, with the capital {country.capital}."
        turns.append((ask, line))
    elif kind < 0.75:
        ask = pick(rng, ("Only the capitals, please.", "Now only the capitals.", "Just the capitals."))
        turns.append((ask, ", ".join(each.capital for each in chosen)))
    else:
        ask = pick(rng, ("Only the countries, please.", "Now only the countries.", "Just the countries."))
        turns.append((ask, ", ".join(capitalised(each.bare) for each in chosen)))
    return _sample(turns, "I will look at the list.", key_of("list-ask", ask, *names))


def own_words(rng: Random) -> Sample:
    """What the user asked first or last, or what the model answered, word for word."""
    turns: list[Turn] = []
    for _ in range(rng.randint(2, 4)):
        if rng.random() < 0.5:
            country = pick(rng, COUNTRIES)
            turns.append((f"What is the capital of {country.name}?", _said(country, "capital")))
        elif rng.random() < 0.5:
            term = pick(rng, tuple(DEFINITIONS))
            turns.append((f"What is {term}?", DEFINITIONS[term]))
        else:
            a, b = rng.randint(1, 60), rng.randint(1, 60)
            turns.append((f"What is {a} + {b}?", f"{a} + {b} = {a + b}."))
    kind = rng.random()
    first, last = turns[0], turns[-1]
    if kind < 0.4:
        ask = pick(
            rng, ("What was my first question?", "What did I ask first?", "What did I ask you at the beginning?")
        )
        answer = f'Your first question was: "{first[0]}"'
    elif kind < 0.7:
        ask = pick(rng, ("What was my last question?", "What did I just ask?", "What did I ask before this?"))
        answer = f'Your last question was: "{last[0]}"'
    else:
        ask = pick(
            rng,
            ("Say that again.", "Please repeat your last answer.", "Can you repeat that?", "What did you just say?"),
        )
        answer = last[1]
    turns.append((ask, answer))
    return _sample(turns, "I will look at what was said.", key_of("own-words", ask, answer))


THREADS: Final[tuple[Callable[[Random], Sample], ...]] = (
    countries, countries, countries, running_total, about_the_user, json_changes, list_questions, own_words,
)  # fmt: skip


def several_turns(rng: Random) -> Sample:
    """One of the threads."""
    return pick(rng, THREADS)(rng)
