"""The very lines that the documentation sends to the model, so that they are certain to be answered well."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus import arithmetic, comparison, stories
from demo_training.corpus.definitions import DEFINITIONS
from demo_training.corpus.history import _TABLE as PERIODS
from demo_training.corpus.jokes import JOKES
from demo_training.corpus.sample import Message, Sample, Skill, pick
from demo_training.corpus.story_worlds import WORLDS

HELPER: Final = "You are a helpful AI assistant"
HISTORIAN: Final = "You are a knowledgeable historian who provides concise responses."
_THREE: Final = "1. France - Paris\n2. Japan - Tokyo\n3. Brazil - Brasília"


def _system(rng: Random, text: str = HELPER) -> list[Message]:
    """Returns the system message half of the time."""
    return [{"role": "system", "content": text}] if rng.random() < 0.5 else []


def _line(skill: str, ask: str, answer: str, thought: str = "", raw: bool = False) -> Sample:
    """Builds an exchange whose wording stays as it is."""
    return Sample(skill, ask, answer, thought, raw=raw, plain=True, can_raw=False, can_tools=False)


def _capital(rng: Random) -> Sample:
    """The capital of France, in a chat and as a raw completion."""
    if rng.random() < 0.4:
        tail = pick(rng, ("", " It is a city in Europe.", " France is a country in Europe."))
        return _line("documented", "The capital of France is", f" Paris.{tail}", raw=True)
    sample = _line("documented", "What is the capital of France?", "The capital of France is Paris.")
    sample.thought = "The user asks for the capital of France. It is Paris."
    sample.history = _system(rng)
    return sample


def _countries(rng: Random) -> Sample:
    """Three countries and their capitals, in a chat and as a raw completion."""
    ask = "List 3 countries and their capitals."
    if rng.random() < 0.4:
        return _line("documented", ask, "\n" + _THREE, raw=True)
    sample = _line("documented", ask, _THREE, "The user wants 3 countries. I will give one per line.")
    sample.history = _system(rng)
    return sample


def _rome(rng: Random) -> Sample:
    """The follow-up about ancient Rome."""
    rome = PERIODS[0]
    sample = _line("documented", "What were their major achievements?", pick(rng, (rome.deeds, rome.deeds_again)))
    sample.thought = "'They' are the Romans. I will name what they are remembered for."
    sample.history = [
        {"role": "system", "content": HISTORIAN},
        {"role": "user", "content": "Tell me about ancient Rome"},
        {"role": "assistant", "content": rome.summary},
    ]
    return sample


def _batch(rng: Random) -> Sample:
    """The short requests of the batch examples."""
    ask, answer = pick(
        rng,
        (
            ("Say this is a test", "This is a test."),
            ("Tell me a joke about programming", pick(rng, JOKES["programming"])),
            ("What is Python?", DEFINITIONS["Python"]),
            ("What is Python?", DEFINITIONS["Python"]),
        ),
    )
    if rng.random() < 0.2:
        return _line("documented", ask, pick(rng, (" ", "\n")) + answer, raw=True)
    sample = _line("documented", ask, answer, "This is a simple request. I will answer it directly.")
    sample.history = _system(rng)
    return sample


def _numbers(rng: Random) -> Sample:
    """The comparison and the power of the thinking examples."""
    if rng.random() < 0.5:
        a, b = "9.11", "9.8"
        ask = pick(
            rng,
            (
                "9.11 and 9.8, which is greater?",
                "9.11 and 9.8, which is greater?",
                "Which is greater, 9.11 or 9.8?",
                "Which is bigger, 9.11 or 9.8?",
                "9.8 and 9.11, which is greater?",
                "Which is larger: 9.11 or 9.8?",
            ),
        )
        word = next(word for word in ("greater", "bigger", "larger") if word in ask)
        thought = comparison.thought_of(b, a) if ask.index(b) < ask.index(a) else comparison.thought_of(a, b)
        sample = _line("documented", ask, f"9.8 is {word} than 9.11.", thought)
    else:
        lines = ["2^1 = 2"] + [f"2^{e} = {2 ** (e - 1)} * 2 = {2**e}" for e in range(2, 9)]
        sample = _line("documented", "What is 2^8?", "2^8 = 256.", "\n".join(lines))
    if rng.random() < 0.15:
        sample = _line("documented", "What is 1+3?", "1 + 3 = 4.", arithmetic.add_columns(1, 3))
    sample.think = rng.random() < 0.5
    sample.history = _system(rng)
    return sample


def _stories(rng: Random) -> Sample:
    """The space explorer, and the very long story about a topic."""
    if rng.random() < 0.45:
        ask, answer = "Write a detailed story about topic. Make it very long.", stories.long_story(rng, WORLDS[8], 8)
    else:
        ask, answer = "Write a short story about a space explorer.", stories.short_story(rng, WORLDS[0])
        if rng.random() < 0.6:
            return _line("documented", ask, pick(rng, (" ", " ", "\n")) + answer, raw=True)
    sample = _line("documented", ask, answer)
    number = rng.randint(0, 127)
    sample.history = [{"role": "system", "content": f"{number}: {HELPER}"}] if rng.random() < 0.7 else _system(rng)
    return sample


_GROUPS: Final[tuple[Skill, ...]] = (_capital, _countries, _rome, _batch, _batch, _numbers, _stories)


def documented(rng: Random) -> Sample:
    """One of the documented lines."""
    return pick(rng, _GROUPS)(rng)
