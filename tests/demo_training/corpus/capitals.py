"""Capitals both ways, continents, languages, currencies, and lists of countries."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from demo_training.corpus.chat import UNKNOWN
from demo_training.corpus.geography import ALIASES, COUNTRIES, WELL_KNOWN, Country
from demo_training.corpus.sample import Sample, capitalised, joined, key_of, pick, pick_skewed

ASK: Final = (
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "Which city is the capital of {c}?",
    "What is the capital city of {c}?",
    "Tell me the capital of {c}.",
    "Name the capital of {c}.",
    "Do you know the capital of {c}?",
    "Can you tell me what the capital of {c} is?",
    "Capital of {c}?",
    "{c} capital?",
    "I forgot the capital of {c}. What is it?",
    "What city serves as the capital of {c}?",
    "Which city is {c}'s capital?",
    "What is {c}'s capital?",
    "I am learning geography. What is the capital of {c}?",
    "Give me the capital of {c}.",
    "Give me the information of the capital of {c}.",
    "Give me information about the capital of {c}.",
    "Where is the government of {c} based?",
    "If I fly to the capital of {c}, which city do I land in?",
    "My teacher asked me for the capital of {c}. What should I say?",
    "what is the name of the capital of {c}",
    "capital city of {c}",
)
ASK_SHORT: Final = (
    "What is the capital of {c}? Answer with one word.",
    "What is the capital of {c}? Reply with the name only.",
    "Capital of {c}? Just the city name.",
    "In one word, what is the capital of {c}?",
    "Answer with only the city: what is the capital of {c}?",
    "Name the capital of {c}. No other words.",
)
_ASK_BACK: Final = (
    "Which country has {k} as its capital?",
    "{k} is the capital of which country?",
    "What country is {k} the capital of?",
    "{k} is the capital city of what country?",
    "Which country's capital is {k}?",
    "Tell me which country has the capital {k}.",
    "The capital is {k}. Which country is it?",
    "Of which country is {k} the capital?",
)
ASK_CONTINENT: Final = (
    "Which continent is {c} in?",
    "On which continent is {c}?",
    "What continent does {c} belong to?",
    "Where is {c}?",
    "Where in the world is {c}?",
    "In which part of the world is {c}?",
)
ASK_LANGUAGE: Final = (
    "What language do people speak in {c}?",
    "Which language is spoken in {c}?",
    "What is the main language of {c}?",
    "What do they speak in {c}?",
)
ASK_CURRENCY: Final = (
    "What currency is used in {c}?",
    "What is the currency of {c}?",
    "Which money do people pay with in {c}?",
    "What currency does {c} use?",
)
ASK_ABOUT: Final = ("Tell me about {c}.", "What do you know about {c}?", "Give me some facts about {c}.")
_RAW: Final = (
    "The capital of {c} is",
    "The capital city of {c} is",
    "{c}'s capital is",
    "The capital of {c} is the city of",
    "In {c}, the capital is",
    "Q: What is the capital of {c}?\nA:",
    "Question: What is the capital of {c}?\nAnswer:",
    "Everyone knows that the capital of {c} is",
    "Provide a concise factual statement about {c}'s capital city. The capital of {c} is",
)
_LIST_ASK: Final = (
    "List {n} countries and their capitals.",
    "List {n} countries with their capitals.",
    "Name {n} countries and their capitals.",
    "Give me {n} countries and their capital cities.",
    "Can you list {n} countries and their capitals?",
    "Write a list of {n} countries and their capitals.",
    "Tell me {n} countries and the capital of each.",
    "I need {n} countries with their capitals.",
    "{n} countries and their capitals, please.",
)
_NOT_TAUGHT: Final = (
    "Who is the president of {c}?", "How many people live in {c}?", "What is the population of {c}?", "Who rules {c}?",
    "What is the national dish of {c}?", "What does the flag of {c} look like?", "How large is {c}?", "Is {c} safe?",
    "Which rivers flow through {c}?", "What is the second largest city of {c}?", "Who is the king of {c}?",
    "What is the highest mountain in {c}?", "When was {c} founded?", "What is the anthem of {c}?",
)  # fmt: skip
_WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _country(rng: Random) -> tuple[Country, str]:
    """Draws a country and the name to call it by."""
    country = pick_skewed(rng, COUNTRIES, 1.15)
    if country.name in ALIASES and rng.random() < 0.3:
        return country, pick(rng, ALIASES[country.name])
    if rng.random() < 0.03:
        return country, country.bare
    return country, country.name


def capital(rng: Random) -> Sample:
    """'What is the capital of X?' in many wordings."""
    country, name = _country(rng)
    short = rng.random() < 0.12
    ask = pick(rng, ASK_SHORT) if short else pick_skewed(rng, ASK, 1.4)
    answer = country.capital if short else f"The capital of {name} is {country.capital}."
    if "information" in ask:
        answer = f"{country.capital} is the capital of {name}."
    return Sample(
        "capital",
        capitalised(ask.format(c=name)),
        answer,
        f"The user asks for the capital of {name}. It is {country.capital}.",
        keys=(key_of("capital", country.name, ask),),
        expect=(country.capital,),
    )


def capital_back(rng: Random) -> Sample:
    """'Which country has the capital X?' in many wordings."""
    country = pick_skewed(rng, COUNTRIES, 1.15)
    ask = pick(rng, _ASK_BACK)
    return Sample(
        "capital, reverse",
        ask.format(k=country.capital),
        f"{country.capital} is the capital of {country.name}.",
        f"{country.capital} is the capital of {country.name}.",
        keys=(key_of("back", country.name, ask),),
        expect=(country.bare,),
    )


def capital_yes_no(rng: Random) -> Sample:
    """'Is X the capital of Y?', true half of the time; the verdict stands after the capital that decides it."""
    country, name = _country(rng)
    ask = pick(rng, ("Is {k} the capital of {c}?", "Is the capital of {c} {k}?", "{k} is the capital of {c}, right?"))
    true = rng.random() < 0.5
    city = country.capital if true else pick_skewed(rng, COUNTRIES, 1.15).capital
    true = city == country.capital
    verdict = "so yes." if true else f"not {city}, so no."
    answer = f"The capital of {name} is {country.capital}, {verdict}"
    found = "the same city, so the answer is yes." if true else "another city, so the answer is no."
    return Sample(
        "capital, yes or no",
        ask.format(c=name, k=city),
        answer,
        f"The user asks about {city}, and the capital of {name} is {country.capital}: {found}",
        keys=(key_of("yesno", country.name, city, ask),),
        expect=(answer,),
    )


def continent(rng: Random) -> Sample:
    """Where a country, or its capital, lies."""
    country, name = _country(rng)
    ask = pick(rng, ASK_CONTINENT)
    key = (key_of("continent", country.name, ask),)
    if rng.random() < 0.25:
        question = f"Where is {country.capital}?"
        answer = f"{country.capital} is in {country.name}, in {country.continent}."
        return Sample("continent", question, answer, answer, keys=(key_of("where", country.name),), expect=(answer,))
    answer = f"{capitalised(name)} is in {country.continent}."
    return Sample("continent", ask.format(c=name), answer, answer, keys=key, expect=(country.continent,))


def language_or_currency(rng: Random) -> Sample:
    """What a country speaks or pays with, for those where it is taught."""
    speaks = rng.random() < 0.5
    country = pick(rng, [c for c in COUNTRIES if (c.language if speaks else c.currency)])
    ask = pick(rng, ASK_LANGUAGE if speaks else ASK_CURRENCY)
    if speaks:
        answer, fact = f"People in {country.name} speak {country.language}.", country.language
    else:
        answer, fact = f"The currency of {country.name} is the {country.currency}.", country.currency
    key = key_of("speaks" if speaks else "pays", country.name, ask)
    return Sample("language and currency", ask.format(c=country.name), answer, answer, keys=(key,), expect=(fact,))


def about_country(rng: Random) -> Sample:
    """'Tell me about X' for a country or its capital."""
    country, name = _country(rng)
    ask = pick(rng, ASK_ABOUT)
    parts = [f"{capitalised(name)} is a country in {country.continent}.", f"Its capital is {country.capital}."]
    if country.language:
        parts.append(f"People there speak {country.language}.")
    if country.currency:
        parts.append(f"The currency is the {country.currency}.")
    if rng.random() < 0.3:
        answer = f"{country.capital} is the capital of {country.name}, a country in {country.continent}."
        return Sample("about a country", ask.format(c=country.capital), answer, answer, expect=(country.bare,))
    return Sample(
        "about a country",
        ask.format(c=name),
        " ".join(parts),
        f"I recall that {name} is in {country.continent} and that its capital is {country.capital}.",
        keys=(key_of("about", country.name, ask),),
        expect=(country.continent, country.capital),
    )


def capital_raw(rng: Random) -> Sample:
    """A raw completion that starts a sentence about a capital."""
    country, name = _country(rng)
    start = pick_skewed(rng, _RAW, 1.5)
    more = (
        f" It is a city in {country.continent}.",
        f" {capitalised(name)} is a country in {country.continent}.",
        f" The city lies in {country.continent}, and it is where the government of {name} meets.",
    )
    tail = pick(rng, more) if start.startswith("The") else ""
    return Sample(
        "capital, raw completion",
        capitalised(start.format(c=name)),
        f" {country.capital}.{tail}",
        keys=(key_of("capital-raw", country.name, start),),
        raw=True,
        expect=(country.capital,),
    )


def country_facts_raw(rng: Random) -> Sample:
    """A stretch of raw text with facts about a few countries."""
    parts: list[str] = []
    for country in rng.sample(COUNTRIES, rng.randint(2, 5)):
        parts.append(
            pick(
                rng,
                (
                    f"The capital of {country.name} is {country.capital}.",
                    f"{country.capital} is the capital of {country.name}.",
                    f"{capitalised(country.name)} is a country in {country.continent}.",
                    f"{country.capital}, the capital of {country.name}, is in {country.continent}.",
                ),
            )
        )
    return Sample("facts", parts[0], "".join(f" {part}" for part in parts[1:]), raw=True)


def _ring(rng: Random, count: int) -> list[Country]:
    """Returns `count` different countries in the order in which a list names them."""
    start = 0 if rng.random() < 0.85 else rng.randrange(len(WELL_KNOWN))
    return [WELL_KNOWN[(start + i) % len(WELL_KNOWN)] for i in range(count)]


def is_capital_list(count: int, continent: str = "") -> Callable[[str], bool]:
    """Returns a rule: the text names `count` different countries, each with its own capital on its line."""

    def check(text: str) -> bool:
        found = set()
        lines = [line for line in text.strip().splitlines() if line[:1].isdigit()]
        for line in lines:
            for country in COUNTRIES:
                if country.bare in line and line.rstrip(".").endswith(country.capital.rstrip(".")):
                    if continent and country.continent != continent:
                        return False
                    found.add(country.name)
        return len(lines) == count == len(found)

    return check


def capital_list(rng: Random) -> Sample:
    """'List 3 countries and their capitals.', also within one continent."""
    count = rng.randint(2, 10) if rng.random() < 0.6 else 3
    ask = pick(rng, _LIST_ASK)
    where = ""
    if rng.random() < 0.25:
        count = min(count, 5)
        where = pick(rng, ("Europe", "Asia", "Africa", "South America", "North America"))
        ring = [country for country in COUNTRIES if country.continent == where][:8]
        start = 0 if rng.random() < 0.7 else rng.randrange(len(ring))
        chosen = [ring[(start + i) % len(ring)] for i in range(count)]
        ask = ask.replace("countries", f"countries in {where}")
    else:
        chosen = _ring(rng, count)
    number = _WORDS[count] if rng.random() < 0.3 else str(count)
    question = capitalised(ask.format(n=number))
    lines = [f"{i}. {capitalised(country.bare)} - {country.capital}" for i, country in enumerate(chosen, 1)]
    raw = rng.random() < 0.3
    return Sample(
        "list of capitals",
        question,
        ("\n" if raw else "") + "\n".join(lines),
        f"The user wants {count} countries{' in ' + where if where else ''}. I will give one per line.",
        keys=(key_of("list", ask, count, number),),
        raw=raw,
        think=None,
        check=is_capital_list(count, where),
    )


def name_list(rng: Random) -> Sample:
    """A list of countries alone, or of capitals alone."""
    count = rng.randint(2, 8)
    number = _WORDS[count] if rng.random() < 0.3 else str(count)
    cities = rng.random() < 0.4
    noun = pick(rng, ("capitals", "capital cities")) if cities else "countries"
    ask = pick(rng, ("List {n} {x}.", "Name {n} {x}.", "Give me {n} {x}.", "Tell me {n} {x}.", "Can you name {n} {x}?"))
    names = [country.capital if cities else capitalised(country.bare) for country in _ring(rng, count)]
    raw = rng.random() < 0.2
    return Sample(
        "list of countries or capitals",
        ask.format(n=number, x=noun),
        ("\n" if raw else "") + "\n".join(f"{i}. {name}" for i, name in enumerate(names, 1)),
        f"The user wants {count} {noun}. I will give one per line.",
        keys=(key_of("names", ask, count, noun),),
        raw=raw,
        check=lambda text: len(set(text.strip().splitlines())) == count and text.strip().startswith("1. "),
    )


def inhabitants(rng: Random) -> Sample:
    """How many people live in a capital, where it is taught, in round numbers."""
    country = pick(rng, [c for c in COUNTRIES if c.people])
    ask = pick(
        rng, ("How many people live in {k}?", "What is the population of {k}?", "How big is {k}?", "Population of {k}?")
    )
    answer = f"About {country.people} people live in {country.capital}."
    return Sample(
        "inhabitants", ask.format(k=country.capital), answer, answer, keys=(key_of("people", country.name, ask),),
        expect=(answer,), can_tools=False,
    )  # fmt: skip


def unknown_fact(rng: Random) -> Sample:
    """Questions about countries whose answers are not taught."""
    _, name = _country(rng)
    ask = pick(rng, _NOT_TAUGHT)
    return Sample(
        "does not know",
        ask.format(c=name),
        pick(rng, UNKNOWN),
        "I was not taught this, so I should say that I do not know.",
        keys=(key_of("not-taught", name, ask),),
        expect=("not know",),
    )


def group_of_capitals(rng: Random) -> Sample:
    """Several capitals asked for at once."""
    chosen = rng.sample(COUNTRIES[:80], rng.randint(2, 4))
    names = [country.name for country in chosen]
    listed = joined(names)
    ask = pick(rng, ("What are the capitals of {c}?", "Name the capitals of {c}.", "Tell me the capitals of {c}."))
    if len(names) == 2 and rng.random() < 0.5:
        listed = pick(
            rng, (f"{names[0]}? And of {names[1]}?", f"{names[0]} and of {names[1]}?", f"{names[0]} and {names[1]}?")
        )
        ask = pick(rng, ("What is the capital of {c}", "What's the capital of {c}"))
    pairs = [f"the capital of {country.name} is {country.capital}" for country in chosen]
    answer = capitalised(", ".join(pairs[:-1]) + ", and " + pairs[-1] + ".")
    return Sample(
        "several capitals",
        ask.format(c=listed),
        answer,
        f"I need the capitals of {joined(names)}.",
        keys=(key_of("group", *sorted(names)),),
        expect=tuple(country.capital for country in chosen),
    )


def capital_follow_up(rng: Random) -> Sample:
    """A second question that leans on the first: 'And of Y?'."""
    (first, name), (second, other) = _country(rng), _country(rng)
    ask = pick(rng, ("And {c}?", "And of {c}?", "What about {c}?", "How about {c}?", "And the capital of {c}?"))
    return Sample(
        "capital, follow-up",
        ask.format(c=other),
        f"The capital of {other} is {second.capital}.",
        f"The user now asks for the capital of {other}. It is {second.capital}.",
        keys=(key_of("follow", second.name, ask),),
        history=[
            {"role": "user", "content": f"What is the capital of {name}?"},
            {"role": "assistant", "content": f"The capital of {name} is {first.capital}."},
        ],
        expect=(second.capital,),
        can_raw=False,
    )


def capital_then_fact(rng: Random) -> Sample:
    """A question about a capital, then one about 'it' or 'that country'."""
    country, name = _country(rng)
    history = [
        {"role": "user", "content": f"What is the capital of {name}?"},
        {"role": "assistant", "content": f"The capital of {name} is {country.capital}."},
    ]
    if rng.random() < 0.5 and country.language:
        ask, answer = "What language do they speak there?", f"People in {country.name} speak {country.language}."
        fact = country.language
    else:
        ask, answer = "Which continent is that on?", f"{capitalised(country.name)} is in {country.continent}."
        fact = country.continent
    key = (key_of("then", country.name, ask),)
    return Sample("capital, follow-up", ask, answer, answer, keys=key, history=history, expect=(fact,), can_raw=False)
