"""Loads a head of the model and runs it. Also prepares the hidden states that the head needs as inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from agent.backends.cpu.ops import FusedCpuOps
from agent.drafting.network import DraftNetwork
from agent.model_loading import LoadedModel
from agent.model_start import ModelStart
from agent.models.head_definition import EMBEDDING, HeadDefinition
from agent.models.separate import whole_embedding
from agent.step_graph.head_steps import HeadGraph, HeadStates, state_widths
from agent.step_inputs import Int32Array, StepReader
from agent.stored_program.graph import StoredHeadGraph
from agent.warm_up import largest_steps, make_step
from agent.weights.storage import Array, from_float32, to_float32
from agent.weights.tensor_files import TensorFiles
from llm_serving.config import Config
from llm_serving.config.draft_model import EAGLE, Head
from llm_serving.errors import CheckpointError
from llm_serving.ipc.shm import StepSlot

_OFFSETS = "d2t"
"""Name of the tensor that maps the reduced vocabulary of an EAGLE-3 head to token ids. It has one offset for each index
of the reduced vocabulary: token id = index + offset.
"""


class HeadNetwork(DraftNetwork):
    """A head with its weights, its KV cache and its compiled graphs.

    Call ``load_head``, ``compile`` and ``warm_up`` once, in this order. ``load_head`` imports mindspore, unless an
    earlier start has stored the weights and the launches of the graphs (``agent.stored_program``).
    """

    def __init__(self, config: Config, head: Head, model_start: ModelStart) -> None:
        """``config`` is the config of the head, as ``draft_config`` returns it. ``model_start`` is the start of the
        model.
        """
        super().__init__(config, model_start)
        self._head = head
        of_tokens = replace(config, shape=replace(config.shape, vocab_size=head.vocab_size))
        self._reader = StepReader(of_tokens, config.max_num_seqs)
        self._vocab_size = head.vocab_size
        self._tokens: Int32Array | None = None
        """Maps the indices of the head's logits to token ids. None means that each index is its own token id."""
        self._states: HeadStates | None = None
        """The memory of hidden states, which fused graphs read. None with other operators."""
        self._head_graph: HeadGraph | None = None
        self._model_norm: Array | None = None
        """The weight of the model's last norm, if the head takes normalised hidden states. Otherwise None."""

    def load_head(self, report: Callable[[int, int], None], model: LoadedModel, config: Config) -> None:
        """Loads the weights and allocates the KV cache. The head uses the embedding of ``model``.

        ``config`` is the config of the model. If agents share the model, ``model`` has only a part of the embedding,
        so this method reads the whole embedding from the model's files. ``report`` is called with the number of loaded
        tensors and the number of all tensors. Raises CheckpointError or AgentStartError.
        """
        definition = HeadDefinition(self._head)
        if self._head.kind == EAGLE and self.config.model_config.load_format != "dummy":
            assert self.config.model_config.model_path is not None, "a head with weights has a folder"
            files = TensorFiles(Path(self.config.model_config.model_path))
            try:
                prefix, layer = _names_in(files)
                definition = HeadDefinition(self._head, prefix, layer)
                self._tokens = self._read_tokens(files, prefix)
            finally:
                files.close()
        self._load(report, definition, self._head)
        self._share(whole_embedding(config) if model.ops.is_split else model.weights[EMBEDDING])
        if isinstance(self.model.ops, FusedCpuOps):
            self.model.ops.reserve_taps(1)
            self._states = HeadStates(self.config, self._head)
        if self._head.kind != EAGLE:
            self._model_norm = model.weights["norm.weight"]

    def _share(self, embedding: Array) -> None:
        """Lets the network use the memory of ``embedding`` [vocabulary, hidden_size]."""
        self.model.weights[EMBEDDING] = embedding  # a network that is built later takes it from here
        if self.model.network is not None:
            from agent.layers.parameter import bind  # imports mindspore

            bind(self.model.network.parameters_dict()[EMBEDDING], embedding)

    def compile(self) -> None:
        """Compiles the graphs. If an earlier start has stored their launches, restores these launches instead."""
        ops, buffers, states = self.model.ops, self._reader.buffers, self._states
        if isinstance(ops, FusedCpuOps) and states is not None:
            launches = self._start.stored_launches(self.model, buffers, states.by_name)
            if launches is not None:
                self._head_graph = StoredHeadGraph(ops, buffers, states, launches)
                return
        self._head_graph = self._made_head_graph()

    def _made_head_graph(self) -> HeadGraph:
        """Compiles the graphs with MindSpore and returns them."""
        self._model = model = self._start.with_network(self.config, self._part, self.model)
        from agent.step_graph.head_graph import make_head_graph  # imports mindspore

        buffers = self._reader.buffers
        graph = make_head_graph(model.network, self._head, self.config, model.ops, buffers, self._states)
        graph.compile()
        return graph

    def warm_up(self) -> None:
        """Runs the largest steps, which proves that they fit into the memory.

        If the launches of the graphs come from a file, an earlier start has run the largest steps. Then only a few test
        steps check these launches (``agent.stored_program``).
        """
        assert self._head_graph is not None, "compile() must come before warm_up()"
        owns = tuple(state_widths(self.config, self._head))
        runs = [partial(self._run_own_proof, own=own) for own in owns]
        if self._start.is_stored:
            if self._start.is_proved(self.model, *runs):
                return
            self._head_graph = self._made_head_graph()
        for kind, lens in largest_steps(self.config).items():
            states = self.no_states(sum(lens[0]))
            for own in (False, True) if kind == "decode" else (False,):
                given = states[:, : self.config.shape.hidden_size] if own else states
                self._run_step(make_step(self.config, *lens), kind == "decode", given, own=own)
        inputs = None if self._states is None else self._states.by_name
        self._start.keep(self.model, self._reader.buffers, self._head_graph, *runs, inputs=inputs)

    def _run_own_proof(self, slot: StepSlot, *, own: bool) -> None:
        """Runs a step of the proof of stored launches, with hidden states that differ between tokens and columns."""
        tokens, width = slot.num_tokens, state_widths(self.config, self._head)[own]
        places = 7 * slot.positions[:tokens, None] + 13 * np.arange(width)
        states = from_float32(((places % 17 - 8) / 8).astype(np.float32), self.config.model_config.model_dtype)
        self._run_step(slot, False, states, own=own)

    def no_states(self, tokens: int) -> Array:
        """Returns zeros with the shape and the type of ``states_of``, for ``tokens`` tokens."""
        width = len(self._head.layers) * self._head.hidden_size
        return from_float32(np.zeros((tokens, width), np.float32), self.config.model_config.model_dtype)

    def states_of(self, tapped: Sequence[Array]) -> Array:
        """Returns a copy of the hidden states that the head takes, [tokens, layers x hidden_size].

        ``layers`` is the number of the model's layers whose hidden states the head takes: one for an MTP head, three
        for an EAGLE-3 head. ``tapped`` are the model's residual streams [tokens, hidden_size] after the layers
        ``DraftModel.tapped_layers``.
        """
        if self._model_norm is not None:
            return self._normed(tapped[0], self._model_norm)
        places = sorted(set(self._head.layers))
        return np.concatenate([tapped[places.index(layer)] for layer in self._head.layers], axis=1)

    def run_states(
        self,
        token_ids: Int32Array,
        query_lens: Int32Array,
        starts: Int32Array,
        tables: Int32Array,
        states: Array,
        *,
        own: bool,
    ) -> tuple[Int32Array, Array]:
        """Computes tokens of several sequences. Returns the best next token and the state of each sequence.

        The state is the head's hidden state of the sequence's last token, [sequences, width]. The next call with
        ``own`` takes this state as input. ``HeadGraph.run`` describes ``states``, and ``run`` describes the other
        arguments. Raises RuntimeError if an operator fails.
        """
        slot = self._filled(token_ids, query_lens, starts, tables)
        guesses, hidden = self._run_step(slot, token_ids.size == query_lens.size, states, own=own)
        last = np.cumsum(query_lens) - 1
        found = hidden[last]
        if self._model_norm is not None:
            found = self._normed(found, self.model.weights["norm.weight"])
        return guesses.copy() if self._tokens is None else self._tokens[guesses], found

    def _run_step(self, slot: StepSlot, is_decode: bool, states: Array, *, own: bool) -> tuple[Int32Array, Array]:
        assert self._head_graph is not None, "compile() must come before any pass"
        return self._head_graph.run(self._reader.read(slot, is_decode=is_decode), states, own=own)

    def _normed(self, stream: Array, gamma: Array) -> Array:
        """Returns RMSNorm of hidden states [tokens, hidden_size], computed in float32."""
        dtype, shape = self.config.model_config.model_dtype, self.config.shape
        x, factors = to_float32(stream, dtype), to_float32(gamma, shape.norm_dtype or dtype)
        mean = np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32)
        scale = 1 / np.sqrt(mean + np.float32(shape.rms_norm_eps))
        return from_float32(np.ascontiguousarray(x * scale * factors), dtype)

    def _read_tokens(self, files: TensorFiles, prefix: str) -> Int32Array | None:
        """Returns an array that maps indices of the head's logits to token ids. Returns None if each index is its own
        token id.

        ``prefix`` begins the names of the head's tensors. Raises CheckpointError if the offsets are missing or give an
        id that is not a token.
        """
        count = self.config.shape.vocab_size
        found = files.read_optional(prefix + _OFFSETS)
        if found is None and count == self._vocab_size:
            return None
        where = files.where(prefix + _OFFSETS)
        if found is None or found[0].shape != (count,) or found[0].dtype.kind != "i":
            raise CheckpointError(f"{where}: tensor {_OFFSETS} must have {count} integers (draft_vocab_size)")
        tokens = found[0].astype(np.int64) + np.arange(count)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise CheckpointError(
                f"{where}: tensor {_OFFSETS} refers to token {tokens.max()}; the model has {self._vocab_size}"
            )
        return tokens.astype(np.int32)


def _names_in(files: TensorFiles) -> tuple[str, str]:
    """Returns the prefix of the names of an EAGLE-3 head's tensors, and the name of its layer after this prefix.

    The prefix is ``model.`` if the folder also stores an embedding (``TensorFiles``), otherwise empty. The heads of
    ``speculators`` have another name for the layer than those of EAGLE-3's authors.
    """
    prefix = "model." if f"model.{_OFFSETS}" in files or "model.fc.weight" in files else ""
    layer = "layers.0" if f"{prefix}layers.0.hidden_norm.weight" in files else "midlayer"
    return prefix, layer
