"""Generates short rhymed poems from two couplets about a topic."""

import random

from .tables import sections

COUPLETS = sections("poems")
MASS = {"rain", "winter", "spring", "summer", "autumn"}
UNIQUE = {"sea", "moon", "sun", "night"}


def poem_topic(topic: str) -> str:
    """Returns the topic with its article in a request."""
    return topic if topic in MASS else f"the {topic}" if topic in UNIQUE else f"a {topic}"


def make_poem(rng: random.Random) -> tuple[str, str]:
    """Returns a topic and a poem of four lines about it."""
    topic = rng.choice(sorted(COUPLETS))
    couplets = rng.sample(COUPLETS[topic], 2)
    return topic, "\n".join(couplets).replace("/", "\n")


def poem_turns(rng: random.Random) -> tuple[str, str]:
    """Returns a request for a poem, and the poem."""
    topic, poem = make_poem(rng)
    forms = (
        "Write a short poem about {}.",
        "Write a poem about {}.",
        "Please write a poem about {}.",
        "Can you write a poem about {}?",
        "Tell me a poem about {}.",
        "I would like a poem about {}.",
        "Make a short poem about {}, please.",
    )
    anything = ("Write a poem.", "Tell me a poem.", "Do you know a poem?", "Please write a short poem.")
    request = rng.choice(anything) if rng.random() < 0.1 else rng.choice(forms).format(poem_topic(topic))
    return request, poem
