"""Names that are no country: made up, half real, or of another kind of place. None gets an invented capital.

The list of countries is closed and short, that of other names is endless: so the names here are drawn from several
generators, near to real names and far from them, and each name is held out or taught as a whole.
"""

from __future__ import annotations

import json
from random import Random
from typing import Final

from demo_training.corpus.capitals import ASK, ASK_ABOUT, ASK_CONTINENT, ASK_CURRENCY, ASK_LANGUAGE, ASK_SHORT
from demo_training.corpus.chat import made_up_word
from demo_training.corpus.geography import ALIASES, CITIES, COUNTRIES
from demo_training.corpus.sample import Sample, capitalised, joined, key_of, pick, pick_skewed, words
from demo_training.corpus.structured import CAPITAL_ASK, is_json

_OTHER_PLACES: Final = (
    "Texas", "California", "Florida", "Bavaria", "Ontario", "Quebec", "Sicily", "Tuscany", "Catalonia", "Brittany",
    "Atlantis", "Narnia", "Mars", "the Moon", "Antarctica", "Africa", "Europe", "Asia", "Wonderland", "Gondor", "Utopia",
    "Alaska", "Hawaii", "Siberia", "Puerto Rico", "Tibet", "Crete", "Corsica", "Neverland", "Mordor", "Wakanda", "Hogwarts",
    "New South Wales", "Nova Scotia", "Patagonia", "Transylvania", "Lapland", "Saxony", "Normandy", "Ohio", "Oregon",
    "Elbonia", "Ruritania", "Genovia", "Freedonia", "Sokovia", "Latveria", "Zamunda", "Westeros", "Oz", "El Dorado",
    "Middle-earth", "the Shire", "Lilliput", "Venus", "Jupiter", "Yorkshire", "Andalusia", "Burgundy", "Hokkaido", "Punjab",
    "Flanders", "Wallonia", "Alberta", "Queensland", "Tasmania", "Georgia Tech", "Virginia", "Nevada", "Utah", "Kansas",
)  # fmt: skip
_REAL: Final = frozenset(
    name.lower()
    for country in COUNTRIES
    for name in (country.name, country.bare, country.capital, *ALIASES.get(country.name, ()))
)
_STEMS: Final = [country.bare for country in COUNTRIES if country.bare.isalpha() and len(country.bare) > 4]
_TOWNS: Final = [city for city in CITIES if not any(city.lower() in name for name in _REAL)]
_STARTS: Final = words(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sk sl st t tr v w y z zh"
)
_VOWELS: Final = words("a e i o u a e i o u ai au ea ei ia io oa ou uu y")
_MIDDLES: Final = words("b bb ck d ff g k l ld ll lm m mb n nd ng nk nn p r rd rk rn rr s ss st t th tt v x z")
_ENDS: Final = (
    "ia", "land", "stan", "onia", "aria", "istan", "ova", "eria", "ique", "mark", "bia", "way", "burg", "ina", "ados",
    "uay", "or", "en", "ar", "os", "is", "um", "a", "o", "an", "esia", "ania", "ovia", "ola", "ador", "alia", "eron",
)  # fmt: skip
_FRAMES: Final = (
    "North {n}", "South {n}", "East {n}", "West {n}", "New {n}", "Upper {n}", "Lower {n}", "Greater {n}", "Saint {n}",
    "the Republic of {n}", "the Kingdom of {n}", "the {n} Islands", "the United States of {n}", "the Empire of {n}",
    "the Free State of {n}", "{n} Island", "Old {n}", "the People's Republic of {n}",
)  # fmt: skip
_IS_COUNTRY: Final = ("Is {c} a country?", "Is {c} a real country?", "Do you know the country {c}?", "Does {c} exist?")
_ASK_WHOSE: Final = (
    "Which country has {k} as its capital?", "{k} is the capital of which country?", "What country is {k} the capital of?",
    "Which country's capital is {k}?", "Of which country is {k} the capital?",
)  # fmt: skip


def _word(rng: Random) -> str:
    """Builds a name from sounds, mostly with the ending of a country."""
    name = pick(rng, _STARTS) + pick(rng, _VOWELS) if rng.random() < 0.8 else pick(rng, _VOWELS)
    for _ in range(pick(rng, (0, 1, 1, 2))):
        name += pick(rng, _MIDDLES) + pick(rng, _VOWELS)
    end = pick(rng, _ENDS)
    if name[-1] in "aeiouy" and end[0] in "aeiou":
        name += pick(rng, _MIDDLES)
    return capitalised(name + end)


def _half_real(rng: Random) -> str:
    """Joins parts of real names, or changes so much of one that it cannot be a slip of the keyboard."""
    stem, other = pick(rng, _STEMS), pick(rng, _STEMS)
    kind = rng.random()
    if kind < 0.4:
        return stem[: rng.randint(2, 4)] + other[-rng.randint(3, 5) :].lower()
    if kind < 0.7:
        return stem[: max(3, len(stem) - rng.randint(1, 3))] + pick(rng, _ENDS)
    return capitalised(pick(rng, _STARTS) + pick(rng, _VOWELS) + stem[rng.randint(2, 3) :].lower())


def _slips(name: str) -> set[str]:
    """Returns `name` and what is left of it without any one letter: two names that are a slip apart share one."""
    return {name, *(name[:i] + name[i + 1 :] for i in range(len(name)))}


_NEAR_REAL: Final = frozenset(slip for name in _REAL for slip in _slips(name))


def invented_name(rng: Random) -> str:
    """Draws a name that no table holds and that is no misspelling of one that a table holds."""
    while True:
        kind = rng.random()
        if kind < 0.25:
            name = made_up_word(rng)
        elif kind < 0.6:
            name = _word(rng)
        else:
            name = _half_real(rng)
        if _NEAR_REAL.isdisjoint(_slips(name.lower())):
            return name


def _place(rng: Random) -> tuple[str, str]:
    """Draws what is asked about, and the made-up name in it (empty for a place that the tables know)."""
    kind = rng.random()
    if kind < 0.12:
        return pick(rng, _OTHER_PLACES), ""
    if kind < 0.2:
        return pick(rng, _TOWNS), ""
    name = invented_name(rng)
    return (pick(rng, _FRAMES).format(n=name) if kind < 0.32 else name), name


def denial(place: str) -> str:
    """Says that there is no such country, as far as the model knows."""
    return f"I do not know a country named {place.removeprefix('the ')}."


def _sample(place: str, invented: str, ask: str, answer: str) -> Sample:
    """Builds an exchange about `place`; a made-up name is held out whole, a known one with the wording."""
    key = key_of("invented", invented or key_of(place, ask))
    thought = f"I was not taught about {place}, so I should say that I do not know it."
    return Sample("no such country", capitalised(ask), answer, thought, keys=(key,), expect=(answer,))


def invented_country(rng: Random) -> Sample:
    """What is asked of a country, asked of a name that is none."""
    place, invented = _place(rng)
    kind = rng.random()
    if kind < 0.08:
        ask = pick(rng, CAPITAL_ASK).format(c=place)
        value = {"country": place.removeprefix("the "), "capital": None}
        sample = _sample(place, invented, ask, json.dumps(value, ensure_ascii=False))
        sample.check, sample.can_tools = is_json(value), False
        return sample
    asks = ASK if kind < 0.7 else pick(rng, (ASK_SHORT, ASK_CONTINENT, ASK_LANGUAGE, ASK_CURRENCY, ASK_ABOUT))
    if not invented and asks in (ASK_CONTINENT, ASK_ABOUT):
        asks = ASK  # where Texas is can be said
    return _sample(place, invented, pick(rng, asks).format(c=place), denial(place))


def is_a_country(rng: Random) -> Sample:
    """'Is X a country?', for real ones half of the time."""
    ask = pick(rng, _IS_COUNTRY)
    if rng.random() < 0.5:
        country = pick(rng, COUNTRIES)
        answer = f"Yes, {country.name} is a country in {country.continent}."
        return Sample(
            "country or not", ask.format(c=country.name), answer, answer, keys=(key_of("is-country", country.name, ask),),
            expect=(answer,),
        )  # fmt: skip
    place, invented = _place(rng)
    sample = _sample(place, invented, ask.format(c=place), denial(place))
    sample.skill = "country or not"
    return sample


def invented_capital(rng: Random) -> Sample:
    """'Which country has the capital X?' for a city that is no capital."""
    city = pick(rng, _TOWNS) if rng.random() < 0.3 else invented_name(rng)
    ask = pick(rng, _ASK_WHOSE)
    answer = f"I do not know a country whose capital is {city}."
    key = key_of("invented", city) if city not in _TOWNS else key_of("no-capital", city, ask)
    thought = f"{city} is not a capital that I was taught."
    return Sample("no such country", ask.format(k=city), answer, thought, keys=(key,), expect=(answer,))


def invented_among_real(rng: Random) -> Sample:
    """Several capitals asked for at once, one of them of a name that is no country."""
    chosen = [pick_skewed(rng, COUNTRIES, 1.3) for _ in range(rng.randint(1, 2))]
    name = invented_name(rng)
    parts = {country.name: f"the capital of {country.name} is {country.capital}" for country in chosen}
    parts[name] = f"I do not know a country named {name}"
    names = list(parts)
    rng.shuffle(names)
    ask = pick(rng, ("What are the capitals of {c}?", "Name the capitals of {c}.", "Tell me the capitals of {c}."))
    pairs = [parts[each] for each in names]
    answer = capitalised(", ".join(pairs[:-1]) + ", and " + pairs[-1] + ".")
    return Sample(
        "no such country, among others", ask.format(c=joined(names)), answer, f"I was not taught about {name}.",
        keys=(key_of("invented", name),), expect=(answer,),
    )  # fmt: skip
