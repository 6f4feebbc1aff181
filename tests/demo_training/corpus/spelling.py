"""Letters in words. Pieces of the tokenizer hide them, so every answer spells before it counts.

Without thinking the spelling stands in the answer, with thinking in the reasoning; the marks count as they go:
`s, t, r 1, a, w, b, e, r 2, r 3, y: the letter r appears 3 times in strawberry.`
"""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.chat import WORDS, made_up_word
from demo_training.corpus.geography import CITIES, COUNTRIES
from demo_training.corpus.sample import Sample, key_of, pick, words

_SHORT: Final = words("""
strawberry banana apple cherry orange tomato potato carrot pepper onion computer keyboard window garden flower butter
bottle letter summer winter yellow purple silver rabbit kitten puppy turtle parrot cheese coffee mirror pillow hammer
ladder bridge castle island forest desert ocean river mountain valley planet rocket engine teacher doctor farmer soccer
tennis guitar violin piano trumpet balloon ribbon pencil eraser notebook paper programming python token server plugin
model dovetail raspberry blueberry mississippi bookkeeper committee success address possible different happiness
beginning tomorrow arrow narrow sorrow borrow error terror
""")
_NAMES: Final = [name.lower() for name in (*(country.bare for country in COUNTRIES), *CITIES) if name.isalpha()]
_KNOWN: Final = sorted({*_SHORT, *(word for word in WORDS if len(word) > 2 and word.isascii()), *_NAMES})
_LONG: Final = words("""
refrigerator chocolate elephant university hippopotamus crocodile dinosaur umbrella butterfly caterpillar dragonfly
grasshopper woodpecker kangaroo chimpanzee alligator rhinoceros jellyfish octopus squirrel hamster porcupine raccoon
necessary embarrass accommodation occurrence millennium parallel pronunciation rhythm restaurant calendar separate
definitely government environment knowledge library february wednesday thursday saturday september november december
breakfast sandwich spaghetti cinnamon vanilla cucumber broccoli cauliflower asparagus mushroom pineapple watermelon
grapefruit cranberry gooseberry blackberry peppermint marshmallow hamburger mayonnaise vinegar noodle pancake
telephone television microphone headphones calculator typewriter photograph photographer photography bicycle motorcycle
helicopter submarine ambulance locomotive skateboard wheelbarrow parachute lighthouse skyscraper cathedral monastery
encyclopedia dictionary vocabulary grammar sentence paragraph alphabet hyphen apostrophe semicolon parenthesis
statistics probability geometry trigonometry multiplication subtraction percentage denominator hypotenuse rectangle
hexagon octagon cylinder pyramid symmetry diameter circumference thermometer barometer microscope telescope laboratory
experiment hypothesis philosophy psychology archaeology astronomy engineering architecture literature mathematics
orchestra symphony accordion saxophone xylophone harmonica tambourine choreography sculpture ceramics embroidery
carpenter plumber electrician mechanic librarian accountant secretary receptionist pharmacist veterinarian astronaut
grandmother grandfather neighborhood apartment basement staircase chimney fireplace curtain wardrobe mattress blanket
toothbrush shampoo handkerchief backpack suitcase necklace bracelet sunglasses raincoat sweater trousers slippers
thunderstorm hurricane tornado blizzard avalanche earthquake volcano glacier waterfall peninsula archipelago savanna
wilderness meadow orchard vineyard hedgehog peacock flamingo pelican seagull sparrow swallow buffalo antelope leopard
panther cheetah gorilla baboon mosquito cockroach scorpion tarantula lobster barracuda salmon sardine mackerel
assassin possession professional occasionally aggressive address balloonist bubblegum butterscotch buttonhole cappuccino
carriage cassette chattering connection difficulty disappear disappoint dumbbell eggplant excellent
""")
_POSITIONS: Final = ("first", "second", "third", "fourth", "fifth")
_COUNT_ASK: Final = (
    "How many {x}'s are in {w}?", "How many times does the letter {x} appear in {w}?", "How many {x}s are in {q}?",
    "How many {x}'s are there in the word {w}?", "Count the letter {x} in {w}.", "How many {X}s are in {q}?",
    "How often does {x} occur in {q}?", "How many {x} are in {w}?", "Count the {x}'s in {q}.",
)  # fmt: skip
_SPELL_ASK: Final = (
    "Spell {w}.", "How do you spell {w}?", "Spell the word {q}.", "How is {q} spelled?", "Write {w} letter by letter.",
    "Can you spell {w}?", "What are the letters of {w}?",
)  # fmt: skip
_LENGTH_ASK: Final = (
    "How many letters are in {w}?", "How many letters does {q} have?", "How long is the word {q}?",
    "Count the letters of {w}.", "How many letters are there in the word {w}?",
)  # fmt: skip


def _word(rng: Random) -> tuple[str, bool]:
    """Draws a word, and whether it is one of those that are held out as a whole."""
    kind = rng.random()
    if kind < 0.05:
        return "strawberry", False
    if kind < 0.5:
        return pick(rng, _KNOWN), False
    if kind < 0.65:
        return pick(rng, _LONG), True
    if kind < 0.8:
        return made_up_word(rng).lower(), True
    # any pieces of two words, so that most pieces are spelled at most places of a word
    first, last = pick(rng, _KNOWN), pick(rng, _LONG)
    return first[: rng.randint(2, 6)] + last[-rng.randint(2, 6) :], True


def _quoted(rng: Random, word: str) -> str:
    """Puts the word into quotation marks."""
    mark = pick(rng, "'\"'")
    return f"{mark}{word}{mark}"


def _sample(rng: Random, skill: str, forms: tuple[str, ...], word: str, new: bool, detail: str) -> Sample:
    """Starts a sample about `word`; a new word is held out whole, a known one together with the detail."""
    name = f"{skill} of new words" if new else skill
    # a word that is held out is held out of every skill, whichever list it came from
    keys = (key_of("spelled", word),) if new or (word in _LONG) else (key_of(skill, word, detail),)
    if word in _SHORT[:1]:
        keys = ("",)
    ask = pick(rng, forms).format(w=word, q=_quoted(rng, word), x=detail, X=detail.upper())
    return Sample(name, ask, "", keys=keys, plain=True)


def _finish(rng: Random, sample: Sample, marks: list[str], final: str, closing: str) -> Sample:
    """Puts the spelling into the reasoning or in front of the answer."""
    sample.think = rng.random() < 0.4
    sample.thought = "\n".join(marks) + f"\n{closing}"
    sample.answer = final if sample.think else f"{', '.join(marks)}: {final[0].lower()}{final[1:]}"
    sample.expect = (final[1:],)
    return sample


def letters(rng: Random) -> Sample:
    """How often a letter, or any vowel, occurs in a word."""
    word, new = _word(rng)
    vowels = rng.random() < 0.07
    letter = pick(rng, word) if rng.random() < 0.85 else pick(rng, "abcdefghijklmnopqrstuvwxyz")
    wanted = "aeiou" if vowels else letter
    seen, marks = 0, []
    for character in word:
        seen += character in wanted
        marks.append(f"{character} {seen}" if character in wanted else character)
    if vowels:
        sample = _sample(
            rng, "letters", ("How many vowels are in {w}?", "Count the vowels in {q}."), word, new, "vowel"
        )
        final = f"The word {word} has {seen} vowel{'' if seen == 1 else 's'}."
    else:
        sample = _sample(rng, "letters", _COUNT_ASK, word, new, letter)
        final = f"The letter {letter} appears {'once' if seen == 1 else f'{seen} times'} in {word}."
    sample.skill = "letters in new words" if new else "letters in words"
    return _finish(rng, sample, marks, final, f"That makes {seen}.")


def spelling(rng: Random) -> Sample:
    """The letters of a word, how many there are, and which stands where."""
    word, new = _word(rng)
    kind = rng.random()
    if kind < 0.4:
        sample = _sample(rng, "spelling", _SPELL_ASK, word, new, "spell")
        sample.answer, sample.thought = "-".join(word), f"I will write the letters of {word} one by one."
        sample.expect = (sample.answer,)
    elif kind < 0.7:
        sample = _sample(rng, "spelling", _LENGTH_ASK, word, new, "length")
        marks = [f"{letter} {i}" for i, letter in enumerate(word, 1)]
        _finish(rng, sample, marks, f"The word {word} has {len(word)} letters.", f"That makes {len(word)}.")
    else:
        last = rng.random() < 0.3
        at = len(word) - 1 if last else rng.randrange(min(len(word), len(_POSITIONS)))
        which = "last" if last else _POSITIONS[at]
        forms = (f"What is the {which} letter of {{w}}?", f"Which letter is the {which} in {{q}}?",
                 f"Tell me the {which} letter of {{q}}.")  # fmt: skip
        sample = _sample(rng, "spelling", forms, word, new, which)
        marks = [f"{letter} {i}" for i, letter in enumerate(word[: at + 1], 1)]
        _finish(rng, sample, marks, f"The {which} letter of {word} is {word[at]}.", f"So it is {word[at]}.")
    return sample
