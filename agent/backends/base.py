"""The seam between models and devices: a table of operators. A model calls these and nothing else of a device.

Shapes: T tokens of the step over all its sequences, S sequences, H and K query and key-value heads of size D, W the
width of the block table. Activations are of the table's ``dtype``; indices are int32. Where ``static_shapes`` is set,
every tensor has the size of the largest step, and only its first T or S rows mean anything.

``step`` is what all operators may read of the step at hand: (slot_mapping [T], block_tables, context_lens [S],
query_lens [S]), and with static shapes counts [4] = (T, S, W, 0) besides. ``block_tables`` is [S, W], with static
shapes flat. Query i of a sequence with q queries and context c is at position c - q + i. In the graph of steps with
parts of prompts ``step`` has a fifth entry, what ``chunk_mask`` makes.

Every operator adds up in an order that depends on the row alone (its depth, its context), so a token's result does not
depend on what else is in the step, nor on whether it came in a prompt, a chunk or a decode step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.group.model_part import ModelPart
from agent.step_inputs import Int32Array
from agent.weights.storage import Array
from llm_serving.model.families import Experts

CacheLayout = tuple[tuple[int, ...], str]
"""Shape, and type as ``agent.weights.storage`` names it."""

Operator = Any
"""A primitive or Cell of MindSpore, to be an attribute of a Cell and called in its ``construct``."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What the attention of a layer is like."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Tokens a token sees, itself included; 0: all before it."""
    norm_epsilon: float | None = None
    """Of the RMSNorm of query and key heads; None: there is none."""


class BlockMoves(ABC):
    """Copies of cache blocks over all layers: within the cache, and between it and a pool of blocks in host memory,
    where a block is as good as on the device but no graph reads it. Owns the pool."""

    num_host_bytes: int
    """Of the pool."""

    @abstractmethod
    def run(self, moves: Int32Array) -> None:
        """``moves`` [M, 3] int32, contiguous: ``MoveKind``, source block, destination block; in this order. The cache
        must have been through a graph once, and no graph may be running.

        Raises AgentError or KernelError when a kind or a block does not exist; nothing is copied then.
        """


class OpTable(ABC):
    """Makes the operators of one device. Each call gives an operator for one place in a model."""

    name: str
    """As in ``model_config.op_table``."""
    static_shapes: bool
    """Whether the graph is compiled for the largest step, or for shapes that change from step to step."""
    has_whole_prompts: bool
    """Whether there is a graph of its own for steps whose sequences all start at position 0 (see ``attention``)."""
    dynamic_prompts: bool = False
    """Whether that graph takes any number of prompts, or a fixed one, the lengths past the last being 0."""
    packs_weights: bool
    """Whether linear weights are packed blobs (``agent.kernels.packing``) with their bias, the output weight apart from
    the embedding, or [out, in] as checkpoints have them."""

    def __init__(self, dtype: str, part: ModelPart | None = None) -> None:
        self.dtype = dtype
        """``float16``, ``bfloat16`` or ``float32``."""
        self.part = part
        """What of the model this agent has; None: all."""

    @property
    def is_split(self) -> bool:
        """Whether other agents have parts of the same layers."""
        return self.part is not None and self.part.is_split

    @property
    def is_first(self) -> bool:
        """Whether this agent is the first of those that have parts of the same layers."""
        return self.part is None or self.part.place.tp_index == 0

    @property
    def is_first_stage(self) -> bool:
        return self.part is None or self.part.shard.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        return self.part is None or self.part.shard.is_last_stage

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of this agent's embedding and output layer."""
        if self.part is None or not self.is_split:
            return vocab_size
        return len(self.part.shard.vocab) if self.packs_weights else self.part.vocab_stride

    @abstractmethod
    def all_reduce(self, width: int) -> Operator:
        """(x [T, width], step) -> the sum of x over the agents of the stage, added up in their order."""

    @abstractmethod
    def hand_over(self, width: int) -> Operator:
        """(hidden [T, width], residual [T, width], step) -> what ``StepGraph`` takes their sum from, which is the
        stream that the next stage begins with."""

    @abstractmethod
    def linear_weight(self, in_features: int, out_features: int, *, output: bool = False) -> Any:
        """The Parameter of a linear layer, without memory yet; ``output``: that to the vocabulary."""

    def linear_scale(self, in_features: int, out_features: int, *, output: bool = False) -> Any:
        """The Parameter of its scales; None where there are none, or the weight holds them. Where there are some, the
        operators take (weight, scale) for ``weight``, or with offsets (weight, scale, offset)."""
        return None

    def linear_offset(self, in_features: int, out_features: int, *, output: bool = False) -> Any:
        """The Parameter of what is added to integers before they are scaled; None as above."""
        return None

    def take_weights(self, weights: Mapping[str, Array], *, tied: bool) -> None:
        """Make of the loaded weights, by their names, what the device wants, before the first graph. ``tied``: that
        the embedding is the output's weight. The arrays live as long as the table."""
        del weights, tied

    def set_running(self, running: bool) -> None:
        """A graph of many operators begins to run, or has ended."""
        del running

    @property
    def replays_steps(self) -> bool:
        """Whether a dynamic graph's launches may be recorded, and replayed in place of its next runs."""
        return False

    def stage_agrees(self, says_so: bool) -> bool:
        """Whether every agent of the stage says so; all ask at the same place of a step. Raises GroupDownError."""
        return says_so

    def failed_operator(self) -> str | None:
        """The operator that refused its inputs in the graph that ran last, where the device keeps that from MindSpore;
        None where none did. What the graph gave then means nothing."""
        return None

    @abstractmethod
    def router_weight(self, in_features: int, num_experts: int) -> Any:
        """The Parameter of a router, float32."""

    @abstractmethod
    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> Any:
        """The Parameter of a linear layer of all experts: their packed weights in a row, or [experts, in, out]."""

    def expert_scale(self, num_experts: int, in_features: int, out_features: int) -> Any:
        """The Parameter of its scales; None where there are none, as of ``linear_scale``."""
        return None

    def expert_offset(self, num_experts: int, in_features: int, out_features: int) -> Any:
        """The Parameter of what is added to integers before they are scaled; None as above."""
        return None

    @abstractmethod
    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        """Shape and type of a layer's key cache, and of its value cache. The first axis is the block."""

    @abstractmethod
    def block_moves(self, arrays: Sequence[Array], parameters: Sequence[Any], host: CacheLayout) -> BlockMoves:
        """Moves between the blocks of the caches, whose memory was made as ``arrays`` and belongs to ``parameters``, in
        the same order, and of a pool whose part for each of them has the layout ``host``."""

    @abstractmethod
    def embedding(self, width: int) -> Operator:
        """(table [vocabulary, width], token_ids [T], step) -> [T, width]. Where the table is split, the sum over the
        agents, whose part of the vocabulary a token is in."""

    @abstractmethod
    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        """(hidden [T, in], residual [T, in], gamma [in], weight, bias, step) -> RMSNorm(sum) @ weight.T + bias
        [T, out_features], and the sum of hidden and residual. The ``first`` of a model has no residual yet: the sum is
        hidden. ``bias`` is None where there is none, or the weight holds it."""

    @abstractmethod
    def linear(self, out_features: int) -> Operator:
        """(x [T, in], weight, bias, step) -> x @ weight.T + bias [T, out_features]; ``bias`` as in ``norm_linear``."""

    @abstractmethod
    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        """(hidden [T, width], residual [T, width], gamma [width], gate_up weight, down weight, step) ->
        down(silu(gate(x)) * up(x)) of x = RMSNorm(sum), and the sum of hidden and residual."""

    @abstractmethod
    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        """(hidden [T, width], residual [T, width], gamma [width], weights of router, gate_up and down, step) -> the sum
        of the chosen experts' MLPs of x = RMSNorm(sum), weighted, and the sum of hidden and residual.

        The router is float32: softmax over all experts, the largest ``per_token`` of it (of equals the first), divided
        by their sum where ``normalised``."""

    def decoder_layers(
        self, width: int, epsilon: float, form: AttentionForm, count: int, *, first: bool
    ) -> Operator | None:
        """``count`` consecutive layers of norm, attention, norm and gated MLP as one operator; None where the device
        has none, and a layer is made of the operators above. ``first``: the first of them begins the stage.

        (hidden [T, width], residual [T, width], layers, rotary, step) -> hidden, residual. ``layers`` has a tuple for
        each: the gammas before attention and MLP, the weights of qkv, output, gate_up and down, the caches of keys and
        values, and the norms of query and key heads as in ``attention``. Where the layers are split, the sums over the
        agents are in it.
        """
        return None

    @abstractmethod
    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        """(hidden [T, in], residual [T, in], gamma [in], weight, last_tokens [S], step) -> what ``StepGraph`` makes
        the logits [S, vocab_size] of RMSNorm(sum) at ``last_tokens`` from. Where the vocabulary is split, the first
        agent gets all of them."""

    @abstractmethod
    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        """(positions [T]) -> what ``attention`` takes as ``rotary``: a tuple of tensors, made once a step.

        ``cos`` and ``sin`` are float32 [positions, D], each row holding its angles twice; ``window`` that of
        the layers that have one, else 0.
        """

    def chunk_mask(self) -> Operator | None:
        """(positions [T]) -> what ``attention`` takes as the mask of a step with parts of prompts, made once a step;
        None where it takes none."""
        return None

    @abstractmethod
    def attention(self, form: AttentionForm) -> Operator:
        """(qkv [T, (H + 2K) D], head_norms, rotary, caches, step, whole_prompts) -> [T, H x D].

        ``head_norms`` are the gammas [D] of the norms of query and key heads, () without. Norms and rotates queries and
        keys, writes keys and values to the caches (in place, where ``slot_mapping`` is not -1) and attends causally, no
        further back than the window, scaled by 1 / sqrt(D). ``whole_prompts`` is a constant of the graph: True promises
        that every context is its queries, so that the cache need not be read; ``query_lens`` then has a fixed
        length, past S zero, and is int64 unless ``dynamic_prompts``.
        """
