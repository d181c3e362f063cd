#!/usr/bin/env python3
"""Writes the vendored libraries of the web pages from their npm packages, or compares them with ``--check``.

A manifest names each package with its version, and each file with its place in the package. To take another version,
change the version in the manifest, run this program (it needs ``npm``), and run ``make test-page``.

    python tools/vendor_page_libraries.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MANIFESTS = (
    REPOSITORY / "llm_serving/web/static/vendor/manifest.json",
    REPOSITORY / "tests/page/vendor/manifest.json",
)


def package_files(name: str, version: str) -> dict[str, bytes]:
    """Downloads one npm package and returns its files by their paths in the package."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--ignore-scripts", f"{name}@{version}"]
        packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()[-1]
        with tarfile.open(Path(folder) / packed) as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            contents = {member.name.partition("/")[2]: archive.extractfile(member) for member in members}
            return {path: stream.read() for path, stream in contents.items() if stream is not None}


def vendored_files(manifest: dict[str, Any]) -> dict[str, bytes]:
    """Returns the content of every vendored file, and writes licences and hashes into ``manifest``."""
    found = {}
    for package in manifest["packages"]:
        contents = package_files(package["name"], package["version"])
        package["licence"] = json.loads(contents["package.json"])["license"]
        for file in package["files"]:
            found[file["path"]] = contents[file["from"]]
            file["sha256"] = hashlib.sha256(contents[file["from"]]).hexdigest()
    return found


def renew(path: Path, check: bool) -> list[str]:
    """Writes the files of one manifest, and the manifest. With ``check``, only returns the files that differ."""
    manifest = json.loads(path.read_text("utf-8"))
    contents = vendored_files(manifest)
    contents[path.name] = (json.dumps(manifest, indent=1) + "\n").encode()
    different = []
    for name, body in contents.items():
        place = path.parent / name
        if not place.is_file() or place.read_bytes() != body:
            different.append(str(place.relative_to(REPOSITORY)))
            if not check:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(body)
    return different


def main() -> int:
    """Renews or checks the vendored files. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file differs")
    arguments = parser.parse_args()
    different = [name for path in MANIFESTS for name in renew(path, arguments.check)]
    for name in different:
        print(f"{'different' if arguments.check else 'written'}: {name}")
    return 1 if arguments.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
