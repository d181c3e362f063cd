"""Generates short exercises for the training: repeating words, remembering names, single facts and sums.

A small model learns late to copy earlier parts of the text (induction; Olsson et al., 2022), but conversations need it.
Text in which half of the tokens are a copy teaches it sooner. The tokenizer is trained without these exercises.
"""

import random
from collections.abc import Iterator

from . import talk
from .corpus import Document, documents, vary
from .facts import CAPITALS, pick_kind
from .stories import ANIMALS, BOYS, COLOURS, FOODS, GIRLS, PEOPLE, PLACES, THINGS, make_story
from .sums import addition, multiplication, number_fact, subtraction
from .tables import pick

DRILL_SHARE = 0.3
WORDS = (*ANIMALS, *BOYS, *COLOURS, *FOODS, *GIRLS, *PEOPLE, *PLACES, *THINGS, *CAPITALS.values())


def some_words(rng: random.Random) -> str:
    """Returns a few words or numbers."""
    chosen = [str(rng.randint(0, 99)) if rng.random() < 0.2 else rng.choice(WORDS) for _ in range(rng.randint(2, 9))]
    return rng.choice((" ", " ", ", ")).join(chosen)


def say_again(rng: random.Random) -> Document:
    """Returns a conversation in which the assistant repeats the user's words."""
    phrase = some_words(rng)
    return [("user", pick(rng, "repeat words", phrase=phrase)), ("assistant", phrase)]


def twice(rng: random.Random) -> Document:
    """Returns the same words two to four times, one line each."""
    return [("text", "\n".join([some_words(rng)] * rng.randint(2, 4)))]


def remember(rng: random.Random) -> Document:
    """Returns a conversation in which the user mentions a name and asks for it later."""
    return [turn for said, answer in talk.memory(rng) for turn in (("user", said), ("assistant", answer))]


def one_fact(rng: random.Random) -> Document:
    """Returns one question about a fact or a number."""
    fact = number_fact(rng) if rng.random() < 0.5 else pick_kind(rng)(rng)
    return [("user", vary(rng, fact.question)), ("assistant", fact.answer)]


def sums(rng: random.Random) -> Document:
    """Returns a text of calculations with their results, one in each line."""
    kinds = (addition, addition, subtraction, multiplication)
    return [("text", "\n".join(rng.choice(kinds)(rng).answer for _ in range(rng.randint(1, 6))))]


def other_start(rng: random.Random) -> Document:
    """Returns a story whose first sentence is replaced by a shorter introduction of the hero and the place."""
    story = make_story(rng)
    hero = story.hero
    trait = f"{hero.trait} {hero.kind}"
    article = "an" if trait[0] in "aeiou" else "a"
    slots = {"at": f"{article} {trait}", "At": f"{article.capitalize()} {trait}", "H": hero.name, "p": story.place}
    start, deed = pick(rng, "story start", **slots), pick(rng, "story deed", **slots)
    end = story.text.index(". ") + 2
    return [("text", f"{start} {deed} {story.text[end:]}")]


def drill(rng: random.Random) -> Document:
    """Returns one of the six kinds of exercises, with fixed probabilities."""
    kinds = (say_again, twice, remember, one_fact, sums, other_start)
    return rng.choices(kinds, (20, 10, 12, 36, 12, 10))[0](rng)


def training_documents(seed: int) -> Iterator[Document]:
    """Yields the endless text of the training: the documents of ``seed`` with exercises between them."""
    rng = random.Random(seed + 1000)
    for document in documents(seed):
        while rng.random() < DRILL_SHARE:
            yield drill(rng)
        yield document
