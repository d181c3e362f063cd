"""The importer's program, from the command line to the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llm_serving.config.loader import parse_override
from llm_serving.errors import ConfigError
from tools.chat_import.importing import Import, Options, check_key, import_settings
from tools.chat_import.settings import ImportFailedError, Setting, read_settings
from tools.chat_import.writing import check_text, config_text, load_notes, with_defaults, write_checked

EXIT_USAGE = 2
"""Exit code of a wrong command line."""
_DESCRIPTION = """\
Makes a deployment config from the configuration.json of an older /chat server. Starts nothing.

There is no public description of this file. docs/chat_configuration.md lists the names that are known. Any other name
needs --map or --ignore. Nothing is left out silently. The config is only written if the server's loader accepts it, so
the model must be on this machine.
"""
_EPILOG = """\
exit code: 0 the config was written; 1 the file cannot be imported; 2 wrong usage

  %(prog)s configuration.json --output chat.yaml
  %(prog)s configuration.json --output chat.yaml --map net.listen=serving_config.server_port --ignore temperature
  %(prog)s configuration.json --output chat.yaml --set model_config.model_path=/models/my-model
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the configuration.json")
    parser.add_argument("--output", type=Path, metavar="CONFIG.yaml", help="file to write (default: standard output)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        dest="mapped",
        metavar="NAME=SECTION.KEY",
        help="import the setting NAME as this key; NAME may have dots, as in server.port; can be repeated",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        dest="ignored",
        metavar="NAME",
        help="leave out the setting or the object NAME; can be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="give a key this value, also instead of that of the file; the value is parsed as YAML; can be repeated",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the importer and returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        names = _names(options)
        if options.output is not None and options.output.exists() and not options.force:
            raise ImportFailedError(f"{options.output}: exists; --force replaces it")
        if options.output is not None and options.output.resolve() == options.file.resolve():
            raise ImportFailedError(f"{options.output}: is the file that is imported")
    except (ImportFailedError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return _run(options.file, options.output, names, force=options.force)
    except ImportFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _names(options: argparse.Namespace) -> Options:
    """Returns the options about names and keys.

    Raises ImportFailedError or ConfigError if one has a wrong form or an unknown key.
    """
    mapped = {}
    for text in options.mapped:
        name, equals, key = text.rpartition("=")
        if not equals or not name:
            raise ImportFailedError(f"--map {text!r}: must be NAME=SECTION.KEY")
        check_key(key)
        if mapped.setdefault(name, key) != key:
            raise ImportFailedError(f"--map {name!r}: has two keys, {mapped[name]} and {key}")
    if both := sorted(set(mapped) & set(options.ignored)):
        raise ImportFailedError(f"--map and --ignore both name {both[0]!r}")
    parsed = [parse_override(text) for text in options.overrides]
    given = {f"{section}.{key}": value for section, key, value in parsed}  # the last one counts
    return Options(mapped, tuple(dict.fromkeys(options.ignored)), given)


def _run(file: Path, output: Path | None, names: Options, *, force: bool) -> int:
    settings = read_settings(file)
    folder = file.absolute().parent  # a link to the file can be in a model folder
    result = import_settings(settings, names, folder)
    if result.problems:
        print(_report(file, settings, result), file=sys.stderr)
        return 1
    values = with_defaults(result, names.given, folder)
    text = config_text(file, result, values, names.given)
    try:
        config = check_text(text) if output is None else write_checked(text, output, force=force)
    except ImportFailedError as error:
        raise ImportFailedError(f"{error}{_origins_in(str(error), result)}") from error
    for note in [*result.notes, *load_notes(config, str(output or "the config"))]:
        print(f"note: {note}", file=sys.stderr)
    if output is None:
        sys.stdout.write(text)
    else:
        number = sum(map(len, result.origins.values()))
        print(f"{output}: {number} of {len(settings)} settings imported; start_server.py --config {output} serves it")
    return 0


def _report(file: Path, settings: Sequence[Setting], result: Import) -> str:
    """Returns an error that lists all problems, each with its remedy."""
    number = len({problem.path for problem in result.problems})
    lines = [f"error: {file}: {number} of {len(settings)} settings cannot be imported"]
    for problem in result.problems:
        lines += [f"  {problem.text}", f"      {problem.remedy}"]
    return "\n".join(lines)


def _origins_in(message: str, result: Import) -> str:
    """Returns lines that state from which setting a refused key was imported."""
    lines = [
        f"\n  {key} was imported from {', '.join(each.shown_path for each in origins)}; --set {key}=VALUE replaces it"
        for key, origins in result.origins.items()
        if f"{key} = " in message
    ]
    return "".join(lines)
