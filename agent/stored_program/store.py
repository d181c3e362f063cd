"""Stores the program of an agent (the launches of its graph) in the folder of converted weights, and reads it again."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np

from agent.stored_program.program import StoredProgram
from agent.weights.cache.fingerprint import code_digest, digest_of, fingerprint, slot_name
from agent.weights.cache.folder import ArrayCache
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.config.draft_model import Head

logger = logging.getLogger("agent.stored_program")

_PROGRAM = "program"
_CONSTANT = "constant/"
_CODE = (
    *("agent/backends", "agent/drafting", "agent/kernels", "agent/layers", "agent/model_runner.py", "agent/models"),
    *("agent/step_graph", "agent/stored_program"),
)
"""The packages and files whose code determines the launches of a graph."""


class ProgramStore(ArrayCache):
    """The file with the launches of an agent's graph (its program) and the graph's constants, such as rotary tables."""

    def __init__(
        self, config: Config, rank: int, used: set[Path] | None = None, head: Head | None = None
    ) -> None:
        """``rank`` is the agent's number among all agents. ``ArrayCache`` describes ``used``.

        ``head`` is given if ``config`` is the config of a head.
        """
        name = f"{slot_name(config, rank, head).removesuffix('.weights')}-{digest_of(_limits(config))[:12]}.program"
        super().__init__(config, "stored program", name, lambda: _fingerprint(config, rank, head), used)

    @staticmethod
    def fits(config: Config) -> bool:
        """Returns whether programs of this config can be stored.

        The config must have fused operators and one agent in each group. (A draft model or a head has a program of its
        own.) The model must generate text, and MindSpore's graphs must not be saved. A model with rotary positions in
        three dimensions is not supported, because its rotary tables differ in each step.
        """
        is_alone = config.parallel_config.group_size == 1 and config.pooling is None
        is_constant = not config.context.save_graphs and not config.shape.rotary_sections
        return config.op_table == "fused" and is_alone and is_constant

    def find(self) -> tuple[StoredProgram, dict[str, Array]] | None:
        """Returns the stored program, and the graph's constants by name. None if there is no valid file."""
        arrays = self.load()
        if arrays is None:
            return None
        try:
            program = msgspec.json.decode(arrays.pop(_PROGRAM).tobytes(), type=StoredProgram)
        except (KeyError, msgspec.DecodeError) as problem:
            logger.warning("the stored program is not used: %s", problem)
            self.delete()
            return None
        return program, arrays

    def keep(self, program: StoredProgram, constants: dict[str, Array]) -> None:
        """Stores a program with the constants that it names."""
        text = np.frombuffer(msgspec.json.encode(program), np.uint8)
        launches = [launch for graph in program.graphs for launch in graph]
        used = {argument.memory for launch in launches for argument in launch.arguments}
        arrays = {_PROGRAM: text, **{name: array for name, array in constants.items() if name in used}}
        with self.keeping(sum(array.nbytes for array in arrays.values())) as keep:
            for name, array in arrays.items():
                keep(name, array)


def constant_name(parameter: str) -> str:
    """Returns the name under which a program stores a constant. ``parameter`` is MindSpore's name of the constant."""
    return _CONSTANT + parameter


def _fingerprint(config: Config, rank: int, head: Head | None) -> str:
    """Returns a digest of everything on which the launches and the bits of the proof depend.

    A stored program is used only if this digest has not changed.
    """
    return digest_of(
        {
            "weights": fingerprint(config, rank, head),
            "mindspore": _version_of("mindspore"),
            "processor": _processor(),
            **_limits(config),
            "code": code_digest(_CODE),
        }
    )


def _limits(config: Config) -> dict[str, object]:
    """Returns the settings that affect a graph but not the converted weights.

    A model with a head hands over hidden states of the layers in ``tapped_layers``.

    These settings are part of the file's name. So servers of one model with different limits do not overwrite each
    other's programs.
    """
    return {
        "slots": asdict(config.slot_limits()),
        "block_size": config.pa_config.block_size,
        "kv_format": config.kv_format,
        "context": asdict(config.context),
        "tapped_layers": config.tapped_layers,
    }


@cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _processor() -> str:
    """Returns the name of the processor, or an empty text if the system does not state it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
