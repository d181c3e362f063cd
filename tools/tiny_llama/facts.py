"""Generates small facts: questions with a full answer and a short one."""

import random
from collections.abc import Callable
from typing import NamedTuple

from .stories import a
from .tables import pairs, sections


class Fact(NamedTuple):
    """A question, its answer as a sentence and as a word or two, and a follow-up question of the same form."""

    question: str
    answer: str
    short: str
    again: str = ""


TEXT, WORDINGS = sections("facts"), sections("wordings")
CAPITALS, COLOURS, DEFINITIONS, PROFESSIONS, QUANTITIES = (
    pairs(TEXT[name]) for name in ("capitals", "colours", "definitions", "professions", "quantities")
)
CONTINENTS = {continent: countries.split(", ") for continent, countries in pairs(TEXT["continents"]).items()}
ANIMALS = {animal: properties.split(" | ") for animal, properties in pairs(TEXT["animals"]).items()}
OPPOSITES = tuple(pairs(TEXT["opposites"]).items())
GENERAL = tuple(tuple(line.split(" | ")) for line in TEXT["general"])
DAYS, MONTHS, SEASONS, PLANETS, ORDINALS = (
    tuple(TEXT[name][0].split()) for name in ("days", "months", "seasons", "planets", "ordinals")
)


def first_upper(text: str) -> str:
    """Returns ``text`` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def fill(line: str, slots: dict[str, object]) -> Fact:
    """Makes a fact from a line ``question | answer | short answer | follow-up``. Fills in the slots of the line."""
    words = {key: str(value) for key, value in slots.items()}
    words |= {first_upper(key): first_upper(word) for key, word in words.items()}
    return Fact(*line.format(**words).split(" | "))


def make_fact(rng: random.Random, section: str, **slots: object) -> Fact:
    """Makes a fact from a section of ``text/wordings.txt``.

    Takes a random question of the section, and the answers in its last line.
    """
    *questions, answers = WORDINGS[section]
    question = rng.choice(questions) if len(questions) > 1 else questions[0]
    return fill(f"{question} | {answers}", slots)


def capital(rng: random.Random) -> Fact:
    """Returns a question that asks for the capital of a country, or the country of a capital."""
    country, city = rng.choice(sorted(CAPITALS.items()))
    section = "country of a capital" if rng.random() < 0.2 else "capital"
    return make_fact(rng, section, country=country, city=city)


def continent(rng: random.Random) -> Fact:
    """Returns a question that asks for the continent of a country."""
    name = rng.choice(sorted(CONTINENTS))
    country = rng.choice(CONTINENTS[name])
    verb = "are" if country == "the United States" or country == "the Netherlands" else "is"
    return make_fact(rng, "continent", name=name, country=country, verb=verb)


def animal(rng: random.Random) -> Fact:
    """Returns a question that asks for sound, legs, young, home or food of an animal."""
    name = rng.choice(sorted(ANIMALS))
    sound, legs, young, home, food = ANIMALS[name]
    forms = WORDINGS["animal"] if sound else WORDINGS["animal"][:-1]
    slots = {"name": name, "a": a(name), "sound": sound, "legs": legs, "young": a(young), "home": home, "food": food}
    return fill(rng.choice(forms), dict(slots))


def colour(rng: random.Random) -> Fact:
    """Returns a question that asks for the colour of a thing."""
    thing, name = rng.choice(sorted(COLOURS.items()))
    return make_fact(rng, "colour", thing=thing, name=name)


def opposite(rng: random.Random) -> Fact:
    """Returns a question that asks for the opposite of a word."""
    pair = rng.choice(OPPOSITES)
    ambiguous = {"light", "old"}  # "light" and "old" have two opposites each, so no question asks for them
    word, other = pair if pair[0] not in ambiguous else pair[::-1]
    if rng.random() < 0.5 and other not in ambiguous:
        word, other = other, word
    return make_fact(rng, "opposite", word=word, other=other)


def order(rng: random.Random) -> Fact:
    """Returns a training question about the next or previous day, month or season, and its answer."""
    names = rng.choice((DAYS, DAYS, MONTHS, MONTHS, SEASONS))
    index = rng.randrange(len(names))
    kind = "day" if names is DAYS else "month" if names is MONTHS else "season"
    if rng.random() < 0.6:
        return make_fact(rng, "after", kind=kind, name=names[index], other=names[(index + 1) % len(names)])
    return make_fact(rng, "before", kind=kind, name=names[index], other=names[index - 1])


def definition(rng: random.Random) -> Fact:
    """Returns a question that asks what a thing is."""
    word, meaning = rng.choice(sorted(DEFINITIONS.items()))
    return make_fact(rng, "definition", word=word, a=a(word), meaning=meaning)


def profession(rng: random.Random) -> Fact:
    """Returns a question that asks for the name of a profession."""
    work, who = rng.choice(sorted(PROFESSIONS.items()))
    return make_fact(rng, "profession", work=work, who=who)


def quantity(rng: random.Random) -> Fact:
    """Returns a question that asks for a quantity, such as the days of a week."""
    phrase, amount = rng.choice(sorted(QUANTITIES.items()))
    verb, *rest = phrase.split(" ")[1:]
    tail = " ".join(rest)
    if verb == "are":
        answer = (
            f"There are {amount} {tail}."
            if not tail.startswith("in a football")
            else "A football team has eleven players."
        )
    elif tail.startswith("you see"):
        answer = "We see with two eyes."
    else:
        answer = f"{first_upper(tail.removesuffix(' have'))} has {amount}."
    return Fact(f"How many {phrase}?", answer, first_upper(amount))


def general(rng: random.Random) -> Fact:
    """Returns a random fact from the list ``GENERAL``."""
    return Fact(*rng.choice(GENERAL))


def planets(rng: random.Random) -> Fact:
    """Returns a question that asks for the order of the planets."""
    index = rng.randrange(len(PLANETS))
    return make_fact(rng, "planet", ordinal=ORDINALS[index], name=PLANETS[index])


KIND_WEIGHTS: dict[Callable[[random.Random], Fact], int] = {
    capital: 10, continent: 3, animal: 10, colour: 4, opposite: 5, order: 4, definition: 8, profession: 3,
    quantity: 3, general: 8, planets: 1,
}  # fmt: skip


def pick_kind(rng: random.Random) -> Callable[[random.Random], Fact]:
    """Returns one of the functions that make a fact, such as ``capital``. ``KIND_WEIGHTS`` has their probabilities."""
    return rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
