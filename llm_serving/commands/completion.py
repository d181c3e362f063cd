"""Completion for shells: ``llm-serving completion bash`` prints a script for the shell, made by shtab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shtab

from llm_serving.commands.catalogue import COMMANDS, PROGRAM, MissingPackageError

_EXAMPLES = """\
examples:
  source <(llm-serving completion bash)
      for this shell
  llm-serving completion bash > ~/.local/share/bash-completion/completions/llm-serving
      for every new bash
  llm-serving completion zsh > ~/.zfunc/_llm-serving
      for zsh, with ~/.zfunc in $fpath
"""


def main(argv: Sequence[str]) -> int:
    """Prints the completion script and returns 0."""
    arguments = build_parser().parse_args(argv)
    sys.stdout.write(completion_script(arguments.shell) + "\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of this sub-command."""
    parser = argparse.ArgumentParser(
        description="Print a script that completes commands, options and values in a shell.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell")
    return parser


def completion_script(shell: str) -> str:
    """Returns the completion script. If the packages of a sub-command are not installed, the script completes the name
    of the sub-command, but not its options.
    """
    whole = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False)
    commands = whole.add_subparsers()
    for command in COMMANDS:
        try:
            parents = [command.load_parser()]
        except MissingPackageError:
            parents = []
        own = commands.add_parser(command.name, parents=parents, add_help=not parents, help=command.summary)
        own.description = command.summary
    return str(shtab.complete(whole, shell=shell))
