"""The interface between models and devices: a table of operators, the device's traits and its hooks.

A model uses a device only through the operators of an ``OpTable``. Code that builds or runs graphs reads the device's
``DeviceTraits`` and calls its ``DeviceHooks``. To add a device, write one OpTable and name it in ``selector.py``.

Shapes: T is the number of tokens of the step, S the number of sequences, W the width of the block table. H and K are
the numbers of query heads and key-value heads, D is the size of a head. Activations have the table's ``dtype``. Indices
are int32. In a static graph every tensor has the size of the largest step, and only the first T or S rows have a
meaning.

``step`` is a tuple of inputs that every operator may read: (slot_mapping [T], block_tables, context_lens [S],
query_lens [S]). ``block_tables`` is [S, W]. In a static graph ``block_tables`` is flat, and a fifth entry follows:
counts [4] = (T, S, W, step number). In the graph for parts of prompts, the fifth entry is the output of ``chunk_mask``.
Query i of a sequence with q queries and a context of c tokens is at position c - q + i.

Every operator adds numbers in an order that depends only on the row (its depth and its context). Therefore a token's
result does not depend on the other rows of the step. Prompts, chunks and decode steps give the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from agent.backends.launch import Launch, OnDevice
from agent.group.model_part import ModelPart
from agent.step_inputs import Int32Array
from agent.weights.storage import Array
from llm_serving.errors import AgentStartError
from llm_serving.model.deepseek import LatentAttention
from llm_serving.model.families import Experts

CacheLayout = tuple[tuple[int, ...], str]
"""Shape and element type of a cache; ``agent.weights.storage`` has the names of the types."""


@dataclass(frozen=True, slots=True)
class LinearParameters:
    """The Parameters of a linear layer. A layer has a weight, and those of the others that are not None.

    If a layer has more than a weight, operators take (weight, scale), (weight, scale, offset) or, with static inputs,
    (weight, scale, input_scale, input_offset, sum_offset) instead of the weight.
    """

    weight: Any
    scale: Any = None
    offset: Any = None
    """Added to the weight's integers before they are scaled."""
    input_scale: Any = None
    input_offset: Any = None
    sum_offset: Any = None
    """Added to the integer sums of the products."""


Operator = Any
"""A primitive or Cell of MindSpore. A model keeps it as an attribute of a Cell and calls it in ``construct``."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Facts about a device that decide how graphs are built and how weights are loaded."""

    op_table: str
    """The name in ``model_config.op_table``."""
    packs_weights: bool = False
    """True: a linear weight is one packed blob (``agent.kernels.packing``) that includes its bias, and a tied output
    weight is a parameter of its own. False: weights are [out, in] as in checkpoints."""
    pads_whole_prompts: bool = True
    """True: the graph for whole prompts takes a fixed number of query lengths, int64, with zeros after the last prompt.
    False: it takes one int32 length for each prompt."""
    own_memory: bool = False
    """True: the device has its own memory. Weights are copied there and freed in host memory one by one, and the KV
    cache is created there. False: the device uses the host's arrays in place.
    """
    replays_steps: bool = False
    """Whether the kernel launches of a dynamic graph can be recorded and replayed without MindSpore."""
    runs_ahead: bool = False
    """Whether ``DeviceHooks.launch`` returns before the device has computed. Steps are then launched before the host
    has read the tokens of the step before (``agent.run_ahead``)."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The properties of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Number of tokens that a token sees, itself included. 0 means that it sees all earlier tokens."""
    norm_epsilon: float | None = None
    """Epsilon of the RMSNorm of query and key heads. None means that there is no norm."""


@dataclass(frozen=True, slots=True)
class LatentForm:
    """The properties of multi-head latent attention (DeepSeek-V2, 2024). ``LatentAttention`` describes the sizes."""

    num_heads: int
    latent: LatentAttention
    norm_epsilon: float
    """Epsilon of the RMSNorm of the latent vectors."""


class BlockMoves(ABC):
    """Copies cache blocks of all layers, within the cache and between the cache and a pool in host memory.

    Owns the host pool. A block in the pool keeps its values, but no graph can read it.
    """

    num_host_bytes: int
    """Size of the host pool."""

    @abstractmethod
    def run(self, moves: Int32Array) -> None:
        """Runs the copies in ``moves``, in their order.

        ``moves`` is a contiguous int32 array [copies, 3] of ``MoveKind``, source block and destination block. A graph
        must have used the cache before, and no graph may be running. If a kind or a block does not exist, copies
        nothing and raises AgentError or KernelError.
        """


class DeviceHooks:
    """Work that a device needs around loading and around each run of a graph. The default does nothing."""

    def take_weights(self, weights: Mapping[str, Array], *, tied: bool) -> None:
        """Prepares weights in host memory, given by parameter name, before the first graph is compiled.

        ``tied`` means that the embedding is also the output weight. The arrays live as long as the op table.
        """
        del weights, tied

    @contextmanager
    def graph_run(self, *, compiles: bool = False) -> Iterator[None]:
        """Surrounds one run of a graph; ``compiles`` means that the graph is compiled first.

        Raises OperatorRefusedError at the end if an operator refused its inputs. The graph's result is then undefined.
        """
        del compiles
        yield

    def launch(self, run: Callable[[], tuple[OnDevice, ...]], fetched: slice) -> Launch:
        """Calls ``run``, which runs a graph, after all earlier launches. ``fetched`` are the results to fetch.

        If the device ``runs_ahead``, returns before the results are computed. The device then begins to copy the
        fetched results to the host before any later launch.
        """
        return Launch(run(), fetched)


class OpTable(ABC):
    """Makes the operators of one device. Each call returns an operator for one place in a model."""

    traits: ClassVar[DeviceTraits]

    def __init__(self, dtype: str, part: ModelPart | None = None, hooks: DeviceHooks | None = None) -> None:
        self.dtype = dtype
        """``float16``, ``bfloat16`` or ``float32``."""
        self.part = part
        """The part of the model that this agent has. None means the whole model."""
        self.hooks = hooks or DeviceHooks()

    @property
    def is_split(self) -> bool:
        """Whether other agents have parts of the same layers."""
        return self.part is not None and self.part.is_split

    @property
    def is_first(self) -> bool:
        """Whether this agent is the first agent of its stage. The agents of a stage have parts of the same layers."""
        return self.part is None or self.part.place.tp_index == 0

    @property
    def is_first_stage(self) -> bool:
        return self.part is None or self.part.shard.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        return self.part is None or self.part.shard.is_last_stage

    @property
    def inserts_ids(self) -> bool:
        """Whether graphs take token ids that an earlier step has left on the device. Only an agent that has the whole
        model has them."""
        return self.part is None or self.part.is_alone

    def vocab_rows(self, vocab_size: int) -> int:
        """Returns the number of rows of this agent's embedding and output weight."""
        if self.part is None or not self.is_split:
            return vocab_size
        return len(self.part.shard.vocab) if self.traits.packs_weights else self.part.vocab_stride

    @property
    def holds_biases(self) -> bool:
        """True if the parameters of linear weights include the biases, which then have no parameters of their own."""
        return self.traits.packs_weights

    @abstractmethod
    def linear_weight(self, in_features: int, out_features: int, *, output: bool = False) -> LinearParameters:
        """Makes the Parameters of a linear layer, without memory; ``output`` means the layer to the vocabulary."""

    @abstractmethod
    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> LinearParameters:
        """Makes the Parameters of one linear layer of all experts, or of all heads of latent attention.

        The weight holds the packed weights one after the other, or an array [experts, in, out].
        """

    @abstractmethod
    def router_weight(self, in_features: int, num_experts: int) -> Any:
        """Makes the float32 Parameter of a router."""

    @abstractmethod
    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        """Returns shape and type of a layer's key cache, which its value cache shares. The first axis is the block."""

    def latent_cache_layout(self, num_blocks: int, block_size: int, width: int) -> CacheLayout:
        """Returns shape and type of a layer's cache of latent attention, with ``width`` elements for each token."""
        return (num_blocks, block_size, width), self.dtype

    @abstractmethod
    def block_moves(self, arrays: Sequence[Array], parameters: Sequence[Any], host: CacheLayout) -> BlockMoves:
        """Makes the object that copies blocks of the caches, and allocates the host pool.

        ``arrays`` is the memory of the caches, ``parameters`` are the Parameters bound to them, in the same order.
        ``host`` is the layout of the pool's part for each of them.
        """

    @abstractmethod
    def all_reduce(self, width: int) -> Operator:
        """(x [T, width], step) -> the sum of x over the agents of the stage, added in the order of the agents."""

    @abstractmethod
    def hand_over(self, width: int) -> Operator:
        """(hidden [T, width], residual [T, width], step) -> the graph's output, from which ``StepGraph`` takes the sum
        of the two. The next stage begins with that sum."""

    @abstractmethod
    def embedding(self, width: int) -> Operator:
        """(table [vocabulary, width], token_ids [T], step) -> [T, width]. If agents share the table, the result is the
        sum over the agents, of which only one has the token's row."""

    @abstractmethod
    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        """(hidden [T, in], residual [T, in], gamma [in], weight, bias, step) -> RMSNorm(sum) @ weight.T + bias
        [T, out_features], and the sum of hidden and residual.

        With ``first`` (the first layer of a stage) there is no residual yet, and the sum is hidden. ``bias`` is None if
        there is no bias or the weight includes it."""

    @abstractmethod
    def linear(self, out_features: int) -> Operator:
        """(x [T, in], weight, bias, step) -> x @ weight.T + bias [T, out_features]; ``bias`` as in ``norm_linear``."""

    @abstractmethod
    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        """(hidden [T, width], residual [T, width], gamma [width], gate_up weight, down weight, step) ->
        down(silu(gate(x)) * up(x)) of x = RMSNorm(sum), and the sum of hidden and residual."""

    @abstractmethod
    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        """(hidden [T, width], residual [T, width], gamma [width], weights, step) -> the experts' output, and the sum of
        hidden and residual.

        ``weights`` are those of router, gate_up and down. If the router has a correction, it follows, float32
        [experts]. If there are shared experts, their gate_up and down follow. The experts' output is the weighted sum
        of the chosen experts' MLPs of RMSNorm(sum). The router computes a float32 softmax over all experts and chooses
        the ``per_token`` largest. Among equal values it chooses the lower expert. If ``normalised``, the chosen values
        are divided by their sum. ``Experts.routing`` describes other routers. The output of the shared experts is
        added. An agent that has only some of the experts adds nothing for the others.
        """

    def decoder_layers(
        self, width: int, epsilon: float, form: AttentionForm, count: int, *, first: bool
    ) -> Operator | None:
        """(hidden [T, width], residual [T, width], layers, rotary, step) -> hidden, residual.

        Runs ``count`` consecutive layers of norm, attention, norm and gated MLP as one operator. Returns None if the
        device cannot do this; the model then uses the operators above. ``first`` means that the stage begins with
        these layers.

        ``layers`` has a tuple for each layer. It holds the gammas before attention and MLP, then the weights of qkv,
        output, gate_up and down. The caches of keys and values follow, then ``head_norms`` as in ``attention``. If
        agents share the layers, the operator also sums over the agents.
        """
        return None

    @abstractmethod
    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        """(hidden [T, in], residual [T, in], gamma [in], weight, last_tokens [S], step) -> the graph's output.

        ``StepGraph`` takes from it the logits [S, vocab_size] of RMSNorm(sum) at ``last_tokens``. If agents share the
        vocabulary, the output has the agent's own columns, or the first agent gets all logits (packed weights)."""

    @abstractmethod
    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        """(positions [T]) -> the tuple of tensors that ``attention`` takes as ``rotary``, computed once for each step.

        ``cos`` and ``sin`` are float32 [positions, D]; each row contains its angles twice. ``window`` is the window of
        the layers that have one, else 0.
        """

    def chunk_mask(self) -> Operator | None:
        """(positions [T]) -> the attention mask of a step with parts of prompts, computed once for each step. Returns
        None if ``attention`` takes no mask."""
        return None

    @abstractmethod
    def attention(self, form: AttentionForm) -> Operator:
        """(qkv [T, (H + 2K) D], head_norms, rotary, caches, step, whole_prompts) -> [T, H x D].

        Normalises and rotates queries and keys. Writes keys and values into the caches in place, except where
        ``slot_mapping`` is -1. Computes causal attention within the window, with scores scaled by 1 / sqrt(D).
        ``head_norms`` are the gammas [D] of the norms of query and key heads, or () if there are none.

        ``whole_prompts`` is a constant of the graph. If it is True, every sequence of the step is a whole prompt, so
        that the operator need not read the cache. ``query_lens`` then has the form that
        ``DeviceTraits.pads_whole_prompts`` describes.
        """

    def latent_attention(self, form: LatentForm) -> Operator:
        """(joined, weights, rotary, cache, step) -> [T, H x value_dim], the attention of all heads.

        With a latent vector of queries, ``joined`` is [T, query_rank + rank + rope_dim] and ``weights`` are (gamma
        [rank], key_up, value_up, query_gamma [query_rank], query). Without one, ``joined`` is [T, H x head_dim + rank
        + rope_dim], ``weights`` are the first three, and the queries are the first columns of ``joined``.

        ``key_up`` maps the elements of a query head that are not rotated to ``rank`` elements. ``value_up`` maps an
        attended latent vector to a value. Both have a weight for each head (``expert_weight``). ``query`` maps the
        normalised latent vector of queries to all queries.

        Normalises and rotates, and writes normalised latent vector and rotated key into the cache in place, except
        where ``slot_mapping`` is -1. Every query attends causally to latent vectors, in prompts and in decode steps
        (absorbed attention). The scores are scaled by score_factor / sqrt(head_dim).

        Raises AgentStartError if the table does not have the operator.
        """
        raise AgentStartError(f"the op table {self.traits.op_table} has no latent attention; use op_table fused (CPU)")
