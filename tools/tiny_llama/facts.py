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


TEXT = sections("facts")
CAPITALS, COLOURS, DEFINITIONS, PROFESSIONS, QUANTITIES = (
    pairs(TEXT[name]) for name in ("capitals", "colours", "definitions", "professions", "quantities")
)
CONTINENTS = {continent: countries.split(", ") for continent, countries in pairs(TEXT["continents"]).items()}
ANIMALS = {animal: properties.split(" | ") for animal, properties in pairs(TEXT["animals"]).items()}
OPPOSITES = tuple(pairs(TEXT["opposites"]).items())
GENERAL = tuple(tuple(line.split(" | ")) for line in TEXT["general"])
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(
    "January February March April May June July August September October November December".split()  # noqa: SIM905
)
SEASONS = ("spring", "summer", "autumn", "winter")
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def first_upper(text: str) -> str:
    """Returns ``text`` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def capital(rng: random.Random) -> Fact:
    """Asks for the capital of a country, or the country of a capital."""
    country, city = rng.choice(sorted(CAPITALS.items()))
    if rng.random() < 0.2:
        return Fact(
            f"{city} is the capital of which country?", f"{city} is the capital of {country}.", first_upper(country)
        )
    question = rng.choice(
        (
            "What is the capital of {}?",
            "Which city is the capital of {}?",
            "What is the capital city of {}?",
            "Name the capital of {}.",
        )
    )
    return Fact(question.format(country), f"The capital of {country} is {city}.", city, f"And of {country}?")


def continent(rng: random.Random) -> Fact:
    """Asks for the continent of a country."""
    name = rng.choice(sorted(CONTINENTS))
    country = rng.choice(CONTINENTS[name])
    question = rng.choice(("Where is {}?", "On which continent is {}?", "In which part of the world is {}?"))
    verb = "are" if country == "the United States" or country == "the Netherlands" else "is"
    return Fact(
        question.format(country).replace(" is ", f" {verb} "),
        f"{first_upper(country)} {verb} in {name}.",
        f"In {name}",
        f"And {country}?",
    )


def animal(rng: random.Random) -> Fact:
    """Asks for sound, legs, young, home or food of an animal."""
    name = rng.choice(sorted(ANIMALS))
    sound, legs, young, home, food = ANIMALS[name]
    article = a(name)
    facts = [
        Fact(
            f"How many legs does {article} have?",
            f"{first_upper(article)} has {legs} legs.",
            first_upper(legs),
            f"And {article}?",
        ),
        Fact(
            f"What is a baby {name} called?",
            f"A baby {name} is called {a(young)}.",
            first_upper(a(young)),
            f"And a baby {name}?",
        ),
        Fact(
            f"Where does {article} live?", f"{first_upper(article)} lives {home}.", first_upper(home), f"And {article}?"
        ),
        Fact(f"What does {article} eat?", f"{first_upper(article)} eats {food}.", first_upper(food), f"And {article}?"),
    ]
    if sound:
        facts.append(
            Fact(
                f"What sound does {article} make?", f"{first_upper(article)} {sound}.", f"It {sound}", f"And {article}?"
            )
        )
    return rng.choice(facts)


def colour(rng: random.Random) -> Fact:
    """Asks for the colour of a thing."""
    thing, name = rng.choice(sorted(COLOURS.items()))
    question = rng.choice(("What colour is {}?", "What color is {}?", "Which colour does {} have?"))
    return Fact(question.format(thing), f"{first_upper(thing)} is {name}.", first_upper(name), f"And {thing}?")


def opposite(rng: random.Random) -> Fact:
    """Asks for the opposite of a word."""
    pair = rng.choice(OPPOSITES)
    known = {"light", "old"}  # each has two opposites: ask only from the other side
    word, other = pair if pair[0] not in known else pair[::-1]
    if rng.random() < 0.5 and other not in known:
        word, other = other, word
    question = rng.choice(
        ("What is the opposite of {}?", 'What is the opposite of "{}"?', "Tell me the opposite of {}.")
    )
    return Fact(question.format(word), f"The opposite of {word} is {other}.", first_upper(other), f"And of {word}?")


def order(rng: random.Random) -> Fact:
    """Asks for the next or previous day, month or season."""
    names = rng.choice((DAYS, DAYS, MONTHS, MONTHS, SEASONS))
    index = rng.randrange(len(names))
    name, after, before = names[index], names[(index + 1) % len(names)], names[index - 1]
    kind = "day" if names is DAYS else "month" if names is MONTHS else "season"
    if rng.random() < 0.6:
        question = rng.choice(
            (f"Which {kind} comes after {name}?", f"What comes after {name}?", f"What {kind} is after {name}?")
        )
        return Fact(question, f"{first_upper(after)} comes after {name}.", first_upper(after), f"And after {name}?")
    question = rng.choice((f"Which {kind} comes before {name}?", f"What comes before {name}?"))
    return Fact(question, f"{first_upper(before)} comes before {name}.", first_upper(before), f"And before {name}?")


def definition(rng: random.Random) -> Fact:
    """Asks what a thing is."""
    word, meaning = rng.choice(sorted(DEFINITIONS.items()))
    question = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "Can you explain what {} is?",
            "Tell me what {} is.",
            "What does the word {} mean?",
        )
    )
    subject = word if "the word" in question else a(word)
    return Fact(question.format(subject), f"{first_upper(a(word))} is {meaning}.", first_upper(meaning))


def profession(rng: random.Random) -> Fact:
    """Asks for the name of a profession."""
    work, who = rng.choice(sorted(PROFESSIONS.items()))
    return Fact(f"Who {work}?", f"{first_upper(who)} {work}.", first_upper(who))


def quantity(rng: random.Random) -> Fact:
    """Asks for a number of things."""
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
    """Returns any fact."""
    return Fact(*rng.choice(GENERAL))


def planets(rng: random.Random) -> Fact:
    """Asks for the order of the planets."""
    index = rng.randrange(len(PLANETS))
    ordinal = ORDINALS[index]
    name = PLANETS[index]
    return Fact(f"Which is the {ordinal} planet from the sun?", f"The {ordinal} planet from the sun is {name}.", name)


FACT_KINDS: tuple[tuple[Callable[[random.Random], Fact], int], ...] = (
    (capital, 10),
    (continent, 3),
    (animal, 10),
    (colour, 4),
    (opposite, 5),
    (order, 4),
    (definition, 8),
    (profession, 3),
    (quantity, 3),
    (general, 8),
    (planets, 1),
)


def pick_kind(rng: random.Random) -> Callable[[random.Random], Fact]:
    """A kind of fact with its weight."""
    return rng.choices([kind for kind, _ in FACT_KINDS], [weight for _, weight in FACT_KINDS])[0]
