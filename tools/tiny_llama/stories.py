"""Generates stories from templates (twelve plots in many wordings, random heroes, places and things), and poems."""

import random
from dataclasses import dataclass

from .tables import items, pick, sections

TEXT = sections("stories")
GIRLS, BOYS, ANIMALS, PEOPLE, TRAITS, PLACES, THINGS, COLOURS, FOODS, SKILLS = (
    items(TEXT[name])
    for name in ("girls", "boys", "animals", "people", "traits", "places", "things", "colours", "foods", "skills")
)
NOUNS = (*ANIMALS, *BOYS, *COLOURS, *FOODS, *GIRLS, *PEOPLE, *PLACES, *THINGS)
OPENINGS, ENDINGS = TEXT["openings"], TEXT["endings"]
PLOTS = tuple(
    tuple(tuple(step.split(" | ")) for step in lines) for name, lines in TEXT.items() if name.startswith("plot: ")
)
COUPLETS = sections("poems")
MASS_NOUNS, UNIQUE_NOUNS = {"rain", "winter", "spring", "summer", "autumn"}, {"sea", "moon", "sun", "night"}
IS_FEMALE = {"king": False, "prince": False, "queen": True, "princess": True, "fisherman": False}


def a(noun: str) -> str:
    """Returns the noun phrase with its indefinite article."""
    return ("an " if noun[0] in "aeiou" and not noun.startswith("uni") else "a ") + noun


def place_name(place: str) -> str:
    """Returns the place with its article: "the sea", but "a" or "an" for all other places."""
    return "the sea" if place == "sea" else a(place)


@dataclass(frozen=True)
class Hero:
    """The hero of a story. ``kind`` is an animal, a trade, "girl" or "boy"."""

    name: str
    kind: str
    trait: str
    subject: str
    object: str
    possessive: str


@dataclass(frozen=True)
class Story:
    """A complete story, and the hero, place and thing by which a user can ask for it."""

    text: str
    hero: Hero
    place: str
    thing: str


def make_hero(rng: random.Random, avoid: str = "") -> Hero:
    """Returns a random hero, whose kind is not ``avoid``."""
    girl = rng.random() < 0.5
    name = rng.choice(GIRLS if girl else BOYS)
    group = rng.random()
    kind = rng.choice(ANIMALS) if group < 0.65 else ("girl" if girl else "boy") if group < 0.85 else rng.choice(PEOPLE)
    girl = IS_FEMALE.get(kind, girl)
    if girl != (name in GIRLS):
        name = rng.choice(GIRLS if girl else BOYS)
    if kind == avoid:
        return make_hero(rng, avoid)
    words = ("she", "her", "her") if girl else ("he", "him", "his")
    return Hero(name, kind, rng.choice(TRAITS), *words)


def story_words(rng: random.Random, hero: Hero, friend: Hero, place: str, thing: str) -> dict[str, str]:
    """Returns the words for the slots of a plot's sentences, such as names and pronouns."""
    coloured = a(f"{rng.choice(COLOURS)} {thing}")
    words = {
        "p": place,
        "t": thing,
        "ct": coloured,
        "f": rng.choice(FOODS),
        "s": rng.choice(SKILLS),
        "at": a(f"{hero.trait} {hero.kind}"),
        "fa": a(friend.kind),
        "ap": place_name(place),
        "A_f": a(friend.kind).capitalize(),
    }
    for name, prefix, who in (("H", "", hero), ("F", "f", friend)):
        pronouns = {f"{prefix}she": who.subject, f"{prefix}her": who.object, f"{prefix}hers": who.possessive}
        words |= {name: who.name, f"{prefix}k": who.kind, **pronouns}
    words["She"], words["Hers"] = hero.subject.capitalize(), hero.possessive.capitalize()
    return words


def make_story(rng: random.Random) -> Story:
    """Returns a story of about 60 to 150 words with its hero's kind, the place and (nearly always) the thing."""
    hero = make_hero(rng)
    friend = make_hero(rng, avoid=hero.kind)
    while friend.name == hero.name:
        friend = make_hero(rng, avoid=hero.kind)
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    words = story_words(rng, hero, friend, place, thing)
    steps = [rng.choice(OPENINGS), *(rng.choice(step) for step in rng.choice(PLOTS))]
    if rng.random() < 0.6:
        steps.append(rng.choice(ENDINGS))
    sentences = " ".join(step.format(**words) for step in steps)
    return Story(sentences, hero, place, thing)


def story_request(rng: random.Random, story: Story) -> str:
    """Returns a request for this story, which mentions only things that the story contains."""
    kind = story.hero.kind
    subjects = [a(kind), f"{a(story.hero.trait)} {kind}", f"{a(kind)} named {story.hero.name}"]
    if story.place in story.text:
        subjects += [f"{a(kind)} and {place_name(story.place)}"] * 3
    if story.thing in story.text:
        subjects += [f"{a(kind)} and {a(story.thing)}", f"{a(kind)} and {a(story.thing)}"]
    subject = rng.choice(subjects)
    return pick(rng, "any story") if rng.random() < 0.12 else pick(rng, "story", subject=subject)


def make_poem(rng: random.Random) -> tuple[str, str]:
    """Returns a topic and a rhymed poem about it: two couplets, which are four lines."""
    topic = rng.choice(sorted(COUPLETS))
    couplets = rng.sample(COUPLETS[topic], 2)
    return topic, "\n".join(couplets).replace("/", "\n")


def poem_turns(rng: random.Random) -> tuple[str, str]:
    """Returns a request for a poem, and the poem."""
    topic, poem = make_poem(rng)
    named = topic if topic in MASS_NOUNS else f"the {topic}" if topic in UNIQUE_NOUNS else f"a {topic}"
    return pick(rng, "any poem") if rng.random() < 0.1 else pick(rng, "poem", topic=named), poem
