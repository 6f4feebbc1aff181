"""The settings in which stories take place: heroes, places, goals and troubles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class World:
    """A setting; every tuple holds interchangeable phrases that fit the same sentences.

    Attributes:
        topics: What a user calls a story in this world, as in 'a story about ...'.
        role: What the hero is, with its article.
        home: Where the hero lives, with its preposition.
        craft: What carries the hero, with its article.
        goals: What the hero sets out to find.
        places: Where the journey leads, with articles.
        troubles: What goes wrong, as clauses.
        helpers: Who joins the hero.
        tools: Small things that turn out to be useful.
        signs: What the hero notices in a new place.
    """

    topics: tuple[str, ...]
    role: str
    home: str
    craft: str
    goals: tuple[str, ...]
    places: tuple[str, ...]
    troubles: tuple[str, ...]
    helpers: tuple[str, ...]
    tools: tuple[str, ...]
    signs: tuple[str, ...]


WORLDS: Final = (
    World(
        ("a space explorer", "space", "an astronaut", "a journey to the stars", "a spaceship", "a distant planet"),
        "a space explorer",
        "on a small station above a blue planet",
        "her silver ship",
        (
            "a signal that nobody could explain",
            "a lost probe",
            "a planet with green skies",
            "the source of a strange light",
        ),
        (
            "a moon of glass",
            "a quiet asteroid field",
            "a planet of red sand",
            "an empty space station",
            "a ring of ice",
            "a dark nebula",
        ),
        (
            "the engine went silent",
            "a storm of dust hit the hull",
            "the map turned out to be wrong",
            "the air began to run low",
        ),
        ("a small robot named Pip", "an old pilot named Joss", "a talking computer named Orla"),
        ("a magnet", "a worn notebook", "a length of cable", "a lamp"),
        ("tall shapes that looked like towers", "a faint blue glow", "tracks in the dust", "a soft humming sound"),
    ),
    World(
        ("the sea", "a sailor", "a pirate", "a ship", "a treasure", "an island"),
        "a young sailor",
        "in a harbor town full of gulls",
        "her little boat",
        (
            "an island that was on no map",
            "a sunken bell",
            "a chest that her grandfather had buried",
            "the place where the whales sing",
        ),
        (
            "a bay with black sand",
            "a forest of tall weeds",
            "a village on stilts",
            "a cave behind a waterfall",
            "a reef full of fish",
            "a foggy strait",
        ),
        ("the mast broke in the wind", "a thick fog came up", "the water ran low", "a current pulled the boat away"),
        ("a gray parrot named Figs", "a fisherman named Bram", "a girl named Ona who could read the stars"),
        ("a brass compass", "a long rope", "a spare sail", "a tin whistle"),
        ("lights under the water", "smoke above the trees", "a path of white shells", "the sound of distant drums"),
    ),
    World(
        ("a dragon", "a knight", "a castle", "a kingdom", "a princess", "a wizard", "magic"),
        "a young knight",
        "in a small castle between two hills",
        "her brown horse",
        (
            "a dragon that nobody had seen up close",
            "a crown that had been lost",
            "a spring that could heal",
            "a sword that sang",
        ),
        (
            "a forest of silver trees",
            "a broken bridge",
            "a village without children",
            "a tower with no door",
            "a valley of stones",
            "a frozen lake",
        ),
        (
            "the road ended at a cliff",
            "a troll blocked the way",
            "the horse lost a shoe",
            "a spell put everyone to sleep",
        ),
        ("a shy wizard named Tobin", "a talking fox named Rill", "a baker named Hanne"),
        ("a wooden flute", "a silver key", "a bag of salt", "a small mirror"),
        ("footprints as large as a cart", "a smell of smoke", "a light in the highest window", "a song without words"),
    ),
    World(
        ("a robot", "a lost robot", "the future", "artificial intelligence", "a machine", "technology", "a programmer"),
        "a curious engineer",
        "in a city of bright towers",
        "her electric cart",
        (
            "the maker of an old robot",
            "a machine that could dream",
            "the reason why the lights kept going out",
            "a message from long ago",
        ),
        (
            "an empty factory",
            "a market of spare parts",
            "a garden on a roof",
            "a tunnel under the river",
            "a library without books",
            "a hall of screens",
        ),
        ("the power failed", "a door would not open", "the robot forgot its name", "a guard asked for a pass"),
        ("a round robot named Bolt", "a clever boy named Milo", "a retired inventor named Ada"),
        ("a battery", "a piece of copper wire", "a small screen", "a screwdriver"),
        (
            "a row of blinking lights",
            "a sound like slow breathing",
            "numbers that were written on the wall",
            "a trail of oil",
        ),
    ),
    World(
        ("a detective", "a mystery", "a crime", "a city", "a thief", "a secret"),
        "a patient detective",
        "in a city of narrow streets",
        "an old bicycle",
        (
            "a painting that had vanished",
            "the writer of a strange letter",
            "a watch that had stopped at noon",
            "a man whom nobody remembered",
        ),
        (
            "a quiet museum",
            "a smoky cafe",
            "a flower shop",
            "an attic full of boxes",
            "a train station",
            "a house with green doors",
        ),
        (
            "the only witness left town",
            "the rain washed away the tracks",
            "the best clue proved false",
            "someone locked the door from outside",
        ),
        ("a young reporter named Nell", "a baker named Otto", "a clever dog named Scout"),
        ("a magnifying glass", "a box of matches", "a train ticket", "a piece of chalk"),
        ("a drop of blue paint", "a chair that had been moved", "a torn page", "the smell of oranges"),
    ),
    World(
        ("a forest", "animals", "a fox", "a bear", "nature", "a tree", "a rabbit", "a bird"),
        "a young forest ranger",
        "in a hut at the edge of a great forest",
        "her old bicycle",
        (
            "a tree that was said to be a thousand years old",
            "a lost bear cub",
            "the spring of the river",
            "a bird that sang at night",
        ),
        (
            "a clearing full of flowers",
            "a deep ravine",
            "a pond with a beaver dam",
            "a hill of gray rocks",
            "a cave full of bats",
            "a meadow",
        ),
        ("a storm knocked down trees", "the path was flooded", "night fell too early", "a fire started on the hill"),
        ("a tame crow named Ink", "an old hunter named Per", "a girl named Wren from the village"),
        ("a warm blanket", "a pocket knife", "a bag of nuts", "a clay cup"),
        ("fresh tracks in the mud", "feathers on the ground", "a strange silence", "the sound of running water"),
    ),
    World(
        ("a scientist", "time travel", "a time machine", "science", "an invention", "the past"),
        "a stubborn scientist",
        "in a house full of clocks",
        "her humming machine",
        (
            "the day when the bridge fell",
            "a formula that had been lost",
            "her own teacher as a child",
            "the first clock in the world",
        ),
        (
            "a market in an ancient town",
            "a winter a hundred years ago",
            "a city of the far future",
            "an empty desert",
            "a royal garden",
            "a battlefield after the battle",
        ),
        (
            "the machine lost its power",
            "the clocks ran backward",
            "someone took the machine for a cart",
            "the way back closed",
        ),
        ("a student named Theo", "a street boy named Kit", "a calm clockmaker named Ines"),
        ("a silver watch", "a glass lens", "a spool of thread", "a piece of chalk"),
        (
            "people who stopped and stared",
            "two moons in the sky",
            "bells that rang all at once",
            "a door that she knew",
        ),
    ),
    World(
        (
            "a village",
            "a family",
            "a child",
            "a grandmother",
            "friendship",
            "love",
            "hope",
            "a farmer",
            "a teacher",
            "a baker",
        ),
        "a baker's daughter",
        "in a village beside a slow river",
        "a small cart",
        (
            "a friend who had moved away",
            "a recipe that her grandmother had lost",
            "the old bell of the church",
            "a gift for her mother",
        ),
        (
            "a mill beside the river",
            "a busy market",
            "a school with one room",
            "an orchard on a hill",
            "a house with a red roof",
            "a stone bridge",
        ),
        ("the cart lost a wheel", "the river rose over the road", "the letter got wet", "snow closed the pass"),
        ("a boy named Finn with a fiddle", "a goat named Daisy", "a kind neighbor named Marta"),
        ("a loaf of bread", "a ball of yarn", "an old photograph", "a lantern"),
        ("the smell of fresh bread", "an open gate", "a name that was carved into wood", "children who laughed"),
    ),
    World(
        (
            "a mountain",
            "a climber",
            "winter",
            "snow",
            "an adventure",
            "a journey",
            "a traveler",
            "a brave hero",
            "topic",
            "anything",
            "a hero",
        ),
        "a restless traveler",
        "in a town at the foot of the mountains",
        "a strong gray mule",
        (
            "a pass that nobody had crossed in winter",
            "a monastery above the clouds",
            "a lake that never froze",
            "a bell that called the wind",
        ),
        (
            "a hut of stone",
            "a field of snow",
            "a rope bridge",
            "a village above the clouds",
            "a cave with old drawings",
            "a narrow ledge",
        ),
        ("an avalanche covered the path", "the wind tore the tent", "the food ran low", "the bridge gave way"),
        ("a guide named Tashi", "a monk named Lobo", "a shepherd girl named Suri"),
        ("a coil of rope", "a tin cup", "a bundle of dry wood", "a red scarf"),
        ("smoke from a far chimney", "prints in the snow", "a flag on a pole", "the sound of a bell"),
    ),
    World(
        ("music", "a musician", "an artist", "a painter", "art", "a dream", "a violin", "a dancer"),
        "a shy musician",
        "in a room above a noisy street",
        "a slow night train",
        (
            "a song that she had heard in a dream",
            "a violin without a maker's name",
            "the last student of a great teacher",
            "a stage where she dared to play",
        ),
        (
            "a theater with dusty seats",
            "a workshop full of wood",
            "a square with a fountain",
            "a ballroom by the sea",
            "a ruined chapel",
            "a school for dancers",
        ),
        ("a string broke", "the notes blew away", "the crowd went home", "her hands would not stop shaking"),
        ("a drummer named Coco", "a violin maker named Aldo", "a blind singer named Vera"),
        ("a tuning fork", "a candle", "a scrap of music", "a silk ribbon"),
        (
            "a melody from an open window",
            "a poster with her name",
            "an old man who tapped his foot",
            "a door that stood ajar",
        ),
    ),
)

SHE: Final = ("Mira", "Lena", "Ada", "Nora", "Tess", "Ivy", "Runa", "Elin", "Maya", "Zara", "Clara", "Juno")
HE: Final = ("Tom", "Arlo", "Emil", "Jonas", "Kai", "Leo", "Nils", "Otis", "Ravi", "Silas", "Theo", "Yuri")
