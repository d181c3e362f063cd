"""Reads all tensors of a model folder, from the file ``model.safetensors`` or from the shards that an index names.

Folders of msModelSlim and golden-stick use other file names, for example ``quant_model_weights.safetensors``. These
names are also accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agent.weights.safetensors_file import SafetensorsFile
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError
from llm_serving.formats.safetensors_index import TensorInfo
from llm_serving.formats.small_files import read_small_text

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_NAMES = ("quant_model_weight*", "quant-model*")
"""Patterns of the names, without ``.safetensors``, that msModelSlim and golden-stick use instead of ``model``."""
MAX_INDEX_BYTES = 64 * 1024 * 1024
"""Maximum size of the index of shards."""
_EMBEDDING, _OUTPUT, _PREFIX = "embed_tokens.weight", "lm_head.", "model."
_LISTED = 8
"""Maximum number of tensors that an error message names."""


class TensorFiles:
    """Owns the mapped safetensors files of a model folder. Tensors are views that are valid until ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stored_names: dict[str, str] = {}
        """Maps tensor names with the prefix ``model.`` to their names in the file, if the file lacks this prefix.
        Otherwise empty.
        """
        self.bytes_read = 0
        """Number of bytes that were read from the files."""
        try:
            self._open()
            self._add_prefixes()
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def info(self, name: str) -> TensorInfo:
        return self._file_of[name].tensors[self._stored_name(name)]

    def where(self, name: str) -> Path:
        """Returns the file of a tensor, or the folder if the tensor does not exist."""
        return self._file_of[name].path if name in self._file_of else self.folder

    def read(self, name: str) -> tuple[Array, str]:
        """Returns a tensor of floats and the name of its type. Raises CheckpointError if it does not have floats."""
        return self._file_of[name].read(self._stored_name(name))

    def float_dtype(self, name: str) -> str:
        """Returns the type of a tensor of floats."""
        return self._file_of[name].read(self._stored_name(name))[1]

    def read_optional(self, name: str) -> tuple[Array, str] | None:
        """Returns a tensor and its type as the file spells it, or None if the tensor does not exist."""
        return self._file_of[name].read_stored(self._stored_name(name)) if name in self._file_of else None

    def count(self, num_bytes: int) -> None:
        """Adds ``num_bytes`` to ``bytes_read``. Callers must count the bytes themselves, because a view reads the file
        only when it is used.
        """
        self.bytes_read += num_bytes

    def release(self, name: str) -> None:
        """Frees the memory pages into which a tensor was read. A later read reads the file again."""
        self._file_of[name].release(self._stored_name(name))

    def close(self) -> None:
        """Unmaps the files."""
        for file in self._files:
            file.close()

    def _open(self) -> None:
        single, index = self._find()
        if single is not None:
            file = self._open_file(single.name)
            self._file_of = dict.fromkeys(file.tensors, file)
        elif index is not None:
            self._open_shards(index)
        else:
            others = sorted(path.name for path in self.folder.glob("*.safetensors"))
            found = f"only {_first(others)}" if others else "no *.safetensors at all"
            raise CheckpointError(
                f"{self.folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE} ({found}); "
                "model_config.load_format: dummy serves random weights"
            )

    def _stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)

    def _add_prefixes(self) -> None:
        """Makes tensors available under names with the prefix ``model.``, if the folder has names without it.

        Embedding models, which have no output layer, are stored in this form.
        """
        if _EMBEDDING not in self._file_of or _PREFIX + _EMBEDDING in self._file_of:
            return
        self._stored_names = {_PREFIX + name: name for name in self._file_of if not name.startswith(_OUTPUT)}
        self._file_of = {
            name if name.startswith(_OUTPUT) else _PREFIX + name: file for name, file in self._file_of.items()
        }

    def _find(self) -> tuple[Path | None, Path | None]:
        """Returns the path of the single file, and the path of the index of shards. At least one of them is None."""
        if (self.folder / SINGLE_FILE).exists():
            return self.folder / SINGLE_FILE, None
        if (self.folder / INDEX_FILE).exists():
            return None, self.folder / INDEX_FILE
        for name in _OTHER_NAMES:
            indices = sorted(self.folder.glob(f"{name}.safetensors.index.json"))
            files = sorted(self.folder.glob(f"{name}.safetensors"))
            if len(indices) == 1:
                return None, indices[0]
            if len(files) == 1 and not indices:
                return files[0], None
        return None, None

    def _open_file(self, name: str) -> SafetensorsFile:
        file = SafetensorsFile(self.folder / name)
        self._files.append(file)
        return file

    def _open_shards(self, index: Path) -> None:
        weight_map = _read_index(index)
        shards = {name: self._open_file(name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in shards[name].tensors:
                raise CheckpointError(f"{index}: tensor {tensor} should be in {name}, but is not")
            self._file_of[tensor] = shards[name]
        for name, shard in shards.items():
            for tensor in shard.tensors:
                owner = self._file_of.setdefault(tensor, shard)
                if owner is not shard:
                    raise CheckpointError(f"{self.folder}: tensor {tensor} is in both {owner.path.name} and {name}")


def _read_index(path: Path) -> dict[str, str]:
    text = read_small_text(path, MAX_INDEX_BYTES, CheckpointError)
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise CheckpointError(f"{path}: not valid JSON: {reason}") from reason
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: there is no weight_map that maps tensor names to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {tensor} is in {name!r}; a shard must be a *.safetensors file of this folder"
            )
    return weight_map


def listed(names: Sequence[str]) -> str:
    """Returns the beginning of a sentence with the first names: ``tensor a is``, or ``tensors a, b and 3 more are``."""
    return f"tensor {names[0]} is" if len(names) == 1 else f"tensors {_first(names)} are"


def _first(names: Sequence[str]) -> str:
    """Returns a text that lists the first names: ``a, b and 3 more``."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
