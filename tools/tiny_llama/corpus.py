"""Generates the training text: an endless stream of documents from a seed, each a plain text or a conversation."""

import random
from collections.abc import Iterator

from . import talk
from .facts import Fact, pick_kind
from .stories import make_poem, make_story, poem_turns, story_request
from .sums import addition, number_fact, subtraction
from .tables import pick, sections

Turn = tuple[str, str]
"""A message as (role, text). The role is "system", "user" or "assistant", or "text" for a plain document."""
Document = list[Turn]
Pair = tuple[str, str]

QUESTION_WORDS = frozenset(sections("wordings")["question words"][0].split())


def any_fact(rng: random.Random) -> Fact:
    """Returns a random fact, or a question about numbers."""
    return number_fact(rng) if rng.random() < 0.4 else pick_kind(rng)(rng)


def vary(rng: random.Random, question: str) -> str:
    """Varies a question as people type it: polite, in lower case, or without its question mark."""
    lowered = question[0].lower() + question[1:] if question.split()[0] in QUESTION_WORDS else question
    draw = rng.random()
    if draw < 0.05 and question.endswith("?"):
        return f"Please tell me: {lowered}"
    if draw < 0.1:
        return rng.choice(("Hi! ", "Hello! ", "Hi, ", "Hey Tiny, ", "Tiny, ")) + question
    if draw < 0.15:
        return lowered.rstrip("?. ")
    if draw < 0.2:
        return lowered
    if draw < 0.23:
        return question.rstrip("?. ")
    return question


def follow_up(rng: random.Random) -> list[Pair]:
    """Returns a question, and one or two short questions after it, such as "And of Spain?", with answers."""
    kind = rng.choice((number_fact, pick_kind(rng), pick_kind(rng)))
    pairs: list[Pair] = []
    head = ""
    for _ in range(40):
        fact = kind(rng)
        if not fact.again:
            continue
        if not pairs:
            head = same_form(fact)
            pairs.append((fact.question, fact.answer))
        elif same_form(fact) == head and all(fact.answer != answer for _, answer in pairs):
            pairs.append((fact.again, fact.answer))
        if len(pairs) == 3:
            break
    return pairs[: rng.randint(2, 3)] or [small_pair(rng)]


def same_form(fact: Fact) -> str:
    """Returns words that two questions must share, so that the second can be shortened ("And of Spain?")."""
    words = fact.question.replace("color", "colour").split()
    return " ".join(words[:2]) + (
        " " + fact.again.split()[1] if fact.again.startswith(("And of", "And after", "And before")) else words[-1]
    )


def small_pair(rng: random.Random) -> Pair:
    """Returns a question or remark of one line (fact, small talk, joke, ...) with its answer."""
    draw = rng.random()
    if draw < 0.5:
        fact = any_fact(rng)
        if rng.random() < 0.06:
            return f"{fact.question} {pick(rng, 'short answers')}", fact.short
        return vary(rng, fact.question), fact.answer
    if draw < 0.74:
        said, answer = talk.small_talk(rng)
        return (said.lower().rstrip("!.?") if rng.random() < 0.12 else said), answer
    if draw < 0.79:
        return talk.joke(rng)
    if draw < 0.85:
        return talk.listing(rng)
    if draw < 0.89:
        return talk.translation(rng)
    if draw < 0.92:
        return talk.repeat(rng)
    return talk.unknown(rng)


def long_pair(rng: random.Random) -> Pair:
    """Returns a request for a story or a poem, and the text."""
    if rng.random() < 0.22:
        return poem_turns(rng)
    story = make_story(rng)
    return story_request(rng, story), story.text


def conversation(rng: random.Random) -> list[Pair]:
    """Returns one to eight exchanges of user and assistant."""
    pairs: list[Pair] = []
    if rng.random() < 0.3:
        greeting = rng.choice(("Hello", "Hello", "Good morning", "How are you", "What is your name"))
        pairs.append(talk.small_talk_about(rng, greeting))
    remembered = talk.memory(rng) if rng.random() < 0.25 else []
    pairs += remembered[:1]
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        draw = rng.random()
        if draw < 0.15:
            pairs.append(long_pair(rng))
        elif draw < 0.3:
            pairs += follow_up(rng)
        elif draw < 0.33:
            pairs += talk.riddle(rng)
        else:
            pairs.append(small_pair(rng))
    pairs += remembered[1:]
    if rng.random() < 0.25:
        pairs.append(talk.small_talk_about(rng, rng.choice(("Thank you", "Thank you", "Goodbye"))))
    return pairs or [small_pair(rng)]


def short_conversation(rng: random.Random) -> Document:
    """Returns a system prompt that asks for short answers, and facts with short answers."""
    document: Document = [("system", pick(rng, "short answers"))]
    for _ in range(rng.randint(1, 4)):
        fact = any_fact(rng)
        document += [("user", vary(rng, fact.question)), ("assistant", fact.short)]
    return document


def chat(rng: random.Random) -> Document:
    """Returns a conversation, sometimes with a system prompt."""
    draw = rng.random()
    if draw < 0.05:
        return short_conversation(rng)
    document: Document = [("system", pick(rng, "system prompt"))] if draw < 0.25 else []
    pairs = [long_pair(rng)] if draw > 0.85 else [small_pair(rng)] if draw > 0.6 else conversation(rng)
    for said, answer in pairs:
        document += [("user", said), ("assistant", answer)]
    return document


def plain(rng: random.Random) -> Document:
    """Returns a text without roles: a story, several facts, a poem, or questions and answers."""
    draw = rng.random()
    if draw < 0.57:
        return [("text", make_story(rng).text)]
    if draw < 0.76:
        return [("text", " ".join(pick_kind(rng)(rng).answer for _ in range(rng.randint(1, 5))))]
    if draw < 0.83:
        fact = any_fact(rng)
        return [("text", f"Question: {fact.question}\nAnswer: {fact.answer}")]
    if draw < 0.95:
        kinds = (addition, addition, subtraction)
        return [("text", "\n".join(rng.choice(kinds)(rng).answer for _ in range(rng.randint(1, 12))))]
    return [("text", make_poem(rng)[1])]


def documents(seed: int) -> Iterator[Document]:
    """Yields the endless stream of ``seed``: about one plain document per three conversations."""
    rng = random.Random(seed)
    while True:
        yield plain(rng) if rng.random() < 0.28 else chat(rng)
