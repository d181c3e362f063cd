"""The command that creates API keys: ``python -m llm_serving.access new NAME`` prints a key and its line for the key
file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from llm_serving.access.key_store import KeyStore
from llm_serving.access.keys import (
    MAX_KEY_CHARS,
    MIN_KEY_CHARS,
    OPTION_NAMES,
    WORDS,
    KeyLineError,
    digest_of,
    key_line,
    new_secret,
    parse_keys,
    parse_line,
)
from llm_serving.errors import ConfigError

EXIT_USAGE = 2
"""Exit code of a wrong command line."""

_EPILOG = """\
examples:
  python -m llm_serving.access new alice --file keys.txt
      make a key for alice, print it, and add its line to keys.txt
  python -m llm_serving.access new batch --requests-in-flight 8 --tokens-per-minute 60000
      print a key on the first line, and the line of the key file on the second
  python -m llm_serving.access new prometheus --admin --file keys.txt
      make a key that may read /metrics
  python -m llm_serving.access hash alice < key.txt
      print the line of a key that was made elsewhere
  python -m llm_serving.access check keys.txt
      check a key file before the server reads it

exit code: 0 success, 2 a wrong option, key or file
"""


class _Log:
    """Writes the warnings and errors of the key store to standard error."""

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        if level == "warning":
            sys.stderr.write(f"warning: {fields.get('message')}\n")

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None:
        sys.stderr.write(f"error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llm_serving.access",
        description="Makes API keys and checks key files. The server keeps hashes only, so a key is shown once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make a key")
    known = commands.add_parser("hash", help="read a key from standard input, and make its line")
    check = commands.add_parser("check", help="check a key file")
    check.add_argument("file", help="file of serving_config.api_keys_file")
    for each in (new, known):
        each.add_argument("name", help="name of the key's owner, in logs and quotas")
        each.add_argument("--admin", action="store_true", help=_ADMIN_HELP)
        each.add_argument("--sessions", action="store_true", help="allow the export and import of sessions")
        for option in OPTION_NAMES:
            flag = "--" + option.replace("_", "-")
            each.add_argument(flag, dest=option, metavar="A,B" if option == "models" else "N", help=_HELP[option])
        each.add_argument("--file", help="add the line to this file, instead of printing it")
    return parser


_ADMIN_HELP = (
    "allow /metrics, /server_info, /requests, /profile, and changes of LoRA adapters, nodes, models and shadow serving"
)
_HELP = {
    "requests_in_flight": "maximum number of requests at a time",
    "requests_per_minute": "maximum number of requests per minute",
    "tokens_per_minute": "maximum number of prompt and output tokens per minute",
    "priority": "most urgent priority that requests may state (default 0; a smaller number is more urgent)",
    "models": "models that the key may use",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    options = build_parser().parse_args(argv)
    try:
        if options.command == "check":
            return _check(options.file)
        secret = new_secret() if options.command == "new" else _read_secret()
        return _add(options, secret)
    except (KeyLineError, ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE


def _check(file: str) -> int:
    keys = KeyStore(file, "", _Log())
    sys.stdout.write(f"{file}: {len(keys)} valid key(s)\n")
    return 0


def _read_secret() -> str:
    secret = sys.stdin.readline().strip()
    if not MIN_KEY_CHARS <= len(secret) <= MAX_KEY_CHARS or not secret.isascii() or " " in secret:
        raise KeyLineError(
            f"the key has {len(secret)} characters; use {MIN_KEY_CHARS} to {MAX_KEY_CHARS} random ones, of ASCII and "
            "without blanks. 'new' makes such a key"
        )
    return secret


def _add(options: argparse.Namespace, secret: str) -> int:
    words = [options.name, f"sha256:{digest_of(secret).hex()}"]
    words += [word for word in WORDS if getattr(options, word)]
    words += [f"{name}={value}" for name in OPTION_NAMES if (value := getattr(options, name)) is not None]
    if any(len(word.split()) != 1 for word in words):
        raise KeyLineError("a name or a value has a blank, or is empty")
    line = key_line(parse_line(" ".join(words)))
    if options.file:
        _append(options.file, line)
    if options.command == "new":
        sys.stdout.write(f"{secret}\n")
    if not options.file:
        sys.stdout.write(f"{line}\n")
    return 0


def _append(path: str, line: str) -> None:
    """Appends a line to a key file in one write, and creates the file if necessary.

    Raises KeyLineError if the file with the new line would not be valid, and OSError if it cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        text = file.read().decode("utf-8")
        separator = "" if not text or text.endswith("\n") else "\n"
        parse_keys(f"{text}{separator}{line}\n")
        file.write(f"{separator}{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
