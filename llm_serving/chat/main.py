"""The program ``llm-serving chat``: parses the command line, starts a server if necessary, and runs the chat."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

from llm_serving.chat.client import DEFAULT_WAIT_S, ChatClient, ChatError
from llm_serving.chat.conversation import Conversation
from llm_serving.chat.started_server import started_server
from llm_serving.chat.terminal import Terminal
from llm_serving.cli import add_model_options
from llm_serving.config.serving_section import DEFAULT_SERVER_PORT

EXIT_USAGE = 2
"""Exit code of a wrong command line."""
API_KEY_VARIABLE = "LLM_SERVING_API_KEY"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_SERVER_PORT}"

_EXAMPLES = """\
examples:
  %(prog)s
      talk to the server on this machine; --port N if it has another port
  %(prog)s --model /models/llama --quantize int8
      start a server for the chat, and stop it at the end
  %(prog)s --url https://llm.example:8443 --system "Answer in one sentence."
      talk to a server elsewhere; the API key is in LLM_SERVING_API_KEY
  echo "What is the capital of Japan?" | %(prog)s --temperature 0
      one question

in the chat: /system TEXT, /reset, /help, /quit; Ctrl-C stops an answer
exit code: 0 the chat ended; 2 no server, or a wrong option
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chat and returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    options = _server_options(arguments)
    given = [f"--{name}" for name in ("url", "host", "port") if getattr(arguments, name) is not None]
    if options and given:
        parser.error(f"{given[0]} is for a server that runs; it cannot be used with options of a new one")
    if "--url" in given and len(given) > 1:
        parser.error(f"{given[1]} is a part of --url; give only one of them")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        with ExitStack() as owned:
            url = owned.enter_context(started_server(options)) if options else _address(arguments)
            _chat(arguments, url)
    except ChatError as error:
        sys.stderr.write(f"error: {error}\n")
        if not options and not given:
            sys.stderr.write("start a server with llm-serving serve, or add --model FOLDER_OR_FILE to start one here\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``llm-serving chat``."""
    parser = argparse.ArgumentParser(
        description="Talk to a model in the terminal: with a server that runs, or with one that this command starts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", help=f"address of the server (default: {DEFAULT_URL})")
    parser.add_argument("--host", help=f"instead of --url: host of the server (default: {DEFAULT_HOST})")
    parser.add_argument(
        "--port", type=int, metavar="N", help=f"instead of --url: port of the server (default: {DEFAULT_SERVER_PORT})"
    )
    parser.add_argument("--name", help="name of the model at the server (default: its first model)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE),
        help=f"sent as a bearer token (default: the environment variable {API_KEY_VARIABLE})",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the most probable token")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of tokens of an answer")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=DEFAULT_WAIT_S,
        metavar="S",
        help="maximum seconds to wait while the model of the server still loads (default: %(default)g)",
    )
    add_model_options(parser.add_argument_group("start a server for this chat"), config=None)
    return parser


def _seconds(text: str) -> float:
    """Returns a number of seconds of the command line. Raises ArgumentTypeError if it is negative or not finite."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"invalid number of seconds: '{text}'")


def _server_options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options with which the chat starts ``llm-serving serve``. Empty if the chat starts no server."""
    options = []
    for name in ("config", "model", "dtype", "quantize"):
        if (value := getattr(arguments, name)) is not None:
            options += [f"--{name}", value]
    options += ["--offline"] if options and arguments.offline else []
    return options + [word for override in arguments.overrides for word in ("--set", override)]


def _address(arguments: argparse.Namespace) -> str:
    """Returns the URL at which the chat expects a running server."""
    host = arguments.host or DEFAULT_HOST
    port = DEFAULT_SERVER_PORT if arguments.port is None else arguments.port
    return arguments.url or f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _chat(arguments: argparse.Namespace, url: str) -> None:
    client = ChatClient(url, arguments.api_key, wait_s=arguments.wait)
    models = client.models()
    model = arguments.name or (models[0] if models else "")
    if model not in models:
        raise ChatError(f"{client.url} has no model {model!r}; it has {', '.join(models) or 'none'}")
    sampling: dict[str, Any] = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    given = {name: value for name, value in sampling.items() if value is not None}
    Terminal(client, model, Conversation(arguments.system), given).run()


def _end(number: int, _: FrameType | None) -> None:
    """Handles a signal: raises SystemExit, so that the program also stops the server that it has started."""
    sys.exit(128 + number)
