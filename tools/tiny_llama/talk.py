"""Generates everyday conversation: greetings, questions about Tiny (the model), feelings, advice, jokes,
and questions that the model cannot answer.
"""

import random

from .stories import BOYS, GIRLS, a
from .tables import items, pairs, pick, sections

Pair = tuple[str, str]

TEXT = sections("talk")
SMALL_TALK = tuple(
    (said.split(" | "), answers.removeprefix("> ").split(" | "))
    for said, answers in zip(TEXT["small talk"][::2], TEXT["small talk"][1::2], strict=True)
)
JOKES = TEXT["jokes"]
RIDDLES = tuple(tuple(line.split(" | ")) for line in TEXT["riddles"])
LISTS = {kind: names.split(", ") for kind, names in pairs(TEXT["lists"]).items()}
TRANSLATIONS = {language: words.split(", ") for language, words in pairs(TEXT["translations"]).items()}
UNKNOWN_QUESTIONS, UNKNOWN_ANSWERS = TEXT["unknown questions"], TEXT["unknown answers"]
UNKNOWN_TOPICS = items(TEXT["unknown topics"])
REPEATABLE = ("moon", "stone", "cat", "river", "book", "star", "apple", "hat", "tree", "bird", "cake", "drum", "bell")
PETS = ("cat", "dog", "rabbit", "pony", "mouse", "bird", "llama")
PET_NAMES = ("Max", "Bella", "Coco", "Lucky", "Rocky", "Luna", "Milo", "Daisy")


def small_talk(rng: random.Random) -> Pair:
    """Returns a remark of a user, such as a greeting, and an answer."""
    said, answers = rng.choice(SMALL_TALK)
    return rng.choice(said), rng.choice(answers)


def small_talk_about(rng: random.Random, start: str) -> Pair:
    """Returns small talk about the topic whose first phrase begins with ``start``, for example ``Hello``."""
    said, answers = next(group for group in SMALL_TALK if group[0][0].startswith(start))
    return rng.choice(said), rng.choice(answers)


def joke(rng: random.Random) -> Pair:
    """Returns a request for a joke, and a joke."""
    return pick(rng, "joke"), rng.choice(JOKES)


def riddle(rng: random.Random) -> list[Pair]:
    """Returns a riddle, and its solution in the next exchange."""
    question, answer = rng.choice(RIDDLES)
    return [
        (pick(rng, "riddle"), question),
        (pick(rng, "giving up"), f"The answer is: {answer[0].lower()}{answer[1:]}"),
    ]


def listing(rng: random.Random) -> Pair:
    """Returns a question that asks for several things of a kind, and its answer: a sentence or a numbered list."""
    kind, names = rng.choice(sorted(LISTS.items()))
    count = rng.randint(2, 4)
    chosen = rng.sample(names, count)
    number = ("two", "three", "four")[count - 2]
    if rng.random() < 0.25:
        lines = (f"{i}. {name[0].upper()}{name[1:]}" for i, name in enumerate(chosen, 1))
        return pick(rng, "numbered list", number=number, kind=kind), "\n".join(lines)
    ask = pick(rng, "list", number=number, kind=kind)
    text = ", ".join(chosen[:-1]) + f" and {chosen[-1]}."
    return ask, text[0].upper() + text[1:]


def translation(rng: random.Random) -> Pair:
    """Returns a question that asks for a word in another language."""
    language = rng.choice(sorted(TRANSLATIONS))
    word, other = rng.choice(TRANSLATIONS[language]).split(" = ")
    return pick(rng, "translation", word=word, language=language), f"In {language}, {word} is {other}."


def unknown(rng: random.Random) -> Pair:
    """Returns a question that the model cannot answer, and an honest reply."""
    topics = rng.sample(UNKNOWN_TOPICS, 2)
    return rng.choice(UNKNOWN_QUESTIONS).format(*topics), rng.choice(UNKNOWN_ANSWERS)


def repeat(rng: random.Random) -> Pair:
    """Returns a request to repeat a phrase, and the phrase."""
    words = ["the " + w if rng.random() < 0.5 else w for w in rng.sample(REPEATABLE, 3)]
    phrase = rng.choice(
        (" ".join(words), f"I like {words[0]} and {words[1]}.", rng.choice(JOKES).split("? ")[1], ", ".join(words))
    )
    return pick(rng, "repeat", phrase=phrase), phrase


def memory(rng: random.Random) -> list[Pair]:
    """Returns two exchanges: the user mentions a name, and later asks for it."""
    if rng.random() < 0.6:
        name = rng.choice(GIRLS + BOYS)
        introduction = (pick(rng, "own name", name=name), pick(rng, "greeting by name", name=name))
        return [introduction, (pick(rng, "asking for the own name"), f"Your name is {name}.")]
    animal, name = rng.choice(PETS), rng.choice(PET_NAMES)
    words = {"animal": animal, "a": a(animal), "name": name}
    introduction = (pick(rng, "own pet", **words), pick(rng, "reply about a pet", **words))
    return [introduction, (f"What is my {animal} called?", f"Your {animal} is called {name}.")]
