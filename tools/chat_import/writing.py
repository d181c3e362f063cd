"""Writes the imported keys as a config, after the loader of the server has accepted it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from llm_serving.config import Config, load_config
from llm_serving.config.source import unused_lines
from llm_serving.errors import CheckpointError, ConfigError
from tools.chat_import.importing import Import
from tools.chat_import.settings import HIDDEN, ImportFailedError, shown

MODEL_PATH = "model_config.model_path"
DEFAULTS: Mapping[str, object] = {
    "model_config.model_dtype": "auto",
    "model_config.max_generate_length": "auto",
    "model_config.seq_length": ["auto"],
    "pa_config.decode_seq_length": "auto",
    "pa_config.num_blocks": "auto",
    "pa_config.block_size": "auto",
    "serving_config.agent_ports": [0],
}
"""Values of keys that the file does not state: sizes that suit the model and the machine, and free ports."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 and YAML 1.2 may read in different ways, for example ``1e5``."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = None if re.fullmatch(r"[A-Za-z_/][\w/.-]*", value, re.ASCII) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def with_defaults(result: Import, given: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Returns all keys of the config with their values. ``given`` are those of ``--set``. ``folder`` is absolute.

    If there is no model path, and the folder of the file is a model folder, that folder is the model. ModelScope's
    ``configuration.json`` is in the model folder.
    """
    values = {**DEFAULTS, **result.values, **given}
    stated = (MODEL_PATH, "model_config.model_cfg_path")
    if not any(key in values for key in stated) and (folder / "config.json").is_file():
        values[MODEL_PATH] = str(folder)
        result.notes.append(f"{MODEL_PATH} = {shown(values[MODEL_PATH])}: the folder of the file, which has a model")
    return values


def config_text(source: Path, result: Import, values: Mapping[str, object], given: Mapping[str, object]) -> str:
    """Returns the YAML. Its comment names the source, and lists each imported name with key and value."""
    comment = [f"Made by tools/import_chat_configuration.py from {json.dumps(str(source.absolute()))}.", "Imported:"]
    for key, origins in result.origins.items():
        for each in origins:
            comment.append(f"  {each.shown_path} -> {key} = {HIDDEN if each.is_secret else shown(values[key])}")
    comment += ["  nothing"] if not result.origins else []
    comment += ["Given with --set:", *(f"  {key} = {shown(value)}" for key, value in given.items())] if given else []
    comment += ["Not imported:", *(f"  {note}" for note in result.notes)] if result.notes else []
    stated = {*result.origins, *given}
    chosen = [f"  {key} = {shown(value)}" for key, value in values.items() if key not in stated]
    comment += ["Not stated in the file:", *chosen] if chosen else []
    sections: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = value
    body = yaml.dump(sections, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment) + "\n" + body


def check_text(text: str) -> Config:
    """Loads the YAML with the loader of the server, from a temporary folder. Raises ImportFailedError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return _load(path, "the config")


def write_checked(text: str, output: Path, *, force: bool) -> Config:
    """Writes the YAML if the loader of the server accepts it. A reader never sees a part of the file.

    Raises ImportFailedError. An existing file is only replaced with ``force``.
    """
    partial = output.parent.resolve() / f".{output.name}.{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        config = _load(partial, str(output))
        if force:
            os.replace(partial, output)
        else:
            os.link(partial, output)  # unlike a rename, a link never replaces a file
    except FileExistsError as error:
        raise ImportFailedError(f"{output}: exists; --force replaces it") from error
    except OSError as error:
        raise ImportFailedError(f"{output}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return config


def _load(path: Path, name: str) -> Config:
    try:
        return load_config(str(path))
    except (ConfigError, CheckpointError) as error:
        raise ImportFailedError(str(error).replace(str(path.resolve()), name)) from error


def load_notes(config: Config, output: str) -> Sequence[str]:
    """Returns the loader's notes about the config."""
    notes = [note.replace(config.file, output) for note in config.notes]
    return [*notes, *unused_lines(config.unused)]
