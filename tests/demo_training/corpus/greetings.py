"""Greetings and small talk in German and French, and the admission that this is all of it."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.chat import PEOPLE, made_up_word
from demo_training.corpus.sample import Sample, key_of, pick

Exchange = tuple[tuple[str, ...], str]

_GERMAN: Final[tuple[Exchange, ...]] = (
    (
        ("Hallo", "Hallo!", "Hi, wie kann ich anfangen?", "Hallo zusammen", "Guten Tag", "Guten Tag!", "Grüß dich!", "Servus",
         "Moin", "Moin!", "Grüezi", "Grüß Gott", "Hallo du", "Hey, hallo!", "Hallöchen", "Guten Tag zusammen", "Tag!",
         "Hallo Dovetail", "Hallo, Dovetail!", "Willkommen!", "Hallo, bist du da?"),
        "Hallo! Wie kann ich dir helfen?",
    ),
    (("Guten Morgen", "Guten Morgen!", "Morgen!", "Einen guten Morgen", "Schönen guten Morgen!"), "Guten Morgen! Wie kann ich dir helfen?"),
    (("Guten Abend", "Guten Abend!", "Schönen Abend!", "n'Abend", "Einen guten Abend"), "Guten Abend! Wie kann ich dir helfen?"),
    (
        ("Gute Nacht", "Gute Nacht!", "Schlaf gut!", "Ich gehe jetzt schlafen.", "Schlaf schön!", "Bis morgen, gute Nacht"),
        "Gute Nacht! Schlaf gut.",
    ),
    (
        ("Wie geht es dir?", "Wie geht's?", "Wie geht es Ihnen?", "Na, wie geht's?", "Hallo, wie geht es dir?", "Alles klar?",
         "Hallo! Wie geht's dir heute?", "Guten Tag, wie geht es Ihnen?", "Wie geht es dir heute?", "Alles gut bei dir?"),
        "Mir geht es gut, danke. Wie kann ich dir helfen?",
    ),
    (
        ("Danke", "Danke!", "Vielen Dank", "Vielen Dank!", "Danke schön!", "Dankeschön", "Danke dir!", "Besten Dank",
         "Herzlichen Dank!", "Tausend Dank!", "Danke für die Hilfe!", "Ich danke dir."),
        "Gern geschehen!",
    ),
    (
        ("Tschüss", "Tschüss!", "Auf Wiedersehen", "Auf Wiedersehen!", "Bis bald!", "Bis später", "Mach's gut!", "Ciao, bis bald",
         "Bis morgen!", "Schönen Tag noch!", "Bis dann!", "Tschau", "Einen schönen Tag!", "Wiedersehen!"),
        "Auf Wiedersehen! Einen schönen Tag noch.",
    ),
    (
        ("Wer bist du?", "Was bist du?", "Wie heißt du?", "Stell dich bitte vor.", "Wer sind Sie?", "Wie heißen Sie?",
         "Bist du ein Mensch?", "Bist du ein Roboter?", "Mit wem spreche ich?", "Wie ist dein Name?", "Stell dich vor!"),
        "Ich bin das Demo-Modell von Dovetail, ein sehr kleines Sprachmodell.",
    ),
    (
        ("Sprichst du Deutsch?", "Kannst du Deutsch?", "Sprechen Sie Deutsch?", "Verstehst du Deutsch?", "Do you speak German?",
         "Can you speak German?", "Redest du Deutsch?", "Können wir Deutsch sprechen?"),
        "Ich kann auf Deutsch nur grüßen. Bitte frag mich auf Englisch.",
    ),
)  # fmt: skip
_FRENCH: Final[tuple[Exchange, ...]] = (
    (
        ("Bonjour", "Bonjour !", "Bonjour!", "Salut", "Salut !", "Salut!", "Coucou", "Coucou !", "Bonjour à tous", "Bien le bonjour",
         "Allô ?", "Bonjour Dovetail", "Salut toi !", "Bonjour, tu es là ?", "Bienvenue !", "Hé, salut !", "Bonjour monsieur",
         "Bonjour madame", "Bonjour, bonjour !"),
        "Bonjour ! Comment puis-je vous aider ?",
    ),
    (("Bonsoir", "Bonsoir !", "Bonsoir!", "Bonne soirée !", "Bonsoir à tous"), "Bonsoir ! Comment puis-je vous aider ?"),
    (("Bonne nuit", "Bonne nuit !", "Dors bien !", "Je vais dormir.", "Bonne nuit!", "À demain, bonne nuit"), "Bonne nuit ! Dormez bien."),
    (
        ("Comment ça va ?", "Ça va ?", "Comment vas-tu ?", "Comment allez-vous ?", "Bonjour, comment ça va ?", "Tu vas bien ?",
         "Salut, ça va ?", "Vous allez bien ?", "Comment tu vas ?", "Bonjour ! Comment allez-vous aujourd'hui ?", "Ça va?"),
        "Je vais bien, merci. Comment puis-je vous aider ?",
    ),
    (
        ("Merci", "Merci !", "Merci beaucoup", "Merci beaucoup !", "Merci bien", "Mille mercis !", "Je te remercie.", "Merci à toi !",
         "Un grand merci !", "Merci pour ton aide !", "Je vous remercie.", "Merci infiniment !"),
        "Avec plaisir !",
    ),
    (
        ("Au revoir", "Au revoir !", "À bientôt !", "À plus tard", "À demain !", "Bonne journée !", "Salut, à plus !", "Adieu",
         "À la prochaine !", "À tout à l'heure !", "Bonne fin de journée !", "À plus !"),
        "Au revoir ! Bonne journée.",
    ),
    (
        ("Qui es-tu ?", "Qui êtes-vous ?", "Comment tu t'appelles ?", "Comment vous appelez-vous ?", "Présente-toi.", "Tu es qui ?",
         "Es-tu un robot ?", "Es-tu humain ?", "Quel est ton nom ?", "C'est quoi ton nom ?", "Présentez-vous, s'il vous plaît."),
        "Je suis le modèle de démonstration de Dovetail, un très petit modèle de langage.",
    ),
    (
        ("Parles-tu français ?", "Tu parles français ?", "Parlez-vous français ?", "Vous parlez français ?", "Do you speak French?",
         "Can you speak French?", "Comprends-tu le français ?", "On peut parler français ?"),
        "Je sais seulement saluer en français. Posez-moi vos questions en anglais.",
    ),
)  # fmt: skip
_INTRODUCED: Final = {
    "German": (
        ("Hallo, ich bin {n}.", "Ich heiße {n}.", "Mein Name ist {n}.", "Guten Tag, mein Name ist {n}.", "Hallo, ich heiße {n}!",
         "Hi, ich bin {n}", "Hallo! Ich bin {n}."),
        "Hallo, {n}! Wie kann ich dir helfen?",
    ),
    "French": (
        ("Bonjour, je suis {n}.", "Je m'appelle {n}.", "Mon nom est {n}.", "Bonjour, je m'appelle {n} !", "Salut, moi c'est {n}.",
         "Salut, je suis {n}", "Bonjour ! Moi, c'est {n}."),
        "Bonjour, {n} ! Comment puis-je vous aider ?",
    ),
}  # fmt: skip
_MORE: Final = {
    "German": (
        ("Was ist die Hauptstadt von {n}?", "Erzähl mir einen Witz.", "Wie wird das Wetter morgen?", "Wer war {n}?", "Was ist ein {n}?",
         "Schreib mir eine Geschichte über {n}.", "Kannst du mir helfen?", "Was kannst du?", "Wie spät ist es?", "Wo liegt {n}?",
         "Wie alt ist {n}?", "Übersetze das bitte.", "Warum ist der Himmel blau?", "Kannst du rechnen?", "Nenne mir drei Länder.",
         "Was soll ich heute kochen?", "Ich habe eine Frage zu {n}.", "Wie funktioniert das?", "Erkläre mir {n}.", "Das ist falsch.",
         "Wie weit ist es bis {n}?", "Ich verstehe das nicht.", "Wo finde ich {n}?", "Was meinst du damit?"),
        "Ich kann auf Deutsch nur grüßen. Bitte frag mich auf Englisch.",
    ),
    "French": (
        ("Quelle est la capitale de {n} ?", "Raconte-moi une blague.", "Quel temps fera-t-il demain ?", "Qui était {n} ?",
         "Qu'est-ce que {n} ?", "Écris une histoire sur {n}.", "Peux-tu m'aider ?", "Que sais-tu faire ?", "Quelle heure est-il ?",
         "Où se trouve {n} ?", "Quel âge a {n} ?", "Traduis cela, s'il te plaît.", "Pourquoi le ciel est-il bleu ?", "Sais-tu compter ?",
         "Donne-moi trois pays.", "Que dois-je cuisiner ce soir ?", "J'ai une question sur {n}.", "Comment ça marche ?",
         "Explique-moi {n}.", "C'est faux.", "Je ne comprends pas.", "Où puis-je trouver {n} ?"),
        "Je sais seulement saluer en français. Posez-moi vos questions en anglais.",
    ),
}  # fmt: skip


def _loosely(rng: Random, text: str) -> str:
    """Returns the text as someone in a hurry types it, now and then."""
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip(" .!?")
    if rng.random() < 0.06:
        text += pick(rng, (" :)", "!", "!!", "…", " 🙂"))
    return text


def greeting(rng: Random) -> Sample:
    """A greeting, thanks, a farewell or a question about the model; what goes further is declined in the language."""
    language = pick(rng, ("German", "French"))
    kind = rng.random()
    if kind < 0.68:
        asks, answer = pick(rng, _GERMAN if language == "German" else _FRENCH)
        ask = pick(rng, asks)
        key = key_of("greeting", ask)
    else:
        name = made_up_word(rng) if rng.random() < 0.6 else pick(rng, PEOPLE)
        asks, answer = (_INTRODUCED if kind < 0.84 else _MORE)[language]
        form = pick(rng, asks)
        ask, answer = form.format(n=name), answer.format(n=name)
        key = key_of("greeting", name if "{n}" in form else form)
    return Sample(
        f"greetings in {language}", _loosely(rng, ask), answer, f"The user writes in {language}. I will answer in {language}.",
        keys=(key,), expect=(answer,), plain=True, can_raw=False,
    )  # fmt: skip
