"""Generates questions about numbers: arithmetic, counting and comparisons."""

import random

from .facts import TEXT, Fact, make_fact

NUMBERS = TEXT["numbers"][0].split()
COUNTABLE = ("apples", "books", "eggs", "pens", "coins", "balls", "cookies", "stars")
OWNERS = ("Anna", "Tom", "Lily", "Max", "Sara", "Ben", "Mia", "Leo")


def ask_sum(rng: random.Random, x: int, sign: str, y: int, operation: str, answer: int) -> Fact:
    """Returns a question and its answer. Two examples of questions: What is 7 + 5? How much is 7 plus 5?

    ``sign`` is ``+``, and ``operation`` is the word for it, ``plus``.
    """
    expression, words = f"{x} {sign} {y}", f"{x} {operation} {y}"
    again = rng.choice((expression, words))
    return make_fact(rng, "sum", expression=expression, words=words, answer=answer, again=again)


def addition(rng: random.Random) -> Fact:
    """Returns a question that asks for the sum of two numbers. In about half of the questions, both numbers are at most
    10. In the others, the sum is at most 99.
    """
    if rng.random() < 0.55:
        x, y = rng.randint(0, 10), rng.randint(0, 10)
    else:
        x = rng.randint(1, 89)
        y = rng.randint(1, 99 - x) if rng.random() < 0.7 else rng.randint(1, 10)
    return ask_sum(rng, x, "+", y, "plus", x + y)


def subtraction(rng: random.Random) -> Fact:
    """Returns a question that asks for the difference of two numbers. The result is at least 0."""
    x = rng.randint(0, 20) if rng.random() < 0.6 else rng.randint(10, 99)
    y = rng.randint(0, min(x, 10)) if rng.random() < 0.7 else rng.randint(0, x)
    return ask_sum(rng, x, "-", y, "minus", x - y)


def multiplication(rng: random.Random) -> Fact:
    """Returns a question that asks for the product of two numbers from 0 to 10."""
    x, y = rng.randint(0, 10), rng.randint(0, 10)
    return ask_sum(rng, x, rng.choice("**x"), y, "times", x * y)


def apples(rng: random.Random) -> Fact:
    """Returns a word problem with a sum or a difference: a person gets or loses some things."""
    x, y = rng.randint(1, 10), rng.randint(1, 10)
    thing = rng.choice(COUNTABLE)
    name = rng.choice(OWNERS)
    if rng.random() < 0.5:
        return make_fact(rng, "things added", name=name, x=x, y=y, thing=thing, sum=x + y)
    return Fact(
        f"{name} has {x + y} {thing} and gives away {y}. How many {thing} are left?",
        f"{x + y} - {y} = {x}, so {x} {thing} {'is' if x == 1 else 'are'} left.".replace(
            f" 1 {thing}", f" 1 {thing[:-1]}"
        ),
        str(x),
    )


def neighbour(rng: random.Random) -> Fact:
    """Returns a question that asks for the next or previous number."""
    x = rng.randint(1, 99)
    if rng.random() < 0.5:
        return make_fact(rng, "number after", x=x, other=x + 1)
    return make_fact(rng, "number before", x=x, other=x - 1)


def comparison(rng: random.Random) -> Fact:
    """Returns a question that asks which of two numbers is larger, or whether a number is even."""
    x, y = rng.sample(range(100), 2)
    if rng.random() < 0.3:
        kind = "odd" if x % 2 else "even"
        return Fact(f"Is {x} even or odd?", f"{x} is {kind}.", kind.capitalize(), f"And {x}?")
    if rng.random() < 0.5:
        return Fact(f"Which number is larger, {x} or {y}?", f"{max(x, y)} is larger than {min(x, y)}.", str(max(x, y)))
    word = "Yes" if x > y else "No"
    return Fact(f"Is {x} larger than {y}?", f"{word}, {x} is {'larger' if x > y else 'smaller'} than {y}.", word)


def counting(rng: random.Random) -> Fact:
    """Returns a question that asks to count up or down, in digits or in words."""
    x = rng.randint(1, 15)
    y = min(20, x + rng.randint(3, 9))
    if rng.random() < 0.25:
        line = ", ".join(str(n) for n in range(y - x if y - x > 2 else 5, 0, -1))
        return Fact(f"Count down from {line.split(',')[0]}.", line, line)
    if rng.random() < 0.4:
        line = ", ".join(NUMBERS[x : y + 1])
        return Fact(f"Count from {NUMBERS[x]} to {NUMBERS[y]}.", line, line)
    return make_fact(rng, "count", x=x, y=y, line=", ".join(str(n) for n in range(x, y + 1)))


def number_fact(rng: random.Random) -> Fact:
    """Returns a random question about numbers, of any kind."""
    kinds = (addition, subtraction, multiplication, apples, neighbour, comparison, counting)
    return rng.choices(kinds, (10, 5, 5, 3, 1, 2, 3))[0](rng)
