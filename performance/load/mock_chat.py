"""Simulates several users of ``/chat`` or ``/stream_chat_post``, whose conversations have several rounds.

Prints each reply, and the characters per second of each user and of all users together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_serving.config.serving_section import DEFAULT_SERVER_PORT
from performance.program import client_threads

QUESTIONS = (
    "What is the capital of France?",
    "Tell me more about it.",
    "Write a short poem about the sea.",
    "What did I ask first?",
)
"""The questions that each user asks, one in each round. After the last question, the first one follows."""


class ChatError(Exception):
    """Raised if the server refused a request, or if a stream ended early."""


@dataclass(slots=True)
class UserResult:
    """The replies of one user."""

    replies: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds from request to complete reply, summed over the user's requests."""

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.replies))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the client. Returns 1 if a request failed."""
    arguments = _parser().parse_args(argv)
    start = time.monotonic()
    try:
        with client_threads(arguments.parallel) as pool:
            results = list(pool.map(lambda user: _converse(arguments, user), range(arguments.parallel)))
    except (ChatError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    _report(results, time.monotonic() - start)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Talk to a server's /chat as several users.", allow_abbrev=False)
    parser.add_argument("--url", default=f"http://127.0.0.1:{DEFAULT_SERVER_PORT}", help="address of the server")
    parser.add_argument("--parallel", type=_positive, default=4, metavar="N", help="users at the same time (default 4)")
    parser.add_argument("--rounds", type=_positive, default=2, metavar="N", help="questions of each user (default 2)")
    parser.add_argument("--question", action="append", metavar="TEXT", help="ask this; may be repeated")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="maximum length of a reply (default 64)"
    )
    parser.add_argument("--whole", action="store_true", help="use /chat, whose replies come as a whole")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _converse(arguments: argparse.Namespace, user: int) -> UserResult:
    """Returns the replies of one user, whose history grows with each round."""
    questions, history, result = arguments.question or QUESTIONS, [], UserResult()
    for number in range(arguments.rounds):
        query = questions[number % len(questions)]
        body = {
            "request_id": f"mock-{time.time_ns()}-{user}-{number}",
            "query": query,
            "role": "user",
            "history": history,
            "gen_kwargs": {"max_new_tokens": arguments.max_new_tokens},
        }
        start = time.monotonic()
        reply = _ask(arguments, body)
        result.seconds += time.monotonic() - start
        result.replies.append(reply)
        history = [*history, [query, reply]]
        print(f"user {user}, round {number + 1}: {reply!r}", flush=True)
    return result


def _ask(arguments: argparse.Namespace, body: dict[str, Any]) -> str:
    """Returns the reply to one question. Raises ChatError or OSError."""
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    path = "/chat" if arguments.whole else "/stream_chat_post"
    request = urllib.request.Request(arguments.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            if arguments.whole:
                return str(json.load(response)["response"])
            return _read_stream(response)
    except urllib.error.HTTPError as error:
        raise ChatError(f"{path}: {error.code}: {error.read().decode(errors='replace')}") from None


def _read_stream(lines: Any) -> str:
    """Returns the text of a stream, which must end with ``"flag": "end"``. Raises ChatError."""
    text = []
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise ChatError(f"/stream_chat_post: {event['error']}")
        text.append(event["delta"])
        if event.get("flag") == "end":
            return "".join(text)
    raise ChatError("/stream_chat_post: the stream ended without its last event")


def _report(results: Sequence[UserResult], seconds: float) -> None:
    for user, result in enumerate(results):
        rate = result.num_chars / max(result.seconds, 1e-9)
        print(f"user {user}: {result.num_chars} characters in {result.seconds:.2f} s, {rate:.1f} characters/s")
    total = sum(result.num_chars for result in results)
    rate = total / max(seconds, 1e-9)
    print(f"all {len(results)} users: {total} characters in {seconds:.2f} s, {rate:.1f} characters/s")
