"""The doctor's program, from the command line to the exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.diagnosis.examination import examine
from tools.diagnosis.explanation import UnknownThingError, explain
from tools.diagnosis.finding import Finding, Level, counted
from tools.diagnosis.host import Host

DEFAULT_CONFIG = "smollm2_135m_cpu.yaml"
EXIT_USAGE = 2
"""Exit code of a wrong command line."""
_WORDS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "problem"}
_EPILOG = """\
exit code: 0 this machine can serve the config; 1 it cannot, or a log has no known error; 2 wrong usage

  %(prog)s --config llama_7b_kbk_pa_dyn.yaml --set model_config.model_path=/models/llama2-7b
  %(prog)s bundle --out report.tar.gz            one archive for a report: findings, config, versions, logs
  %(prog)s explain EI0006 507018                 what the codes mean
  %(prog)s explain output/agent_0.log            which errors a log has
  %(prog)s explain ~/ascend/log                  the logs of all ranks: which rank failed first
"""


def main(arguments: Sequence[str] | None = None, host: Host | None = None) -> int:
    """Runs the doctor and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["explain"]:
            return _explain(_explain_parser().parse_args(given[1:]))
        if given[:1] == ["bundle"]:
            return _bundle(_bundle_parser().parse_args(given[1:]), host or Host())
        return _examine(build_parser().parse_args(given), host or Host())
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return EXIT_USAGE


def report(findings: Sequence[Finding]) -> str:
    """Returns the findings as text, with advice for warnings and problems."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        text = finding.text.replace("\n", f"\n{'':{width + 11}}")
        lines.append(f"{_WORDS[finding.level]:<8} {finding.subject:<{width}}  {text}")
        lines += [f"{'':{width + 11}}do: {finding.advice}"] if finding.advice else []
        lines += [f"{'':{width + 11}}see: {finding.source}"] if finding.source else []
    return "\n".join(lines)


def can_be_served(findings: Sequence[Finding]) -> bool:
    return all(finding.level < Level.PROBLEM for finding in findings)


def _examine(options: argparse.Namespace, host: Host) -> int:
    findings = examine(host, options.config, options.overrides)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    served = can_be_served(findings)
    verdict = "can be served here" if served else "cannot be served here"
    print(report(findings))
    print(f"\n{options.config} {verdict}: {counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    rows = [{**asdict(each), "level": _WORDS[each.level]} for each in findings]
    machine = {"config": options.config, "can_be_served": served, "findings": rows}
    _write(options.json, machine)
    return 0 if served else 1


def _explain(options: argparse.Namespace) -> int:
    texts, machine, found_all = [], [], True
    for thing in options.things:
        try:
            text, result, found = explain(thing)
        except UnknownThingError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        texts.append(text)
        machine.append({"asked": thing, **result})
        found_all = found_all and found
    print("\n\n".join(texts))
    _write(options.json, machine)
    return 0 if found_all else 1


def _bundle(options: argparse.Namespace, host: Host) -> int:
    # Imported here, because the module imports the server's package, and the doctor also works without this package.
    from tools.diagnosis.bundle import write_bundle

    names = write_bundle(options.out, host, options.config, options.overrides, options.logs, options.attached)
    print(f"{options.out}: {len(names)} files, {options.out.stat().st_size / 1024:.0f} KiB. Secrets, prompts and")
    print("outputs are removed where they are recognised. Look through the archive before you send it:")
    print("\n".join(f"  {name}" for name in names))
    return 0


def _write(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Shows what this machine can run, and what prevents it. Starts nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_config_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to this file")
    return parser


def _program() -> str:
    """Returns the name of this program, as argparse shows it."""
    return Path(sys.argv[0]).name


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default=DEFAULT_CONFIG, metavar="FILE", help="config to check (%(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a key, as for start_server.py; can be repeated",
    )


def _bundle_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_program()} bundle",
        description="Writes one archive with findings, config, versions and logs, without secrets and prompts.",
        allow_abbrev=False,
    )
    _add_config_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="archive to write (tar.gz)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder of the logs (default: that of the config)")
    parser.add_argument(
        "--attach",
        type=Path,
        action="append",
        default=[],
        dest="attached",
        metavar="FILE",
        help="pack this text file too, such as the output of a command; can be repeated",
    )
    return parser


def _explain_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_program()} explain",
        description="Explains error codes and logs: the cause, what to do, and which rank failed first.",
        allow_abbrev=False,
    )
    parser.add_argument("things", nargs="+", metavar="CODE_OR_FILE", help="a code, a log, a folder of logs, or -")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    return parser
