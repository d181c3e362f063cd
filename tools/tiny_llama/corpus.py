"""Generates the training text: an endless stream of documents from a seed, each a plain text or a conversation.

The text for the training has short exercises (drills) between the documents: repeating words, remembering names, single
facts and sums. Conversations need the ability to copy earlier parts of the text (induction; Olsson et al., 2022). A
small model learns this sooner if half of the tokens in a text are copies. The tokenizer is trained without the
exercises.
"""

import random
from collections.abc import Iterator

from . import talk
from .facts import CAPITALS, Fact, pick_kind
from .stories import NOUNS, make_poem, make_story, poem_turns, story_request
from .sums import addition, multiplication, number_fact, subtraction
from .tables import pick, sections

Turn = tuple[str, str]
"""A message as (role, text). The role is "system", "user" or "assistant", or "text" for a plain document."""
Document = list[Turn]
Pair = tuple[str, str]

QUESTION_WORDS = frozenset(sections("wordings")["question words"][0].split())

DRILL_SHARE = 0.3
"""Probability that another exercise comes before the next document."""
WORDS = (*NOUNS, *CAPITALS.values())


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
    """Returns a key for the form of a question. If two questions have the same key, the second can be shortened.

    For example, "What is the capital of Spain?" becomes "And of Spain?".
    """
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
    """Yields random documents without end: about one plain document for three conversations."""
    rng = random.Random(seed)
    while True:
        yield plain(rng) if rng.random() < 0.28 else chat(rng)


def some_words(rng: random.Random) -> str:
    """Returns a few words or numbers."""
    chosen = [str(rng.randint(0, 99)) if rng.random() < 0.2 else rng.choice(WORDS) for _ in range(rng.randint(2, 9))]
    return rng.choice((" ", " ", ", ")).join(chosen)


def say_again(rng: random.Random) -> Document:
    """Returns a conversation in which the assistant repeats the user's words."""
    phrase = some_words(rng)
    return [("user", pick(rng, "repeat words", phrase=phrase)), ("assistant", phrase)]


def twice(rng: random.Random) -> Document:
    """Returns a text that repeats a few words two to four times, each time on a new line."""
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
    """Yields the training documents without end: the documents of ``seed``, with exercises between them."""
    rng = random.Random(seed + 1000)
    for document in documents(seed):
        while rng.random() < DRILL_SHARE:
            yield drill(rng)
        yield document
