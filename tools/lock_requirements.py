#!/usr/bin/env python3
"""Writes the lock files from pyproject.toml: exact versions with hashes, for Python 3.10 to 3.12.

    python tools/lock_requirements.py              # keeps the versions that are locked now
    python tools/lock_requirements.py --upgrade    # takes the newest versions that pyproject.toml permits

All files come from one resolution, so that they can be installed together. Each package is in one file only:

    requirements.lock               packages for serving
    requirements-test.lock          packages for tools and tests, in addition to serving
    requirements-lint.lock          packages for `make lint`, in addition to serving and tests
    requirements-docs.lock          packages for `make docs-site`, in addition to serving, tests and lint
    requirements-audit.lock         packages for `make audit` and `make sbom`, in addition to serving, tests and lint
    requirements-wheel.lock         packages for `make wheel`, in addition to serving
    requirements-mindformers.lock   packages for MindFormers, in addition to serving
    requirements-ray.lock           packages for nodes that Ray places, in addition to serving
    requirements-mooncake.lock      packages for hand-overs through Mooncake, in addition to serving
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESOLVER = "uv==0.13.9"
BUILD = ("setuptools==80.9.0", "wheel==0.46.3")
"""Build tools that must be installed before ``setup.py`` runs, because pip builds without isolation."""

FILES = {
    "requirements.lock": ((), (), "Packages for serving."),
    "requirements-test.lock": (("test",), ("requirements.lock",), "Packages of the tools and the tests."),
    "requirements-lint.lock": (("lint",), ("requirements.lock", "requirements-test.lock"), "Packages of `make lint`."),
    "requirements-docs.lock": (("docs",), ("requirements.lock", "requirements-test.lock", "requirements-lint.lock"),
                               "Packages of `make docs-site`."),
    "requirements-audit.lock": (("audit",), ("requirements.lock", "requirements-test.lock", "requirements-lint.lock"),
                                "Packages of `make audit` and `make sbom`."),
    "requirements-wheel.lock": (("wheel",), ("requirements.lock",), "Packages of `make wheel`."),
    "requirements-mindformers.lock": (("mindformers",), ("requirements.lock",),
                                      "Packages of `make setup-mindformers`."),
    "requirements-ray.lock": (("ray",), ("requirements.lock",), "Packages for parallel_config.executor: ray."),
    "requirements-mooncake.lock": (("mooncake",), ("requirements.lock",),
                                   "Packages for parallel_config.hand_over_transport: mooncake."),
}  # fmt: skip
"""For each lock file: its extras of pyproject.toml, the lock files that must be installed first, and its purpose."""


def packages(lock: str) -> dict[str, str]:
    """Returns the entry of each package in a lock file, by the name of the package.

    An entry is the text with version and hashes. If a package has several entries for different Python versions, their
    texts are joined.
    """
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=[A-Za-z0-9])", "\n" + re.sub(r"^\s*#.*\n", "", lock, flags=re.MULTILINE)):
        if entry.strip():
            name = re.split(r"[=\s;@]", entry.strip(), maxsplit=1)[0]
            found[name] = f"{found[name]}\n{entry.strip()}" if name in found else entry.strip()
    return found


def main() -> int:
    """Chooses the versions of all packages in one resolution, then writes each lock file. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest permitted versions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        subprocess.run([f"{folder}/bin/pip", "install", "--quiet", RESOLVER], check=True)
        build = Path(folder) / "build.in"
        build.write_text("\n".join(BUILD) + "\n", encoding="utf-8")
        everything = Path(folder) / "all.lock"
        if not options.upgrade:
            locked = [(ROOT / name).read_text(encoding="utf-8") for name in FILES if (ROOT / name).is_file()]
            everything.write_text("\n".join(locked), encoding="utf-8")
        resolve = [f"{folder}/bin/uv", "pip", "compile", "--quiet", "--universal", "--no-header", "--no-annotate",
                   "--generate-hashes", "--no-emit-index-url", "--python-version", "3.10", "--no-cache"]  # fmt: skip

        def compiled(extras: tuple[str, ...], output: Path, *more: str) -> dict[str, str]:
            chosen = [word for extra in extras for word in ("--extra", extra)]
            command = [*resolve, *chosen, *more, "-o", str(output), "pyproject.toml", str(build)]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            return packages(output.read_text(encoding="utf-8"))

        compiled(tuple(extra for extras, _, _ in FILES.values() for extra in extras), everything)
        written: dict[str, dict[str, str]] = {}
        for name, (extras, base, meaning) in FILES.items():
            found = compiled(extras, Path(folder) / name, "--constraint", str(everything))
            present = {package for each in base for package in written[each]}
            written[name] = {package: entry for package, entry in found.items() if package not in present}
            together = f" Installed together with {', '.join(base)}." if base else ""
            head = f"# {meaning}{together} Written by tools/lock_requirements.py. Python 3.10 to 3.12.\n"
            (ROOT / name).write_text(head + "\n".join(written[name].values()) + "\n", encoding="utf-8")
            sys.stdout.write(f"{name}: {len(written[name])} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
