"""Texts for users of Hugging Face and of ModelScope: progress, errors, and advice for machines without a network."""

from __future__ import annotations

import sys
from pathlib import Path

from llm_serving.hub.names import ModelName


def how_to_bring(name: ModelName) -> str:
    """Returns the advice at the end of an error text: how to copy a model from a machine with a network."""
    return (
        f"on a machine with a network, download {name.repository}, copy the folder or the GGUF file here, and give its "
        "path instead of the name"
    )


def unreachable(name: ModelName, endpoint: str, cache: Path, error: Exception) -> str:
    """Returns the text of an error about a hub that does not answer."""
    return (
        f"{name}: {endpoint} cannot be reached ({first_line(error)}), and the model is not in the cache {cache}; "
        f"{how_to_bring(name)}"
    )


def first_line(error: Exception) -> str:
    """Returns the beginning of an error's text.

    For a failed connection, this is the text of the inner error, which states the reason.
    """
    inner = getattr(error.args[0], "reason", None) if error.args else None
    if isinstance(inner, Exception):
        return str(inner).rpartition("): ")[2][:300]
    return (str(error) or type(error).__name__).strip().splitlines()[0][:300]


def say(text: str) -> None:
    """Prints a line of progress to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
