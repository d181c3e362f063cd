"""Loads the draft model and runs it. A pass computes tokens of several sequences and returns the best next token of
each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agent.group.model_part import ModelPart
from agent.model_loading import LoadedModel
from agent.model_start import ModelStart
from agent.scores import StepLogits
from agent.step_graph.step_blocks import StepBlocks
from agent.step_inputs import StepReader
from agent.warm_up import largest_steps, make_step
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.ipc.shm import SlotLayout, StepSlot

if TYPE_CHECKING:
    from agent.models.registry import ModelDefinition
    from agent.step_graph.interface import StepGraph

Int32Array = npt.NDArray[np.int32]


class DraftNetwork:
    """The draft model with its weights, its KV cache and its compiled graph.

    Call ``load``, ``compile`` and ``warm_up`` once, in this order. ``load`` imports mindspore, unless an earlier start
    has stored the weights and the launches of the graph (``agent.stored_program``).
    """

    def __init__(self, config: Config, model_start: ModelStart) -> None:
        """``config`` is the config of the draft model, as ``draft_config`` returns it. ``model_start`` is the start of
        the model.
        """
        self.config = config
        self._model_start = model_start
        self._part = ModelPart.of(config)
        self._reader = StepReader(config, config.max_num_seqs)
        layout = SlotLayout.of(config.slot_limits())
        self._slot = StepSlot(layout, bytearray(layout.slot_bytes))
        self._slot.do_sample[:] = 1
        self._vocab_size = config.shape.vocab_size
        self._model: LoadedModel | None = None
        self._graph: StepGraph | None = None

    @property
    def model(self) -> LoadedModel:
        """The loaded model."""
        assert self._model is not None, "load() must come first"
        return self._model

    def load(self, report: Callable[[int, int], None]) -> None:
        """Loads the weights and allocates the KV cache. ``report`` is called with the number of loaded tensors and the
        number of all tensors.

        Raises CheckpointError or AgentStartError.
        """
        self._load(report)

    def _load(
        self,
        report: Callable[[int, int], None],
        definition: ModelDefinition | None = None,
        head: Head | None = None,
    ) -> None:
        """Opens the files of an earlier start, then loads the model. ``load_model`` describes the arguments.

        ``head`` is None for a draft model.
        """
        self._start = self._model_start.of_draft_model(self.config, head)
        self._model = self._start.load(self.config, self._part, report, definition=definition)

    def summary(self) -> dict[str, str | int | float]:
        """Returns a description of the draft model for the log and the status page."""
        return {
            "draft_weight_bytes": self.model.weight_bytes,
            "draft_kv_cache_bytes": self.model.kv_cache.num_bytes,
            "draft_start": "stored program" if self._start.is_stored else "compiled",
        }

    def compile(self) -> None:
        """Compiles the graph. If an earlier start has stored the graph's launches, restores these launches instead."""
        self._graph = self._start.stored_graph(self.model, self._reader.buffers, self._made_graph)
        if self._graph is None:
            self._graph = self._made_graph()

    def _made_graph(self) -> StepGraph:
        """Compiles the graph with MindSpore and returns it."""
        self._model = self._start.with_network(self.config, self._part, self.model)
        from agent.step_graph.making import make_step_graph  # imports mindspore

        config, model = self.config, self._model
        graph = make_step_graph(
            model.network,
            model.ops,
            self._reader.buffers,
            config.slot_limits(),
            config.max_prefill_seqs,
            config.shape.vocab_size,
            fuses=config.fuses_operators,
            step_blocks=StepBlocks.of_config(config) if model.ops.gathers_blocks else None,
        )
        graph.compile()
        return graph

    def warm_up(self) -> None:
        """Runs the largest steps, which proves that they fit into the memory.

        If the launches of the graph come from a file, an earlier start has run the largest steps. Then only a few test
        steps check these launches (``agent.stored_program``).
        """
        assert self._graph is not None, "compile() must come before warm_up()"
        if self._start.is_stored:
            if self._start.is_proved(self.model, self._run_proof):
                return
            self._graph = self._made_graph()
        for kind, lens in largest_steps(self.config).items():
            self._best_ids(make_step(self.config, *lens), is_decode=kind == "decode")
        self._start.keep(self.model, self._reader.buffers, self._graph, self._run_proof)

    def _run_proof(self, slot: StepSlot) -> None:
        self._best_ids(slot, is_decode=False)

    def run(self, token_ids: Int32Array, query_lens: Int32Array, starts: Int32Array, tables: Int32Array) -> Int32Array:
        """Computes tokens of several sequences. Returns the best token after the last token of each sequence, int32
        [sequences].

        ``token_ids`` [tokens] has the tokens of one sequence after the other. ``query_lens`` [sequences] has the number
        of tokens of each sequence, and ``starts`` [sequences] the position of its first token. ``tables`` [sequences,
        blocks] are block tables. Raises RuntimeError if an operator fails.
        """
        slot = self._filled(token_ids, query_lens, starts, tables)
        return self._best_ids(slot, is_decode=token_ids.size == query_lens.size)

    def _filled(
        self, token_ids: Int32Array, query_lens: Int32Array, starts: Int32Array, tables: Int32Array
    ) -> StepSlot:
        """Fills this object's slot with the step that the arguments of ``run`` describe, and returns it."""
        slot, size = self._slot, self.config.pa_config.block_size
        tokens, seqs = token_ids.size, query_lens.size
        sequence_of = np.repeat(np.arange(seqs), query_lens)
        before = np.cumsum(query_lens) - query_lens
        positions = np.arange(tokens) + (starts - before)[sequence_of]
        contexts = starts + query_lens
        width = -(-int(contexts.max()) // size)
        slot.token_ids[:tokens] = np.minimum(token_ids, self._vocab_size - 1)
        slot.positions[:tokens] = positions
        slot.slot_mapping[:tokens] = tables[sequence_of, positions // size] * size + positions % size
        slot.query_lens[:seqs] = query_lens
        slot.context_lens[:seqs] = contexts
        slot.block_tables[: seqs * width] = tables[:, :width].ravel()
        slot.rows[:seqs] = np.arange(seqs)
        slot.write_header(0, num_tokens=tokens, num_seqs=seqs, table_width=width, history_len=0)
        return slot

    def _best_ids(self, slot: StepSlot, *, is_decode: bool) -> Int32Array:
        assert self._graph is not None, "compile() must come before any pass"
        inputs = self._reader.read(slot, is_decode=is_decode)
        scores = self._graph.run(inputs, inputs.token_ids)
        if not isinstance(scores, StepLogits):
            return scores.best()[0][: slot.num_seqs]
        if scores.best_ids is not None:
            return scores.best_ids[: slot.num_seqs].copy()
        best_ids: Int32Array = scores.values[: slot.num_seqs].argmax(axis=1).astype(np.int32)
        return best_ids
