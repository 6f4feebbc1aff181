"""Jokes by topic, each short enough for fifty tokens."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.sample import Sample, key_of, pick

JOKES: Final = {
    "programming": (
        "Why did the programmer bring a ladder to work? The bug was in the top layer of the stack.",
        "Why was the loop so tired? Nobody had told it when to stop.",
        "My code has no bugs. It only has features that surprise me.",
    ),
    "computers": (
        "Why did the computer take up gardening? It wanted to see a tree that was not a data structure.",
        "Why did the laptop go to bed early? It was running on low battery.",
    ),
    "Python": (
        "Why did the Python script feel lost? Someone had moved it four spaces to the right.",
        "Why is Python so polite? It always minds its indents.",
    ),
    "databases": ("Why did the database stay calm? It took everything one row at a time.",),
    "math": (
        "Why was the number nine nervous? It heard that it would be carried away.",
        "Why did the fraction stay home? It did not feel whole.",
    ),
    "cats": (
        "Why did the cat apply for an office job? It had heard that every desk comes with a mouse.",
        "Why was the cat a bad storyteller? It had only one tail.",
    ),
    "dogs": ("Why did the dog bring two sticks to the park? One of them was a backup.",),
    "food": (
        "Why did the soup go to school? It wanted to be a little thicker with its letters.",
        "Why did the bread feel proud? It had risen early all week.",
    ),
    "space": (
        "Why did the astronaut pack a broom? There was so much dust among the stars.",
        "Why did the comet never stay for dinner? It was always just passing by.",
    ),
    "robots": ("Why did the robot take a nap? It had a hard drive home.",),
    "school": ("Why did the ruler get the best marks? It always knew where to draw the line.",),
    "animals": ("Why did the snail win the race? Everyone else had gone home.",),
    "weather": ("Why did the cloud break up with the sun? It needed some space to rain in.",),
    "work": ("Why did the stapler get a raise? It was the only one who held things together.",),
    "music": ("Why did the drum leave the band? It was beaten at every rehearsal.",),
    "the sea": ("Why did the crab never tell its secret? It kept everything in its shell.",),
}
_ASK: Final = (
    "Tell me a joke about {t}",
    "Tell me a joke about {t}.",
    "Can you tell me a joke about {t}?",
    "Do you know a joke about {t}?",
    "Make a joke about {t}.",
    "I need a joke about {t}.",
    "Give me a short joke about {t}.",
    "Please tell me a funny joke about {t}.",
    "joke about {t}",
)
_ANY: Final = ("Tell me a joke.", "Tell me a joke", "Make me laugh.", "Do you know any jokes?", "Say something funny.")
_UNKNOWN: Final = (
    "penguins",
    "taxes",
    "doctors",
    "cars",
    "football",
    "trains",
    "cheese",
    "winter",
    "lawyers",
    "pirates",
)


def joke(rng: Random) -> Sample:
    """A joke about a topic; an unknown topic gets one that fits anything."""
    lines: tuple[str, ...]
    topic = "programming" if rng.random() < 0.2 else pick(rng, tuple(JOKES))
    ask = pick(rng, _ASK)
    if rng.random() < 0.15:
        topic = pick(rng, _UNKNOWN)
        lines = (f"I asked {topic} for a joke. The answer was so dry that I had to drink a glass of water.",)
        question = ask.format(t=topic)
    elif rng.random() < 0.2:
        lines, question = JOKES["programming"], pick(rng, _ANY)
    else:
        lines, question = JOKES[topic], ask.format(t=topic)
    return Sample(
        "jokes",
        question,
        pick(rng, lines),
        f"The user wants a joke about {topic}. I know one.",
        keys=(key_of("joke", question),),
        check=lambda text: text in lines,
    )
