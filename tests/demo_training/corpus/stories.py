"""Stories: a short paragraph, or a long journey with many episodes that keep to one hero, one goal and one helper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from demo_training.corpus.sample import Sample, capitalised, key_of, pick
from demo_training.corpus.story_worlds import HE, SHE, WORLDS, World


@dataclass
class _Tale:
    """The choices that one story keeps to."""

    rng: Random
    world: World
    words: dict[str, str]
    places: list[str]
    troubles: list[str]
    signs: list[str]
    tools: list[str]
    used: set[str] = field(default_factory=set)

    def say(self, *variants: str) -> str:
        """Fills one of the sentences that have not been used yet in this story, if any is left."""
        fresh = [variant for variant in variants if variant not in self.used] or list(variants)
        chosen = pick(self.rng, fresh)
        self.used.add(chosen)
        return self.fill(chosen)

    def fill(self, text: str) -> str:
        """Fills in names and pronouns; a slot at the start of a sentence gets a capital."""
        filled = text.format(**self.words)
        for mark in (". ", "! ", "? "):
            filled = mark.join(capitalised(part) for part in filled.split(mark))
        return filled

    def next_place(self) -> str:
        """Moves the story to a place that it has not seen."""
        self.words["place"] = self.places.pop() if self.places else "another valley"
        self.words["sign"] = self.signs.pop() if self.signs else "a light in the distance"
        return self.words["place"]


def _begin(rng: Random, world: World) -> _Tale:
    """Chooses the hero and shuffles what the world offers."""
    female = rng.random() < 0.5
    hero = pick(rng, SHE if female else HE)
    goal, craft, helper = pick(rng, world.goals), world.craft, pick(rng, world.helpers)
    while _short(helper) == hero:
        hero = pick(rng, SHE if female else HE)
    if not female:
        goal, craft = goal.replace("her ", "his ").replace(" she ", " he "), craft.replace("her ", "his ")
    role = world.role if female else world.role.replace("daughter", "son")
    words = {
        "hero": hero, "role": role, "home": world.home, "goal": goal, "craft": craft, "helper": helper,
        "friend": _short(helper), "she": "she" if female else "he", "her": "her" if female else "his",
        "them": "her" if female else "him", "place": "", "sign": "", "trouble": "", "tool": "",
    }  # fmt: skip
    places, troubles, signs, tools = (
        rng.sample(list(s), len(s)) for s in (world.places, world.troubles, world.signs, world.tools)
    )
    tale = _Tale(rng, world, words, places, troubles, signs, tools)
    if not female:
        tale.signs = [sign.replace("she ", "he ").replace("her ", "his ") for sign in tale.signs]
        tale.troubles = [trouble.replace("her ", "his ") for trouble in tale.troubles]
    words["tool"] = tale.tools[0]
    return tale


def _short(helper: str) -> str:
    """Returns the name of a helper such as 'a small robot named Pip'."""
    return helper.split(" named ")[1].split(" ")[0]


def _opening(t: _Tale) -> str:
    """Introduces the hero, the home and the goal."""
    return " ".join(
        (
            t.say(
                "{hero} was {role} who lived {home}.",
                "There once was {role} named {hero} who lived {home}.",
                "{hero}, {role}, had always lived {home}.",
            ),
            t.say(
                "Every evening {she} sat at the window and thought about {goal}.",
                "Since childhood {she} had wanted to find {goal}.",
                "Others laughed when {she} spoke of {goal}, but {she} did not mind.",
            ),
            t.say(
                "One morning {she} decided that it was time to go.",
                "One day {she} could wait no longer.",
                "Then, on a cold morning, {she} made up {her} mind.",
            ),
        )
    )


def _departure(t: _Tale) -> str:
    """The hero packs and leaves."""
    return " ".join(
        (
            t.say(
                "{hero} packed food for two weeks, {tool} and a dry coat.",
                "{she} took only what {she} could carry, and last of all {tool}.",
                "The bag was soon full, and {tool} went in on top.",
            ),
            t.say(
                "With {craft} {she} left before the sun was up.",
                "{craft} was ready, and nobody was awake to say goodbye.",
                "{she} started out with {craft} and did not look back.",
            ),
            t.say(
                "The first hours were easy, and {hero} sang to keep up {her} courage.",
                "For a long time nothing happened, and {hero} almost felt bored.",
                "At first {hero} was afraid, but with every hour the fear grew smaller.",
            ),
        )
    )


def _meeting(t: _Tale) -> str:
    """The helper joins the hero."""
    t.next_place()
    return " ".join(
        (
            t.say("Near {place}, {hero} met {helper}.", "It was at {place} that {hero} came across {helper}."),
            t.say(
                '"Where are you going?" asked {friend}.',
                '"You look lost," said {friend}.',
                '"Few people come this way," said {friend}.',
            ),
            t.say(
                '"I am looking for {goal}," said {hero}.',
                '{hero} took a deep breath. "I want to find {goal}," {she} said.',
            ),
            t.say(
                "{friend} thought about it for a while and then asked to come along.",
                "{friend} knew the way to the next place and offered to show it.",
                "From then on {hero} and {friend} went on together.",
            ),
        )
    )


def _place(t: _Tale) -> str:
    """The travelers reach a new place and look around."""
    t.next_place()
    return " ".join(
        (
            t.say(
                "After two days they came to {place}.",
                "The next stop was {place}.",
                "Late in the day they reached {place}.",
                "Their way led them to {place}.",
                "Beyond the next turn lay {place}.",
            ),
            t.say(
                "The first thing that {hero} noticed was {sign}.",
                "{friend} stopped and pointed at {sign}.",
                "There they found {sign}.",
                "Both of them were surprised by {sign}.",
            ),
            t.say(
                "{hero} wrote it all down, so that nothing would be forgotten.",
                "Nobody spoke for a while.",
                '"We are close," whispered {friend}.',
                "It was not what they were looking for, but it gave them hope.",
                '"Someone was here before us," said {hero}.',
            ),
            t.say(
                "They stayed for the night and took turns to keep watch.",
                "They rested for an hour, ate a little, and went on.",
                "When they left, {hero} felt that they were being watched.",
                "They searched every corner and then moved on.",
            ),
        )
    )


def _trouble(t: _Tale) -> str:
    """Something goes wrong and is put right."""
    t.words["trouble"] = t.troubles.pop() if t.troubles else "the weather turned bad"
    return " ".join(
        (
            t.say(
                "Then {trouble}.", "All went well until {trouble}.", "But luck did not last: {trouble}.",
                "That night {trouble}.",
            ),
            t.say(
                "For a moment {hero} did not know what to do.",
                "{friend} turned pale.",
                "It seemed that the journey was over.",
                "{hero} felt {her} heart beat fast.",
            ),
            t.say(
                "{she} remembered {tool} in {her} bag, and with its help they found a way out.",
                "They worked side by side for hours, and at last the danger was behind them.",
                "{friend} had an idea, and although it was a strange one, it worked.",
                "They waited, stayed calm and tried again, and the third time it worked.",
            ),
            t.say(
                '"That was close," said {hero}.',
                "Afterward they laughed, because they were so relieved.",
                '"Never do that again," said {friend}, but with a smile.',
                "They had lost a day, but not their courage.",
            ),
        )
    )  # fmt: skip


def _talk(t: _Tale) -> str:
    """A quiet evening in which the two get to know each other."""
    return " ".join(
        (
            t.say(
                "In the evening they sat together and talked.",
                "The night was clear, and neither of them could sleep.",
                "They made camp early that day.",
            ),
            t.say(
                '"Why does it matter so much to you?" asked {friend}.',
                '"What will you do when it is over?" asked {friend}.',
                '"Are you never afraid?" asked {friend}.',
            ),
            t.say(
                '"Because nobody else believes in it," said {hero}.',
                '"I will go home and tell everyone," said {hero}.',
                '"I am afraid all the time," said {hero}, "but I go on anyway."',
            ),
            t.say(
                "{friend} nodded and said nothing more.",
                "They looked at the stars until the fire was out.",
                "{hero} fell asleep with a smile.",
            ),
        )
    )


def _doubt(t: _Tale) -> str:
    """The hero nearly gives up."""
    return " ".join(
        (
            t.say(
                "On the tenth day {hero} wanted to turn back.",
                "Weeks had passed, and {hero} began to doubt.",
                "That morning everything seemed pointless.",
            ),
            t.say(
                "{she} was tired, and home was far away.",
                "The bag felt heavier than ever.",
                "Perhaps the others had been right after all.",
            ),
            t.say(
                "{friend} did not argue but simply went ahead, and after a while {hero} followed.",
                '"One more day," said {friend}, and {hero} agreed.',
                "Then {she} thought of {her} window at home and knew that {she} had to go on.",
            ),
        )
    )


def _discovery(t: _Tale) -> str:
    """The goal is found."""
    t.next_place()
    return " ".join(
        (
            t.say(
                "At last they came to {place}, and there the search ended.",
                "The last part of the way led through {place}.",
                "Behind {place} the world seemed to open.",
            ),
            t.say(
                "There it was: {goal}.",
                "In front of them was {goal}, just as {hero} had imagined it.",
                "{hero} held {her} breath, for {she} had found {goal}.",
            ),
            t.say(
                "It was smaller than {she} had thought, and more beautiful.",
                "For a long time {she} could only stand and look.",
                "{friend} cheered so loudly that the echo came back three times.",
            ),
            t.say(
                "{hero} understood that the way had been as important as the end.",
                "{hero} knew that {she} would never be the same again.",
                "All the trouble had been worth it.",
            ),
        )
    )


def _return(t: _Tale) -> str:
    """The hero goes home and the story ends."""
    return " ".join(
        (
            t.say(
                "The way home was shorter, as it always is.",
                "When they came home, everyone was waiting.",
                "Months later {hero} stood at the old window again.",
            ),
            t.say(
                "{hero} told the whole story, and this time nobody laughed.",
                "The people listened until late at night.",
                "{friend} stayed for the winter and became part of the family.",
            ),
            t.say(
                "And whenever someone spoke of a thing that could not be found, {hero} only smiled.",
                "In spring the two friends began to plan the next journey.",
                "{tool} still lies on the table, and {hero} will show it to everyone who asks.",
            ),
        )
    )


_MIDDLE: Final[tuple[Callable[[_Tale], str], ...]] = (_place, _trouble, _place, _talk, _place, _trouble, _doubt, _place)


def long_story(rng: Random, world: World, episodes: int) -> str:
    """Returns a story of `episodes` + 4 to 6 paragraphs, about fifty words each."""
    tale = _begin(rng, world)
    paragraphs = [_opening(tale), _departure(tale), _meeting(tale)]
    paragraphs += [_MIDDLE[i](tale) for i in range(min(episodes, len(_MIDDLE)))]
    paragraphs += [_discovery(tale), _return(tale)]
    return "\n\n".join(paragraphs)


def short_story(rng: Random, world: World) -> str:
    """Returns a story of one paragraph, about eighty words."""
    t = _begin(rng, world)
    first = _opening(t)
    t.next_place()
    t.words["trouble"] = t.troubles.pop()
    middle = t.say(
        "With {craft} {she} traveled as far as {place}, where {she} saw {sign}.",
        "The way led to {place}, and there {she} noticed {sign}.",
    )
    crisis = t.say(
        "Then {trouble}, but {tool} saved the day.",
        "Suddenly {trouble}, and only {tool} helped {them} out.",
    )
    end = t.say(
        "In the end {hero} found {goal} and came home with a story to tell.",
        "At last {she} found {goal}, and it was more beautiful than {she} had dreamed.",
    )
    return " ".join((first, middle, crisis, end))


_SHORT_ASK: Final = (
    "Write a short story about {t}.", "Tell me a short story about {t}.", "Write a story about {t}.",
    "Can you tell me a story about {t}?", "Please write a short story about {t}.", "Short story about {t}, please.",
    "Write a brief story about {t}", "Tell me a story about {t}.", "I would like a short story about {t}.",
)  # fmt: skip
_LONG_ASK: Final = (
    "Write a detailed story about {t}. Make it very long.", "Write a long story about {t}.", "Tell me a long story about {t}.",
    "Write a detailed story about {t}.", "Write a very long story about {t}.", "Please write a long, detailed story about {t}.",
    "Write a story about {t} in about 500 words.", "Tell me a very long and detailed story about {t}.",
)  # fmt: skip
_ANY: Final = (
    "Tell me a story.",
    "Write a story.",
    "Write a short story.",
    "Tell me a story",
    "Tell me a bedtime story.",
)


def _world(rng: Random) -> World:
    """Draws a world, the documented ones more often."""
    return pick(rng, (WORLDS[0], WORLDS[8], *WORLDS))


def _topic(rng: Random, world: World) -> str:
    """Draws a topic of `world`."""
    return world.topics[0] if rng.random() < 0.3 else pick(rng, world.topics)


def _is_story(least: int) -> Callable[[str], bool]:
    """Returns a rule: at least `least` words, and no sentence occurs twice."""

    def check(text: str) -> bool:
        sentences = [part.strip() for part in text.replace("\n", " ").split(". ") if len(part) > 20]
        return len(text.split()) >= least and len(set(sentences)) >= 0.9 * len(sentences)

    return check


def story_short(rng: Random) -> Sample:
    """A story of one paragraph, asked for in a chat or as a raw completion."""
    world = _world(rng)
    ask = pick(rng, _ANY) if rng.random() < 0.08 else pick(rng, _SHORT_ASK).format(t=_topic(rng, world))
    raw = rng.random() < 0.35
    text = short_story(rng, world)
    return Sample(
        "stories, short",
        ask,
        pick(rng, (" ", " ", "\n")) + text if raw else text,
        f"I will tell of {world.role} who looks for something.",
        keys=(key_of("story", ask),),
        raw=raw,
        check=_is_story(45),
        plain=rng.random() < 0.7,
    )


def story_long(rng: Random) -> Sample:
    """A story of many paragraphs, several hundred tokens."""
    world = _world(rng)
    ask = pick(rng, _LONG_ASK).format(t=_topic(rng, world))
    return Sample(
        "stories, long",
        ask,
        long_story(rng, world, rng.randint(5, 8)),
        f"I will tell of {world.role}, with a journey in many steps.",
        keys=(key_of("story", ask),),
        check=_is_story(300),
        plain=rng.random() < 0.7,
    )
