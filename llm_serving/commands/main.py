"""The program ``llm-serving``: finds the sub-command and passes the other arguments to its program."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from llm_serving.commands.catalogue import COMMANDS, PROGRAM, MissingPackageError, find_command
from llm_serving.version import __version__

EXIT_USAGE = 2
"""Exit code of a wrong command line."""

_DESCRIPTION = "Serve large language models on MindSpore, talk to them, and measure them."
_EXAMPLES = """\
examples:
  %(prog)s serve                                  SmolLM2-135M-Instruct on http://127.0.0.1:8835
  %(prog)s serve --model FOLDER_OR_FILE           your own model
  %(prog)s serve --model Qwen/Qwen3-0.6B          a model of Hugging Face, downloaded once
  %(prog)s models                                 the models of this machine
  %(prog)s chat                                   talk to the server, in the terminal
  %(prog)s plan --model FOLDER_OR_FILE            the memory that it needs
  %(prog)s load -X 10 -T 30                       10 requests per second for 30 seconds
  %(prog)s COMMAND --help                         the options of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit code: 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = build_parser().parse_args(arguments[:1]).command
    command = find_command(name)
    assert command is not None, "the parser refuses other names"
    # ``argv`` is None only on the command line. Other callers must keep their signal handlers.
    if command.is_filter and argv is None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.argv[0] = f"{PROGRAM} {command.name}"  # argparse shows this as the program's name
    try:
        return command.load_main()(arguments[1:])
    except MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the first argument, the sub-command."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"llm-serving {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.summary, add_help=False)
    return parser
