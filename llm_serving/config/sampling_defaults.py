"""Reads recommended sampling parameters from ``generation_config.json`` of a model's folder, or from another file."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.sampling_params import PARAMETERS

FILE = "generation_config.json"
FROM_MODEL, NO_DEFAULTS = "model", "none"
"""Values of ``serving_config.generation_config``: use the model folder's defaults, or none. Other values are paths."""
MAX_BYTES = 1024 * 1024
"""Maximum size of ``generation_config.json``."""
_REMEDY = "correct the file, or set serving_config.generation_config: none"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The recommended parameters, with the names of ``SamplingParams``.

    A parameter is None if the model recommends no value for it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def values(self) -> dict[str, Any]:
        """Returns the parameters that the model recommends."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Returns the sampling parameters that a model folder or a JSON file recommends.

    All parameters are None for a GGUF file, and for a folder without ``generation_config.json``. Raises CheckpointError
    for a value that the API would also refuse.
    """
    file = path if path.suffix == ".json" else path / FILE
    if not file.is_file():
        return SamplingDefaults()
    found = TypedFields(str(file), read_json_object(file, MAX_BYTES, CheckpointError), CheckpointError)
    values: dict[str, Any] = {each.name: _value(found, each.name) for each in fields(SamplingDefaults)}
    return SamplingDefaults(**values)


def _value(found: TypedFields, name: str) -> float | int | None:
    """Returns the value of one sampling parameter, or None if the file does not state it.

    For an integer parameter, the file may have a float such as 50.0.
    """
    value, limits = found.value(name), PARAMETERS[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise found.fail(name, f"must be a number; {_REMEDY}")
    if type(limits.default) is int and value != int(value):
        raise found.fail(name, f"must be a whole number; {_REMEDY}")
    too_low = (limits.low is not None and value < limits.low) or (limits.above is not None and value <= limits.above)
    if too_low or (limits.high is not None and value > limits.high):
        least = f"at least {limits.low:g}" if limits.low is not None else f"above {limits.above:g}"
        raise found.fail(name, f"must be {least} and at most {limits.high:g}; {_REMEDY}")
    return int(value) if type(limits.default) is int else float(value)
