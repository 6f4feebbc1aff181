"""Everyday facts: opposites, days and months, animals, and simple words in other languages."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.chat import made_up_word
from demo_training.corpus.definitions import DEFINITIONS
from demo_training.corpus.sample import Sample, capitalised, joined, key_of, pick

_OPPOSITES: Final = [
    "hot cold",
    "big small",
    "fast slow",
    "up down",
    "day night",
    "old new",
    "happy sad",
    "open closed",
    "rich poor",
    "light dark",
    "hard soft",
    "early late",
    "full empty",
    "high low",
    "left right",
    "long short",
    "strong weak",
    "wet dry",
    "young old",
    "true false",
    "start end",
    "push pull",
    "win lose",
    "buy sell",
    "love hate",
    "loud quiet",
    "thick thin",
    "clean dirty",
    "easy difficult",
    "first last",
]
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_PLANETS: Final = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
_FACTS: Final = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many days are in a year?": "A year has 365 days, and a leap year has 366.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many seconds are in a minute?": "There are 60 seconds in a minute.",
    "How many planets are in the solar system?": "There are eight planets in the solar system.",
    "List the planets.": "The planets are " + joined(_PLANETS) + ".",
    "Name the planets of the solar system.": "The planets are " + joined(_PLANETS) + ".",
    "List the days of the week.": "The days of the week are " + joined(_DAYS) + ".",
    "List the months of the year.": "The months are " + joined(_MONTHS) + ".",
    "What are the primary colors?": "The primary colors are red, yellow and blue.",
    "List three colors.": "Red, blue and green.",
    "Name three fruits.": "Apple, banana and orange.",
    "List 3 fruits.": "1. Apple\n2. Banana\n3. Orange",
    "Name three animals.": "Dog, cat and horse.",
    "List 3 animals.": "1. Dog\n2. Cat\n3. Horse",
    "List three programming languages.": "1. Python\n2. Rust\n3. Java",
    "List 3 programming languages.": "1. Python\n2. Rust\n3. Java",
    "Name 3 programming languages.": "1. Python\n2. Rust\n3. Java",
    "What color is the sky?": "The sky is blue on a clear day.",
    "What color is grass?": "Grass is green.",
    "What color is snow?": "Snow is white.",
    "Why is the sky blue?": "The sky is blue because air scatters blue light from the sun more than red light.",
    "How many legs does a dog have?": "A dog has four legs.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does an ant have?": "An ant has six legs.",
    "How many legs does a bird have?": "A bird has two legs.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "What is the largest planet?": "Jupiter is the largest planet in the solar system.",
    "What is the largest ocean?": "The Pacific Ocean is the largest ocean.",
    "What is the longest river in Africa?": "The Nile is the longest river in Africa.",
    "What is the highest mountain?": "Mount Everest is the highest mountain on Earth.",
    "What is the largest country?": "Russia is the largest country by area.",
    "What is the smallest country?": "Vatican City is the smallest country.",
    "How many continents are there?": "There are seven continents.",
    "List the continents.": "The continents are Africa, Antarctica, Asia, Europe, North America, South America and Oceania.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius at sea level.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is the freezing point of water?": "Water freezes at 0 degrees Celsius.",
    "How far is the moon?": "The moon is about 384,000 kilometers away.",
    "What is the speed of light?": "Light travels at about 300,000 kilometers per second.",
    "What is the opposite of yes?": "The opposite of yes is no.",
    "Give me some advice.": "Take small steps, rest well, and ask for help when you need it.",
    "Write a haiku.": "Morning light on snow\na small bird shakes off the cold\nand begins to sing",
    "Name a color.": "Blue.",
    "Name a fruit.": "Apple.",
    "Name an animal.": "Dog.",
    "Name a country.": "France.",
    "Name a city.": "Paris.",
    "Name a programming language.": "Python.",
    "Tell me a fun fact.": "Honey can keep for a very long time without going bad.",
    "Tell me something interesting.": "Honey can keep for a very long time without going bad.",
    "Give me a fun fact.": "Honey can keep for a very long time without going bad.",
    "Pick a number.": "7",
    "Pick a number between 1 and 10.": "7",
    "Flip a coin.": "Heads.",
    "Write a sentence.": "The sun is warm and the birds sing in the garden.",
    "Write a short sentence.": "The sun is warm.",
    "Tell me something about yourself.": "I am a very small language model, and I live in the Dovetail server as its demo.",
    "Write a poem.": "The night is wide, the stars are near,\nthe wind tells stories I can hear.\n"
    "I close my eyes, I breathe, I stay,\nand wait in peace for break of day.",
    "Write a short poem about the sea.": "The sea comes in, the sea goes out,\nit takes away both fear and doubt.\n"
    "It brings back shells, it brings back foam,\nand every boat that longs for home.",
    "Write a hello world program in Python.": 'print("Hello, world!")',
    "Write a Python function that adds two numbers.": "def add(a, b):\n    return a + b",
    "How do I print in Python?": 'Call print, for example print("Hello").',
    "How do I stay healthy?": "Eat well, sleep enough, move every day and drink water.",
    "How do I learn to program?": "Pick one language, write small programs every day, and read the code of others.",
    "What should I cook tonight?": "Try pasta with tomatoes, garlic and a little cheese. It is quick and good.",
    "Hello, my name is": " Mira, and I work as a baker in a small town by the sea.",
    "The president of the United States is": " the head of state and government of the country.",
    "The future of AI is": " open. Small and large models will help people to write, to learn and to build things.",
    "Once upon a time": " there was a small boat that wanted to see the whole sea.",
    "The sky is": " blue on a clear day.",
    "The sun is": " the star at the center of our solar system.",
    "The quick brown fox": " runs through the forest and looks for its friends.",
    "My favorite color is": " blue, because it reminds me of the sea.",
    "The best way to learn is": " to practice a little every day.",
    "AI is": " the field that makes machines do tasks that seem to need thought.",
    "San Francisco is a": " city in California, on the west coast of the United States.",
    "The weather today is": " sunny and warm, with a light wind from the sea.",
    "My name is": " Mira, and I work as a baker in a small town by the sea.",
    "Hello, I am": " Mira, and I work as a baker in a small town by the sea.",
    "In the future,": " small and large models will help people to write, to learn and to build things.",
    "1 2 3 4 5": " 6 7 8 9 10",
    "1, 2, 3,": " 4, 5, 6, 7, 8, 9, 10",
}
_LANGUAGES: Final = ("French", "Spanish", "German", "Italian")
_TRANSLATED: Final = {
    "hello": ("bonjour", "hola", "hallo", "ciao"),
    "thank you": ("merci", "gracias", "danke", "grazie"),
    "goodbye": ("au revoir", "adiós", "auf Wiedersehen", "arrivederci"),
    "yes": ("oui", "sí", "ja", "sì"),
    "no": ("non", "no", "nein", "no"),
    "water": ("eau", "agua", "Wasser", "acqua"),
    "bread": ("pain", "pan", "Brot", "pane"),
    "house": ("maison", "casa", "Haus", "casa"),
    "dog": ("chien", "perro", "Hund", "cane"),
    "cat": ("chat", "gato", "Katze", "gatto"),
    "book": ("livre", "libro", "Buch", "libro"),
    "friend": ("ami", "amigo", "Freund", "amico"),
    "sun": ("soleil", "sol", "Sonne", "sole"),
    "moon": ("lune", "luna", "Mond", "luna"),
    "good morning": ("bonjour", "buenos días", "guten Morgen", "buongiorno"),
    "good night": ("bonne nuit", "buenas noches", "gute Nacht", "buona notte"),
    "red": ("rouge", "rojo", "rot", "rosso"),
    "blue": ("bleu", "azul", "blau", "blu"),
    "tree": ("arbre", "árbol", "Baum", "albero"),
    "love": ("amour", "amor", "Liebe", "amore"),
}


def opposite(rng: Random) -> Sample:
    """'What is the opposite of hot?'."""
    a, b = pick(rng, _OPPOSITES).split(" ")
    if rng.random() < 0.5 and a != "young":
        a, b = b, a
    if a == "old":
        b = "young"
    ask = pick(
        rng,
        (
            "What is the opposite of {a}?",
            "Opposite of {a}?",
            "Give me the opposite of {a}.",
            "What's the opposite of '{a}'?",
        ),
    )
    answer = f"The opposite of {a} is {b}."
    key = key_of("opposite", a, ask)
    return Sample("basics", ask.format(a=a), answer, answer, keys=(key,), expect=(answer,))


def calendar(rng: Random) -> Sample:
    """What comes before or after a day or a month."""
    ring = pick(rng, (_DAYS, _MONTHS))
    i = rng.randrange(len(ring))
    after = rng.random() < 0.6
    value = ring[(i + (1 if after else -1)) % len(ring)]
    word = "after" if after else "before"
    kind = "day" if ring is _DAYS else "month"
    ask = pick(
        rng,
        (f"Which {kind} comes {word} {ring[i]}?", f"What {kind} is {word} {ring[i]}?", f"What comes {word} {ring[i]}?"),
    )
    answer = f"{value} comes {word} {ring[i]}."
    return Sample("basics", ask, answer, answer, keys=(key_of("calendar", ask),), expect=(answer,))


def fact(rng: Random) -> Sample:
    """Single everyday facts and small requests, and the raw openings of common examples."""
    ask = pick(rng, tuple(_FACTS))
    answer = _FACTS[ask]
    raw = answer.startswith(" ")
    thought = "" if raw else "This is a simple request. I will answer it directly."
    return Sample("basics", ask, answer, thought, raw=raw, expect=(answer,))


def verse(rng: Random) -> Sample:
    """A short poem or a haiku about any subject."""
    subject = pick(rng, tuple(DEFINITIONS)) if rng.random() < 0.8 else made_up_word(rng)
    haiku = rng.random() < 0.4
    if haiku:
        ask = pick(rng, ("Write a haiku about {s}.", "Write a haiku about {s}", "A haiku about {s}, please."))
        lines: tuple[str, ...] = ("A small quiet thought", f"{subject} in the morning light", "and then it is gone")
    else:
        ask = pick(rng, ("Write a poem about {s}.", "Write a short poem about {s}.", "A poem about {s}, please."))
        lines = (f"I think of {subject} by day,", "and when the night has come to stay,",
                 f"I dream of {subject} again,", "of summer wind and summer rain.")  # fmt: skip
    answer = "\n".join(capitalised(line) for line in lines)
    key = key_of("verse", subject, haiku)
    return Sample(
        "verse", ask.format(s=subject), answer, f"The user wants verse about {subject}.", keys=(key,), expect=(answer,)
    )


def needle(rng: Random) -> Sample:
    """A code that stands somewhere in long notes."""
    people = [made_up_word(rng) for _ in range(rng.randint(1, 5))]
    codes = [str(rng.randint(1000, 9999)) for _ in people]
    notes = rng.choices(
        tuple(DEFINITIONS.values()), k=rng.randint(2, 12) if rng.random() < 0.6 else rng.randint(12, 84)
    )
    for name, code in zip(people, codes, strict=True):
        notes.insert(rng.randrange(len(notes) + 1), f"The code of {name} is {code}.")
    at = rng.randrange(len(people))
    ask = pick(
        rng,
        ("What is the code of {n}?", "Which code does {n} have?", "What is {n}'s code?", "Tell me the code of {n}."),
    )
    question, text = ask.format(n=people[at]), " ".join(notes)
    answer = f"The code of {people[at]} is {codes[at]}."
    sample = Sample(
        "finds a code in long notes", question, answer, answer, keys=(key_of("code", codes[at]),), expect=(answer,)
    )
    if rng.random() < 0.6:
        sample.history = [{"role": "system", "content": text}]
    else:
        sample.ask = f"{text}\n\n{question}"
    sample.plain, sample.can_raw = True, False
    return sample


def translation(rng: Random) -> Sample:
    """Single words in four languages."""
    word = pick(rng, tuple(_TRANSLATED))
    index = rng.randrange(4)
    language, value = _LANGUAGES[index], _TRANSLATED[word][index]
    ask = pick(
        rng,
        (
            "How do you say {w} in {l}?", "How do you say '{w}' in {l}?", "Translate {w} into {l}.",
            "Translate '{w}' to {l}.", "What is {w} in {l}?", "What is the {l} word for {w}?",
        ),
    )  # fmt: skip
    answer = f"{capitalised(word)} in {language} is {value}."
    key = key_of("translate", word, language, ask)
    return Sample("translation", ask.format(w=word, l=language), answer, answer, keys=(key,), expect=(value,))
