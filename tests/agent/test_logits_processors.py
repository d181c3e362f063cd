"""Tests how an agent loads and calls the operator's logits processors, and the errors of processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.logits_processors import load_processors, process
from llm_serving.errors import AgentError, AgentStartError


class Doubles:
    """Doubles the logits, and adds the number of output tokens to the first of them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, prompt: Any, output: Any, logits: Any) -> None:
        assert (prompt.tolist(), len(logits)) == ([5, 6], self.vocab_size)
        logits *= 2
        logits[0] += len(output)


class Fails:
    def __init__(self, vocab_size: int) -> None:
        if vocab_size > 8:
            raise ValueError("too large")

    def __call__(self, prompt: Any, output: Any, logits: Any) -> None:
        raise KeyError("mine")


class Writes(Fails):
    def __call__(self, prompt: Any, output: Any, logits: Any) -> None:
        prompt[0] = 0


class NotCallable:
    def __init__(self, vocab_size: int) -> None:
        pass


def setter(value: float) -> Any:
    def sets(prompt: Any, output: Any, logits: Any) -> None:
        logits[:] = value

    return sets


def named(*names: str) -> list[str]:
    return [f"{__name__}:{name}" for name in names]


def test_processors_change_the_logits_in_their_order_and_no_history() -> None:
    processors = load_processors(named("Doubles", "Doubles"), 3)
    history, logits = np.array([5, 6, 7], np.int32), np.array([1, 2, 3], np.float32)
    process(processors, history, 2, logits)
    assert logits.tolist() == [2 * (2 * 1 + 1) + 1, 8, 12]
    assert history.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:A", "ModuleNotFoundError"),
        (f"{__name__}:Missing", "AttributeError"),
        (f"{__name__}:Fails", "too large"),
        (f"{__name__}:NotCallable", "cannot be called"),
    ],
)
def test_a_processor_that_cannot_be_made_stops_the_start(name: str, words: str) -> None:
    with pytest.raises(AgentStartError, match=words):
        load_processors([name], 9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_cannot_be_sampled_are_an_error(value: float) -> None:
    with pytest.raises(AgentError, match="'x' left NaN"):
        process([("x", setter(value))], np.array([5], np.int32), 1, np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("name", "words"), [("Fails", r"Fails' failed: KeyError\('mine'\)"), ("Writes", "Writes' failed: .*read-only")]
)
def test_an_error_of_a_processor_names_it(name: str, words: str) -> None:
    history = np.array([5], np.int32)
    with pytest.raises(AgentError, match=words):
        process(load_processors(named(name), 3), history, 1, np.zeros(3, np.float32))
    assert history.tolist() == [5]
