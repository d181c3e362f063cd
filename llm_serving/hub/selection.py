"""Chooses the files of a repository that the server reads. Python files and pickles are never chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from llm_serving.errors import HubError
from llm_serving.hub.names import ModelName

_NEEDED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.safetensors.index.json",
    "quantize_config.json",
    "quant_config.json",
    "quant_model_description.json",
    "quantization_description.json",
)
_WEIGHTS = "*.safetensors"
_OTHER_LAYOUT = "consolidated*.safetensors"
"""Files with a second copy of the weights, in the layout of the model's author. Some repositories have them."""
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. ``sha256`` or ``git_sha1`` is the hash that the hub states."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


def choose_files(name: ModelName, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Returns the files to download: the named GGUF file, a folder with safetensors, or the only GGUF file.

    Raises HubError if no file can be served, or if the user must choose one of several GGUF files.
    """
    files = [each for each in files if _is_safe(each.path)]
    if name.file is not None:
        chosen = [each for each in files if each.path == name.file]
        if not chosen:
            raise HubError(f"{name}: the repository has no such file; {_gguf_text(name, files)}")
        return chosen
    top = [each for each in files if "/" not in each.path]
    weights = [each for each in top if fnmatchcase(each.path, _WEIGHTS)]
    weights = [each for each in weights if not fnmatchcase(each.path, _OTHER_LAYOUT)] or weights
    if weights:
        return [*(each for each in top if any(fnmatchcase(each.path, pattern) for pattern in _NEEDED)), *weights]
    gguf = [each for each in files if each.path.endswith(".gguf")]
    if len(gguf) == 1:
        return gguf
    if gguf:
        raise HubError(f"{name}: the repository has {len(gguf)} GGUF files; {_gguf_text(name, files)}")
    if any(fnmatchcase(each.path, pattern) for each in files for pattern in _PICKLES):
        raise HubError(
            f"{name}: the repository has only PyTorch pickles, which can run code and are never downloaded; download "
            "the repository yourself and give its folder; the error for that folder says how to convert it"
        )
    raise HubError(f"{name}: the repository has neither safetensors nor GGUF files")


def _is_safe(path: str) -> bool:
    """Returns True if a path that the hub states stays inside the folder of the repository."""
    return not path.startswith("/") and ".." not in path.split("/") and "\\" not in path and "\0" not in path


def served_path(folder: Path, files: Sequence[RemoteFile]) -> Path:
    """Returns the value of ``model_config.model_path`` for a downloaded model: the path of the GGUF file or of the
    folder.
    """
    return folder / files[0].path if files[0].path.endswith(".gguf") else folder


def _gguf_text(name: ModelName, files: Sequence[RemoteFile]) -> str:
    paths = sorted(each.path for each in files if each.path.endswith(".gguf"))
    if not paths:
        return "it has no GGUF files"
    shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
    return f"name one, as {name.hub}:{name.repository}/{paths[0]}, of: {shown}"
