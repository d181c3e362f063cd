"""Installs a small replacement of Mooncake for the processes that a test starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["install_fake_mooncake"]


def install_fake_mooncake(folder: Path, version: str = "0.3.13.post1") -> str:
    """Writes the replacement to ``folder``. Returns the ``PYTHONPATH`` with which Python processes find it."""
    package = "mooncake_transfer_engine_non_cuda"
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_mooncake_engine.py"), folder / "mooncake" / "engine.py")
    (folder / f"{package}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
    (folder / f"{package}-{version}.dist-info" / "METADATA").write_text(metadata)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
