"""A Hugging Face folder's weights: ``model.safetensors``, or shards named by ``model.safetensors.index.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.weights.layout import WeightPart
from agent.weights.safetensors_file import SafetensorsFile
from agent.weights.storage import Array, convert_into
from llm_serving.errors import CheckpointError
from llm_serving.formats.bounded_file import read_small_text

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
_LISTED = 8


class Checkpoint:
    """Owns the mapped files of a folder. A source of weights (see ``agent.weights.loader.WeightSource``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def check(self, expected: Sequence[WeightPart], ignorable: Iterable[str] = ()) -> None:
        """Raise unless the folder holds exactly the tensors ``expected``, each of its shape.

        Names that end in one of ``ignorable`` may be there too, and are not read.
        """
        known, suffixes = {part.name for part in expected}, tuple(ignorable)
        missing = [part.name for part in expected if part.name not in self._file_of]
        if missing:
            raise CheckpointError(f"{self.folder}: {_listed(missing)} missing from the weights")
        unexpected = [name for name in self._file_of if name not in known and not name.endswith(suffixes)]
        if unexpected:
            raise CheckpointError(
                f"{self.folder}: {_listed(unexpected)} in the weights but not in a model of this config.json: "
                "the two do not belong together"
            )
        for part in expected:
            file = self._file_of[part.name]
            found = file.tensors[part.name].shape
            if found != part.shape:
                raise CheckpointError(
                    f"{file.path}: tensor {part.name} has shape {list(found)}; config.json makes it {list(part.shape)}"
                )
            file.read(part.name)

    def read_into(self, name: str, out: Array, dtype: str) -> None:
        """Copy a tensor, as elements of ``dtype``, into ``out``. Raises CheckpointError when a value does not fit."""
        file = self._file_of[name]
        source, source_dtype = file.read(name)
        try:
            convert_into(source, source_dtype, out, dtype)
        except OverflowError as reason:
            raise CheckpointError(
                f"{file.path}: tensor {name}: {reason}; use model_config.model_dtype bfloat16 or float32"
            ) from reason
        del source
        file.release(name)

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files:
            file.close()

    def _open(self) -> None:
        if (self.folder / SINGLE_FILE).exists():
            file = self._open_file(SINGLE_FILE)
            self._file_of = dict.fromkeys(file.tensors, file)
        elif (self.folder / INDEX_FILE).exists():
            self._open_shards(_read_index(self.folder / INDEX_FILE))
        else:
            others = sorted(path.name for path in self.folder.glob("*.safetensors"))
            found = f"only {_listed(others)}" if others else "no *.safetensors at all"
            raise CheckpointError(
                f"{self.folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE} ({found}); "
                "model_config.load_format: dummy serves random weights"
            )

    def _open_file(self, name: str) -> SafetensorsFile:
        file = SafetensorsFile(self.folder / name)
        self._files.append(file)
        return file

    def _open_shards(self, weight_map: dict[str, str]) -> None:
        shards = {name: self._open_file(name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in shards[name].tensors:
                raise CheckpointError(f"{self.folder / INDEX_FILE}: tensor {tensor} should be in {name}, and is not")
            self._file_of[tensor] = shards[name]
        for name, shard in shards.items():
            for tensor in shard.tensors:
                owner = self._file_of.setdefault(tensor, shard)
                if owner is not shard:
                    raise CheckpointError(f"{self.folder}: tensor {tensor} is in {owner.path.name} and again in {name}")


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


def _listed(names: Sequence[str]) -> str:
    """``tensor a``, ``tensors a, b and 3 more``: never a screenful."""
    shown = ", ".join(names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{'tensor is' if len(names) == 1 else 'tensors are'}: {shown}{more}"
