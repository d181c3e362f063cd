"""The main loop of a chat: reads lines, runs commands, and prints answers while they arrive."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from llm_serving.chat.client import ChatClient, ChatError
from llm_serving.chat.conversation import AnswerTimes, Conversation, printable

PROMPT = ">>> "
HELP = """\
/system TEXT   set the system prompt; without TEXT, show it
/reset         forget the conversation; the system prompt stays
/help          this list
/quit          end; so does Ctrl-D
Ctrl-C stops an answer. The part that has arrived stays in the conversation."""


class Terminal:
    """One chat between a user and a model."""

    def __init__(self, client: ChatClient, model: str, conversation: Conversation, options: dict[str, Any]) -> None:
        self._client, self._model, self._options = client, model, options
        self._conversation = conversation
        self._is_interactive = sys.stdin.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": lambda _: print_line(HELP),
        }

    def run(self) -> None:
        """Reads and answers lines until ``/quit`` or the end of the input."""
        if self._is_interactive:
            import readline  # noqa: F401 - importing it gives input() line editing and a history

            print_line(f"{self._model} at {self._client.url}; /help lists the commands, /quit ends")
        while True:
            try:
                line = input(PROMPT if self._is_interactive else "").strip()
            except KeyboardInterrupt:
                print_line("\n(Ctrl-D or /quit ends the chat)")
                continue
            except EOFError:
                return
            if line in ("/quit", "/exit"):
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        """Runs a command, or answers a question."""
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            print_line(f"{name} is not a command; /help lists the commands")
        else:
            command(rest.strip())

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        print_line(f"system prompt: {self._conversation.system or 'none'}")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        print_line("the conversation is empty")

    def _answer(self, question: str) -> None:
        """Prints the answer to a question while it arrives, then the answer's figures. Ctrl-C stops the answer."""
        times, text, tokens, reason = AnswerTimes(time.monotonic()), "", None, None
        is_reasoning = False
        pieces = self._client.stream(self._model, self._conversation.with_question(question), self._options)
        try:
            for piece in pieces:
                if piece.text:
                    times.saw_text(time.monotonic())
                    if is_reasoning and not piece.is_reasoning:
                        sys.stdout.write("\n\n")
                    is_reasoning = piece.is_reasoning
                    text += "" if is_reasoning else piece.text
                    sys.stdout.write(printable(piece.text))
                    sys.stdout.flush()
                tokens = piece.tokens if piece.tokens is not None else tokens
                reason = piece.finish_reason or reason
        except KeyboardInterrupt:
            pass
        except ChatError as error:
            print_line(f"\nerror: {printable(str(error))}" if text else f"error: {printable(str(error))}")
            return
        finally:
            pieces.close()
        if text:
            self._conversation.add(question, text)
        print_line(f"\n[{times.summary(tokens, reason)}]")


def print_line(text: str) -> None:
    """Prints a line immediately."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
