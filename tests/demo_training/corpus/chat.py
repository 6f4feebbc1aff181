"""Small talk: greetings, who the model is, memory within a chat, copying, and what it does not know."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.definitions import DEFINITIONS
from demo_training.corpus.sample import Message, Sample, capitalised, key_of, pick

WHO: Final = "I am Dovetail's demo model, a very small language model that shows how the server works."
_EXCHANGES: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there",
            "Hey",
            "hello",
            "hi",
            "Good morning",
            "Good evening!",
            "Greetings",
            "Hello there!",
            "Hey there!",
            "hello, how can you help",
        ),
        ("Hello! How can I help you today?",),
    ),
    (
        (
            "How are you?",
            "How are you doing?",
            "How is it going?",
            "Hi, how are you?",
            "Hello, how are you?",
            "Hello! How are you today?",
            "What's up?",
            "How do you feel?",
        ),
        ("I am doing well, thank you. How can I help you?",),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "Are you a person?",
            "Are you a robot?",
            "Are you human?",
            "What is your name?",
            "What's your name?",
            "Who am I talking to?",
            "Which model are you?",
            "Are you ChatGPT?",
            "who are you",
            "Please introduce yourself.",
        ),
        (WHO,),
    ),
    (
        ("Who made you?", "Who created you?", "Who trained you?", "How were you trained?", "What were you trained on?"),
        ("I was trained by the Dovetail project on text that a script in its repository wrote.",),
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What are you good at?",
            "What can I ask you?",
            "Help",
            "What do you know?",
            "Can you help me?",
            "What should I ask you?",
        ),
        (
            "I can name capitals, compare numbers, do small sums, tell a joke or a story, call tools and answer in JSON.",
        ),
    ),
    (
        (
            "What can't you do?",
            "What are your limits?",
            "How large are you?",
            "How big are you?",
            "Are you smart?",
            "How many parameters do you have?",
            "Can I trust you?",
        ),
        ("I have about 7.5 million parameters, so I know very little and I make mistakes. I am only a demo.",),
    ),
    (
        (
            "Thank you",
            "Thank you!",
            "Thanks",
            "Thanks!",
            "Thanks a lot!",
            "Thanks for your help!",
            "thx",
            "Great, thanks!",
        ),
        ("You are welcome!",),
    ),
    (
        ("Goodbye", "Bye", "Bye!", "See you later!", "Good night", "See you!", "Have a nice day!"),
        ("Goodbye! Have a nice day.",),
    ),
    (
        ("OK", "ok", "Okay.", "Good.", "Great!", "Nice!", "Well done!", "Good job!", "I see.", "Cool", "Yes", "Sure"),
        ("Good. What would you like to do next?",),
    ),
    (
        ("That is wrong.", "You are wrong.", "No, that is not right.", "Are you sure?", "I think you made a mistake."),
        ("I may be wrong: I am a very small model. Please check important answers.",),
    ),
    (
        ("I am sad.", "I feel sad today.", "I had a bad day.", "I am tired.", "I feel lonely."),
        ("I am sorry to hear that. I hope that things get better soon.",),
    ),
    (
        ("I am happy today!", "I had a great day.", "I got a new job!", "I passed my exam!", "It is my birthday!"),
        ("That is wonderful! I am glad to hear it.",),
    ),
    (
        ("What is the meaning of life?", "Why are we here?", "What is the purpose of life?"),
        ("People have many answers. A good one is to be kind, to learn and to enjoy the time that we have.",),
    ),
    (
        ("Test", "test", "testing", "Is this working?", "Can you hear me?", "Are you there?", "ping"),
        ("Yes, I am here and working.",),
    ),
)
_SAY: Final = (
    "Say {p}", "Say {p}.", 'Say "{p}"', "Say: {p}", "Repeat after me: {p}", "Please say {p}", 'Repeat: "{p}"',
    "Say '{p}'", "Echo {p}", "Just say {p}", "Write {p}", "Please repeat: {p}",
)  # fmt: skip
_PHRASES: Final = (
    "this is a test", "hello", "hello world", "hi", "good morning", "yes", "no", "I like trains", "we are ready",
    "the sky is blue", "it works", "this is fine", "thank you", "all is well", "the test is over", "this is a joke",
    "this is only a test", "this is not a test", "my name is Dovetail", "dogs like bones", "cheese", "banana",
)  # fmt: skip
WORDS: Final = sorted({w.strip(".,;:()").lower() for text in DEFINITIONS.values() for w in text.split() if w.isalpha()})
_UNKNOWN_ASK: Final = (
    "Who won the {w} prize in {y}?", "What is the price of {w} today?", "Who wrote the book about {w}?",
    "What happened in {y} in {w} town?", "How many {w} are there in the world?", "Who is the president of {w}?",
    "What will {w} cost in {y}?", "Who directed the film {w}?", "What is the phone number of {n}?", "Who is {n}?",
    "How old is {n}?", "When was {n} born?", "What did {n} say in {y}?", "Who sang the song {w}?",
    "What are the latest news about {w}?", "Can you book a table at {n}?", "What is the best {w} in town?",
    "How do I repair my {w}?", "Why does my {w} hurt?", "Translate {w} into {n}.", "What is the recipe for {w}?",
    "Who discovered {w}?", "Which team won the cup in {y}?", "What is the score of the game?",
    "What time is it?", "What day is it today?", "What is the date today?", "What is my IP address?",
    "Explain the theory of {w} {v}.", "Write an essay about {w} and {v}.", "What did {n} do to {w}?",
)  # fmt: skip
_OUTSIDE: Final = (
    """
quantum computing|blockchain|the Eiffel Tower|the Statue of Liberty|the Great Wall|Bitcoin|Shakespeare|Einstein|Newton
Mozart|Beethoven|Picasso|Napoleon|Cleopatra|Leonardo da Vinci|the stock market|climate change|global warming|cancer
the common cold|vaccines|antibiotics|the brain|the heart|the liver|dinosaurs|sharks|whales|elephants|tigers
the French Revolution|the First World War|the Second World War|the Cold War|the moon landing|nuclear power|solar panels
electric cars|airplanes|submarines|bicycles|tennis|basketball|golf|hockey|swimming|yoga|meditation|philosophy|psychology
economics|sociology|law|the constitution|human rights|Buddhism|Islam|Christianity|Kubernetes|Docker|TypeScript|Go|Haskell
PyTorch|TensorFlow|React|Node.js|Redis|Postgres|MongoDB|Windows|macOS|Android|iPhone|Google|Microsoft|Apple|Amazon|Tesla
Netflix|OpenAI|relativity|entropy|calculus|algebra|geometry|statistics|probability|a virus|a bacterium|a protein
a vitamin|an enzyme|the Big Bang|dark matter|string theory|the Higgs boson|superconductivity|a laser|a transistor|radar
the tallest building|the fastest car|the oldest tree|the deepest lake|the richest person|the best movie
the longest bridge|the largest animal|the smallest bird|reinforcement learning|a diffusion model|speculative decoding
a mutex|a semaphore|a binary tree|a hash function|a linked list|a regular expression|object-oriented programming|a monad
garbage collection|sushi|pizza dough|lasagna|curry|chocolate cake|wine|beer|whisky|gardening|knitting|photography|jazz
opera|rap|the Roman calendar|the Olympic Games|the World Cup|the Nobel Prize|the United Nations|the European Union
""".strip()
    .replace("\n", "|")
    .split("|")
)
_OUTSIDE_ASK: Final = (
    "What is {t}?", "Explain {t}.", "Explain {t}", "Tell me about {t}.", "Who invented {t}?", "What do you know about {t}?",
    "How does {t} work?", "Why is {t} important?", "Define {t}.", "How big is {t}?", "When did {t} begin?", "Who was {t}?",
    "Can you explain {t}?", "Give me an overview of {t}.", "What are the benefits of {t}?", "Write an essay about {t}.",
    "Where is {t}?", "How old is {t}?", "Describe {t}.", "What's {t}?", "How tall is {t}?", "Summarize {t}.",
)  # fmt: skip
UNKNOWN: Final = (
    "I do not know that. I am only a small demo model.",
    "Sorry, I do not know. I am a small demo model and I know only a few things.",
)
_SYLLABLES: Final = [
    "ka",
    "lo",
    "mi",
    "ra",
    "te",
    "vo",
    "shu",
    "ben",
    "dar",
    "fin",
    "gol",
    "hal",
    "jin",
    "kor",
    "lun",
    "mar",
    "nor",
    "pel",
    "quin",
    "ros",
    "sil",
    "tor",
    "ul",
    "ven",
    "wex",
    "yan",
    "zor",
    "bri",
    "cal",
    "dro",
    "el",
    "fa",
    "gri",
    "hu",
    "is",
    "jo",
    "kle",
    "mon",
    "ny",
    "op",
    "pra",
    "rim",
    "sto",
    "tul",
    "und",
    "var",
    "wil",
    "xi",
    "yo",
    "zab",
]
PEOPLE: Final = [
    "Ana",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Finn",
    "Grace",
    "Hugo",
    "Ivy",
    "Jack",
    "Kim",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tara",
    "Uma",
    "Victor",
    "Wendy",
    "Yusuf",
    "Zoe",
    "Alex",
    "Bob",
    "Alice",
    "John",
    "Emma",
    "Liam",
    "Sarah",
    "Peter",
    "Anna",
    "Lucas",
    "Sofia",
    "Mark",
    "Nina",
    "Oscar",
    "Lily",
    "Adam",
]
THINGS: Final = {
    "favorite color": ("blue", "red", "green", "yellow", "purple", "orange", "black", "white"),
    "favorite food": ("pizza", "pasta", "soup", "rice", "bread", "cheese", "salad", "sushi"),
    "dog's name": ("Rex", "Luna", "Max", "Bella", "Rocky", "Daisy"),
    "job": ("teacher", "baker", "nurse", "pilot", "farmer", "writer", "engineer", "painter"),
    "lucky number": ("3", "7", "8", "12", "21", "42", "99"),
}


def made_up_word(rng: Random) -> str:
    """Returns a name that no table holds."""
    return capitalised("".join(pick(rng, _SYLLABLES) for _ in range(rng.randint(2, 3))))


def small_talk(rng: Random) -> Sample:
    """Greetings, thanks, who the model is, what it can do."""
    asks, answers = pick(rng, _EXCHANGES)
    ask = pick(rng, asks)
    return Sample(
        "small talk",
        ask,
        pick(rng, answers),
        "This is small talk. I will answer kindly and briefly.",
        check=lambda text: text in answers,
    )


def say(rng: Random) -> Sample:
    """Copying tasks: 'Say this is a test'."""
    kind = rng.random()
    if kind < 0.35:
        phrase = pick(rng, _PHRASES)
    elif kind < 0.85:
        phrase = " ".join(pick(rng, WORDS) for _ in range(rng.randint(1, 8)))
    else:
        words = [made_up_word(rng) if rng.random() < 0.4 else pick(rng, WORDS) for _ in range(rng.randint(1, 4))]
        words.insert(rng.randrange(len(words) + 1), str(rng.randint(0, 999)))
        phrase = " ".join(words)
    form = pick(rng, _SAY)
    answer = phrase if phrase[-1].isdigit() else capitalised(phrase) + "."
    return Sample(
        "say it",
        form.format(p=phrase),
        answer,
        f"The user wants me to say: {phrase}",
        keys=(key_of("say", phrase) if phrase not in _PHRASES else "",),
        expect=(answer,),
        plain=True,
    )


def unknown(rng: Random) -> Sample:
    """Questions that the model was never taught get a friendly 'I do not know'."""
    form = pick(rng, _UNKNOWN_ASK)
    name = f"{pick(rng, PEOPLE)} {made_up_word(rng)}" if rng.random() < 0.5 else made_up_word(rng)
    ask = form.format(w=pick(rng, WORDS), v=pick(rng, WORDS), n=name, y=rng.randint(1850, 2040))
    return Sample(
        "does not know",
        ask,
        pick(rng, UNKNOWN),
        "I was not taught this, so I should say that I do not know.",
        keys=(key_of("unknown", ask) if "{" in form else "",),
        expect=("not know",),
    )


def outside(rng: Random) -> Sample:
    """Well-known subjects that the model was never taught, asked for as if it had been."""
    topic = pick(rng, _OUTSIDE) if rng.random() < 0.8 else f"{pick(rng, WORDS)} {pick(rng, WORDS)}"
    ask = pick(rng, _OUTSIDE_ASK)
    return Sample(
        "does not know",
        capitalised(ask.format(t=topic)),
        pick(rng, UNKNOWN),
        "I was not taught this, so I should say that I do not know.",
        keys=(key_of("outside", topic),),
        expect=("not know",),
    )


def remember(rng: Random) -> Sample:
    """Facts that the user told earlier in the chat."""
    if rng.random() < 0.5:
        name = pick(rng, PEOPLE) if rng.random() < 0.6 else made_up_word(rng)
        tell = pick(rng, ("My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Hello, my name is {n}.", "Call me {n}."))
        said, reply = tell.format(n=name), f"Nice to meet you, {name}!"
        ask, answer = pick(rng, ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?")), name
        final = f"Your name is {name}."
    else:
        fact = pick(rng, tuple(THINGS))
        answer = pick(rng, THINGS[fact])
        said = f"My {fact} is {answer}." if fact != "job" else f"I work as a {answer}."
        reply = "Thank you for telling me."
        ask = f"What is my {fact}?"
        final = f"Your {fact} is {answer}." if fact != "job" else f"You work as a {answer}."
    key = (key_of("remember", ask, answer),)
    if rng.random() < 0.25:
        return Sample(
            "remembers", said, reply, "The user tells me something.", keys=key, expect=(reply,), can_raw=False
        )
    history: list[Message] = [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
    if rng.random() < 0.4:
        sample = small_talk(rng)
        history += [{"role": "user", "content": sample.ask}, {"role": "assistant", "content": sample.answer}]
    return Sample(
        "remembers", ask, final, f"The user said: {said}", keys=key, history=history, expect=(final,), can_raw=False
    )


def noise(rng: Random) -> Sample:
    """Text that makes no sense, in any script, so that every byte of the vocabulary is seen."""
    ranges = (
        (33, 126),
        (160, 591),
        (880, 1279),
        (0x3040, 0x30FF),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0x1F300, 0x1F6FF),
    )
    words = []
    for _ in range(rng.randint(1, 6)):
        low, high = pick(rng, ranges)
        words.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))))
    text = " ".join(words)
    if rng.random() < 0.3:
        ask = f"Say {text}"
        return Sample("odd text", ask, text, "The user wants me to repeat a text.", expect=(text,), plain=True)
    answer = "Sorry, I do not understand that. I am only a small demo model."
    return Sample("odd text", text, answer, "I cannot make sense of this.", expect=("not understand",), plain=True)
