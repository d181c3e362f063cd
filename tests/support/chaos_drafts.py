"""Drafts in chaos runs: their settings, the texts without them, and how many were right."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from support.chaos_load import Texts, undisturbed
from support.draft_models import DRAFT_METHODS
from support.server_process import ServerProcess, running_server


def add_drafts_option(parser: ArgumentParser) -> None:
    text = "make drafts in each step: from earlier tokens (suffix), or with a draft model of two layers (draft)"
    parser.add_argument("--drafts", choices=DRAFT_METHODS, help=text)


def texts_without_drafts(folder: Path, settings: Sequence[str]) -> list[Texts]:
    """Returns the texts of a server on this machine with ``settings``, but with one replica and without drafts."""
    settings = [each for each in settings if not each.startswith("speculative_config.")]
    settings += ["parallel_config.data_parallel=1", "speculative_config.method=off"]
    with running_server(folder, settings, forks=False) as server:
        return [answer.texts for answer in undisturbed(server.url)]


def draft_figures(server: ServerProcess) -> dict[str, int]:
    """Returns the number of drafts that steps have verified, and how many of them were right."""
    names = {"drafts": "draft_tokens", "accepted_drafts": "accepted_draft_tokens"}
    return {name: int(server.counter(counter)) for name, counter in names.items()}
