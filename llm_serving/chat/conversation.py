"""The conversation of a chat: the system prompt, the messages so far, and the figures of the last answer."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field

_UNSAFE = ("Cc", "Cs")
"""Unicode categories that are not printed: control characters and surrogates."""

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """The system prompt and the earlier messages, which are sent with the next question."""

    system: str | None = None
    history: list[Message] = field(default_factory=list)

    def with_question(self, text: str) -> list[Message]:
        """Returns all messages, followed by the question ``text``. Does not change the history."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.history, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Appends a question and its answer to the history. The answer is incomplete if the user stopped it."""
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forgets all questions and answers. The system prompt stays."""
        self.history.clear()


@dataclass(slots=True)
class AnswerTimes:
    """When the question was sent, and when the first and the last text of its answer arrived. All times are in seconds.
    """

    sent: float
    first: float | None = None
    last: float | None = None

    def saw_text(self, now: float) -> None:
        """Records the time at which a piece of text arrived."""
        self.first = now if self.first is None else self.first
        self.last = now

    def summary(self, tokens: int | None, finish_reason: str | None) -> str:
        """Returns the line of figures that is printed below an answer: tokens, tokens per second and time to first
        token.

        The rate leaves out the first token and the time before it.
        """
        if self.first is None or self.last is None:
            return "no text"
        parts = [f"{tokens} tokens"] if tokens is not None else []
        if tokens is not None and tokens > 1 and self.last > self.first:
            parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s")
        parts.append(f"first token after {self.first - self.sent:.2f} s")
        if finish_reason is None:
            parts.append("stopped")
        elif finish_reason == "length":
            parts.append("cut at the maximum length")
        return ", ".join(parts)


def printable(text: str) -> str:
    """Returns text of a model without control characters, which could change the terminal. Line ends and tabs stay."""
    return "".join(each if each in "\n\t" or unicodedata.category(each) not in _UNSAFE else "\ufffd" for each in text)
