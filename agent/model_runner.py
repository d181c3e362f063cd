"""Runs steps: loads the model, compiles its graphs, and for each slot runs graph and sampler. All in one thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.backends.runtime import start_runtime
from agent.kv_cache import KVCache
from agent.sampler import Sampler
from agent.step_inputs import Int32Array, StepReader
from agent.warm_up import largest_steps, make_moves, make_step
from agent.weights import Packing, load_weights, open_weights
from agent.weights.storage import Array, huge_page_bytes
from llm_serving.config import Config
from llm_serving.errors import AgentError, CheckpointError, ProtocolError
from llm_serving.ipc.shm import StepSlot

Report = Callable[[str, int, int], None]
"""Takes a stage's name, and how many of how many of its units are done."""


class ModelRunner:
    """``load``, ``compile`` and ``warm_up`` once, in this order; then ``run_prefill``, ``run_decode``, ``run_moves``.

    Imports mindspore when constructed. Owns weights, KV cache and row table.
    """

    def __init__(self, config: Config, report: Report) -> None:
        start_runtime(config)
        self._config = config
        self._report = report
        num_rows = config.max_num_seqs
        self._reader = StepReader(config, num_rows)
        self._sampler = Sampler(num_rows, config.max_model_len, config.shape.vocab_size)
        self._weights: dict[str, Array] = {}
        self._kv_cache: KVCache | None = None
        self._model: Any = None
        self._graph: Any = None
        self._seconds: dict[str, float] = {}

    def load(self) -> None:
        """Build the model and give its parameters their values. Raises CheckpointError or AgentStartError."""
        from agent.backends.selector import select_op_table
        from agent.models.registry import find_model

        start = time.perf_counter()
        config, shape = self._config, self._config.shape
        definition = find_model(shape.architecture)
        specs = definition.weight_specs(shape)
        ignorable = definition.ignorable_suffixes(shape)
        self._ops = select_op_table(config)
        source = open_weights(_folder(config), specs, seed=_seed(config), ignorable=ignorable)
        try:
            self._weights = load_weights(
                specs,
                source,
                config.model_config.model_dtype,
                lambda done, of: self._report("load", done, of),
                _packing(config) if self._ops.packs_weights else None,
            )
        finally:
            source.close()
        self._kv_cache = KVCache(config, self._ops)
        self._model = definition.build(config, self._ops)
        self._bind_parameters()
        self._seconds["load"] = time.perf_counter() - start

    def compile(self) -> None:
        """Compile the graphs."""
        start = time.perf_counter()
        self._report("compile", 0, 1)
        self._compile_graphs()
        self._report("compile", 1, 1)
        self._seconds["compile"] = time.perf_counter() - start

    def warm_up(self) -> None:
        """Run the largest steps of the config, which proves that they fit, and forget them."""
        start = time.perf_counter()
        steps = largest_steps(self._config)
        for done, (kind, lens) in enumerate(steps.items()):
            self._report("warm up", done, len(steps))
            self._run(make_step(self._config, *lens), decode=kind == "decode")
        moves = make_moves(self._config)
        if moves is not None:
            self.run_moves(moves)
        self._report("warm up", len(steps), len(steps))
        self.reset()
        gc.collect()
        gc.freeze()  # what the start made lives on: the collector need not walk it again
        self._seconds["warm_up"] = time.perf_counter() - start

    def summary(self) -> dict[str, str | int | float]:
        """What was set up, for logs and people."""
        from agent.kernels import kernel_isa, num_threads

        assert self._kv_cache is not None, "load() comes before summary()"
        summary: dict[str, str | int | float] = {
            "device": self._config.device,
            "op_table": self._ops.name,
            "dtype": self._ops.dtype,
            "weight_format": self._config.weight_format,
            "kv_format": self._config.kv_format,
            "kernel_isa": kernel_isa(),
            "cpu_threads": num_threads(),
            "weight_bytes": sum(array.nbytes for array in self._weights.values()),
            "kv_cache_bytes": self._kv_cache.num_bytes,
            "host_kv_cache_bytes": self._kv_cache.num_host_bytes,
            "huge_page_bytes": huge_page_bytes(),
        }
        summary.update({f"{stage}_seconds": round(seconds, 3) for stage, seconds in self._seconds.items()})
        return summary

    def run_prefill(self, slot: StepSlot) -> tuple[int, int]:
        """Run a slot of prompts or parts of prompts, decoding rows perhaps among them; the microseconds of graph (and
        the moves before it) and sampler.

        Raises ProtocolError, with nothing moved or computed, when the slot is not such a step; AgentError when an
        operator failed (the graphs are then compiled anew, and the next step may run).
        """
        return self._run(slot, decode=False)

    def run_decode(self, slot: StepSlot) -> tuple[int, int]:
        """Run a slot of one token for each sequence. Otherwise as ``run_prefill``."""
        return self._run(slot, decode=True)

    def run_moves(self, slot: StepSlot) -> tuple[int, int]:
        """Run a slot of block moves alone; their microseconds, and 0. Raises as ``run_prefill``."""
        start = time.perf_counter_ns()
        if slot.num_tokens:
            raise ProtocolError(f"a step of moves has {slot.num_tokens} tokens; it must have none")
        self._move(self._reader.read_moves(slot))
        return (time.perf_counter_ns() - start) // 1000, 0

    def reset(self) -> None:
        """Forget every row's tokens. What the KV cache holds is the server's business."""
        self._sampler.rows.reset()

    def _run(self, slot: StepSlot, *, decode: bool) -> tuple[int, int]:
        start = time.perf_counter_ns()
        inputs, moves = self._reader.read(slot, decode=decode), self._reader.read_moves(slot)
        rows = self._sampler.rows
        rows.start_rows(slot)
        token_ids = rows.resolve(inputs.token_ids, inputs.rows, inputs.query_lens)
        if moves.size:
            self._move(moves)
        try:
            logits = self._graph.run(inputs, token_ids)
        except RuntimeError as error:
            self._compile_graphs()  # MindSpore does not run a graph again once an operator of it has failed
            raise AgentError(f"the graph failed: {str(error).strip().splitlines()[0]}") from error
        computed = time.perf_counter_ns()
        self._sampler.sample(logits.values, slot, logits.best_ids)
        return (computed - start) // 1000, (time.perf_counter_ns() - computed) // 1000

    def _move(self, moves: Int32Array) -> None:
        assert self._kv_cache is not None, "load() comes before any step"
        self._kv_cache.move(moves)

    def _compile_graphs(self) -> None:
        from agent.step_graph import make_step_graph

        config = self._config
        self._graph = make_step_graph(self._model, self._ops, config.slot_limits(), config.max_prefill_seqs)
        self._graph.compile()

    def _bind_parameters(self) -> None:
        from agent.layers.parameter import bind

        assert self._kv_cache is not None
        parameters = self._model.parameters_dict()
        for name, array in self._weights.items():
            bind(parameters[name], array)
        for layer, (keys, values) in enumerate(zip(self._kv_cache.keys, self._kv_cache.values, strict=True)):
            bind(parameters[f"layers.{layer}.attention.key_cache"], keys)
            bind(parameters[f"layers.{layer}.attention.value_cache"], values)


def _packing(config: Config) -> Packing:
    return Packing(config.model_config.weight_format, config.model_config.weight_group)


def _folder(config: Config) -> Path | None:
    path = config.model_config.model_path
    return None if path is None else Path(path)


def _seed(config: Config) -> int | None:
    """The seed of random weights; None for weights from files."""
    if config.model_config.load_format == "dummy":
        return config.model_config.seed
    if config.model_config.model_path is None:
        raise CheckpointError("there is no model_config.model_path to load weights from; or set load_format: dummy")
    return None
