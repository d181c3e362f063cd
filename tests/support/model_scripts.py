"""Runs asynchronous scripts of tests with a registry of models without agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from support.fake_models import Models
from support.time_limits import time_limit

Script = Callable[[Models], Awaitable[None]]


def play(script: Script, folder: Path, sizes: dict[str, int], **settings: object) -> None:
    """Runs a script with a registry, and closes the registry."""

    async def run() -> None:
        models = Models(folder, sizes, **settings)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(script(models), time_limit(10))
        finally:
            await models.registry.close()

    asyncio.run(run())
