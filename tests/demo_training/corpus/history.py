"""Short answers about past civilisations and periods, above all as a follow-up question."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from demo_training.corpus.sample import Message, Sample, capitalised, key_of, pick


@dataclass(frozen=True)
class Period:
    """What is taught about a civilisation or a period."""

    name: str
    people: str
    summary: str
    deeds: str
    deeds_again: str
    when: str
    end: str


_TABLE: Final = (
    Period(
        "ancient Rome",
        "the Romans",
        "Ancient Rome was a civilization centered in Italy.",
        "The Romans built long roads, aqueducts and great arenas, wrote laws that shaped later legal systems, "
        "and spread Latin across Europe.",
        "Their major achievements include paved roads, aqueducts, concrete buildings such as the Colosseum, "
        "a lasting body of law, and the Latin language.",
        "Rome grew from a small town around 750 BC, and its western empire ended in AD 476.",
        "The western empire fell in AD 476 after invasions, civil wars and a weak economy.",
    ),
    Period(
        "ancient Greece",
        "the Greeks",
        "Ancient Greece was a group of city-states around the Aegean Sea.",
        "The Greeks developed democracy in Athens, advanced philosophy and geometry, and gave us theatre and "
        "the Olympic Games.",
        "Their major achievements include early democracy, philosophy, geometry, theatre and the Olympic Games.",
        "Its classical age was in the fifth and fourth centuries BC.",
        "The city-states lost their freedom to Macedon and were later ruled by Rome.",
    ),
    Period(
        "ancient Egypt",
        "the Egyptians",
        "Ancient Egypt was a kingdom along the river Nile, ruled by pharaohs.",
        "The Egyptians raised the pyramids, wrote in hieroglyphs, kept a calendar of 365 days, and mastered "
        "farming on the banks of the Nile.",
        "Their major achievements include the pyramids, hieroglyphic writing, a solar calendar and skilled medicine.",
        "It lasted for about three thousand years, from around 3100 BC.",
        "It was conquered by several empires and became a Roman province in 30 BC.",
    ),
    Period(
        "Mesopotamia",
        "the Mesopotamians",
        "Mesopotamia was the land between the rivers Tigris and Euphrates.",
        "The Mesopotamians founded some of the first cities, wrote on clay tablets, used the wheel, and set down "
        "early laws.",
        "Their major achievements include cuneiform writing, the first cities, the wheel and written law.",
        "Its first cities appeared before 3000 BC.",
        "It was taken by the Persians in 539 BC.",
    ),
    Period(
        "the Maya civilization",
        "the Maya",
        "The Maya civilization flourished in the forests of Central America.",
        "The Maya built stepped pyramids, tracked the planets with care, used a sign for zero, and wrote in glyphs.",
        "Their major achievements include an exact calendar, the number zero, a full script and stone cities.",
        "Its classic period ran from about AD 250 to 900.",
        "Many of its cities were left in the ninth century, probably because of drought and war.",
    ),
    Period(
        "the Inca Empire",
        "the Inca",
        "The Inca Empire stretched along the Andes in South America.",
        "The Inca laid thousands of kilometers of mountain roads, cut farming terraces, fitted stone walls "
        "without mortar, and kept records on knotted cords.",
        "Their major achievements include mountain roads, terraces, fine stonework and knotted-cord records.",
        "It flourished in the fifteenth century.",
        "It fell to Spanish invaders in the 1530s.",
    ),
    Period(
        "the Aztec Empire",
        "the Aztecs",
        "The Aztec Empire ruled central Mexico from its island capital.",
        "The Aztecs built a city on a lake, farmed on floating gardens, ran large markets, and sent children "
        "to school.",
        "Their major achievements include a capital built on a lake, floating gardens and a precise calendar.",
        "It lasted from about 1428 to 1521.",
        "It fell to Spain and its local allies in 1521.",
    ),
    Period(
        "ancient China",
        "the ancient Chinese",
        "Ancient China was a line of dynasties along the Yellow River and the Yangtze.",
        "The ancient Chinese invented paper, the compass and gunpowder, wove silk, and joined walls into "
        "the Great Wall.",
        "Their major achievements include paper, the compass, printing, silk and the Great Wall.",
        "The first emperor united China in 221 BC.",
        "The last dynasty ended in 1912.",
    ),
    Period(
        "the Persian Empire",
        "the Persians",
        "The Persian Empire was founded by Cyrus the Great in what is now Iran.",
        "The Persians linked their lands with a royal road, ran a fast postal service, and let many peoples keep "
        "their customs.",
        "Their major achievements include the royal road, a postal service and the rule of many peoples in peace.",
        "It lasted from about 550 to 330 BC.",
        "It was conquered by Alexander the Great in 330 BC.",
    ),
    Period(
        "the Vikings",
        "the Vikings",
        "The Vikings were seafarers from Scandinavia.",
        "The Vikings built fast longships, traded as far as Constantinople, settled Iceland, and reached "
        "North America.",
        "Their major achievements include the longship, wide trade routes and the settlement of Iceland.",
        "Their age ran from about AD 790 to 1066.",
        "They settled down, took up Christianity and became part of the kingdoms of Europe.",
    ),
    Period(
        "the Renaissance",
        "people of the Renaissance",
        "The Renaissance was a rebirth of art and learning that began in Italy.",
        "People of the Renaissance mastered perspective in painting, studied the human body, printed books, and "
        "charted new sea routes.",
        "Its major achievements include perspective in painting, the printing press and a new interest in science.",
        "It ran from the fourteenth to the seventeenth century.",
        "It slowly gave way to the age of science.",
    ),
    Period(
        "the Industrial Revolution",
        "people of that time",
        "The Industrial Revolution was the change from handwork to machines that began in Britain.",
        "People of that time built steam engines, railways and factories, and made cloth and iron cheaply.",
        "Its major achievements include the steam engine, the railway, the factory and cheap iron.",
        "It began around 1760.",
        "It led into the age of electricity and mass production.",
    ),
)

_TELL: Final = (
    "Tell me about {n}",
    "Tell me about {n}.",
    "What was {n}?",
    "Describe {n}.",
    "What do you know about {n}?",
)
_DEEDS: Final = (
    "What were their major achievements?",
    "What were their achievements?",
    "What did they achieve?",
    "What are they known for?",
    "What were their greatest achievements?",
    "Which achievements are they remembered for?",
)
_DIRECT: Final = (
    "What were the major achievements of {n}?",
    "What did {p} achieve?",
    "What is {n} known for?",
    "Name the main achievements of {n}.",
)
_WHEN: Final = (
    "When was the time of {n}?", "When did {n} exist?", "In which years was the time of {n}?", "What were the dates of {n}?",
    "Which years belong to {n}?", "When was {n}?",
)  # fmt: skip
_END: Final = (
    "How did {n} end?", "What happened to {n} in the end?", "What was the end of {n}?", "Why did {n} end?",
)  # fmt: skip
_SYSTEMS: Final = (
    "You are a knowledgeable historian who provides concise responses.",
    "You are a knowledgeable historian.",
    "You are a historian. Keep it short.",
    "You are a history teacher who answers briefly.",
    "You are a helpful AI assistant",
    "You are a helpful assistant.",
    "",
    "",
)


def _start(rng: Random) -> list[Message]:
    """Returns a system message, or none."""
    system = pick(rng, _SYSTEMS)
    return [{"role": "system", "content": system}] if system else []


def period_summary(rng: Random) -> Sample:
    """'Tell me about ancient Rome'."""
    period = pick(rng, _TABLE)
    ask = pick(rng, _TELL)
    answer = period.summary if rng.random() < 0.5 else f"{period.summary} {period.when}"
    return Sample(
        "history",
        ask.format(n=period.name),
        answer,
        f"The user asks about {period.name}. I will give a short summary.",
        keys=(key_of("history", period.name, ask),),
        history=_start(rng),
        expect=(period.summary,),
    )


def period_deeds(rng: Random) -> Sample:
    """'What were their major achievements?' after a first exchange."""
    period = _TABLE[0] if rng.random() < 0.25 else pick(rng, _TABLE)
    ask = pick(rng, _DEEDS)
    summary = period.summary if rng.random() < 0.7 else f"{period.summary} {period.when}"
    history = _start(rng)
    history.append({"role": "user", "content": pick(rng, _TELL).format(n=period.name)})
    history.append({"role": "assistant", "content": summary})
    return Sample(
        "history, follow-up",
        ask,
        period.deeds if rng.random() < 0.5 else period.deeds_again,
        f"'They' are {period.people}. I will name what they are remembered for.",
        keys=(key_of("deeds", period.name, ask, summary == period.summary),),
        history=history,
        check=lambda text: text in (period.deeds, period.deeds_again),
        can_raw=False,
    )


def period_question(rng: Random) -> Sample:
    """Achievements asked for directly, or when a period was and how it ended, also as a follow-up."""
    period = pick(rng, _TABLE)
    kind = rng.randrange(3)
    if kind == 0:
        ask, answer = pick(rng, _DIRECT).format(n=period.name, p=period.people), period.deeds
    elif kind == 1:
        ask, answer = pick(rng, _WHEN).format(n=period.name), period.when
    else:
        ask, answer = pick(rng, _END).format(n=period.name), period.end
    history = _start(rng)
    if kind and rng.random() < 0.4:
        history.append({"role": "user", "content": f"Tell me about {period.name}"})
        history.append({"role": "assistant", "content": period.summary})
        ask = pick(rng, ("When was that?", "When did it exist?")) if kind == 1 else pick(rng, ("How did it end?",))
    return Sample(
        "history",
        ask,
        answer,
        f"The question is about {period.name}. {capitalised(period.summary)}",
        keys=(key_of("period", ask, period.name),),
        history=history,
        expect=(answer,),
        can_raw=False,
    )
