"""The interface between models and devices: a table of operators. ``agent.backends.device`` has other interfaces.

A model uses a device only through the operators of an ``OpTable``. Code that builds or runs graphs reads the device's
``DeviceTraits`` and calls its ``DeviceHooks``. To add a device, write an OpTable and add it to ``selector.py``.

Shapes name their axes. ``tokens`` and ``seqs`` are the numbers of tokens and sequences of the step. ``blocks`` is the
width of the block tables. Activations have the op table's ``dtype``, and indices are int32. In a static graph, every
tensor has the size of the largest step. A smaller step uses only the first rows of each tensor.

``step`` is a tuple of inputs that every operator may read: slot_mapping [tokens], block_tables [seqs, blocks],
context_lens [seqs], query_lens [seqs]. Query i of a sequence with q queries and a context of c tokens is at position
c - q + i. Some graphs have more inputs in ``step``, in this order:

- A static graph has counts = (tokens, seqs, blocks, step number). Its ``block_tables`` has one axis.
- The graph for chunks (parts of prompts) has the attention mask that ``OpTable.chunk_mask`` makes.
- A graph that reads the cache has ``step_blocks`` [blocks] if ``OpTable.gathers_blocks`` is True.
- A graph has ``adapter_rows``, int64 [groups], if ``OpTable.num_adapter_groups`` is not 0.

For every token, an operator adds floating-point numbers in a fixed order. This order depends only on the size of the
layer and on the length of the token's context. Therefore the bits of a token's result do not depend on the other tokens
of the step. The bits are also the same in a prompt, a chunk and a decode step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent.backends.device import BlockMoves, DeviceHooks, DeviceTraits
from agent.group.model_part import ModelPart
from agent.lora.store import AdapterSlots
from agent.sequence_states import SequenceStates
from agent.weights.storage import Array
from llm_serving.errors import AgentStartError
from llm_serving.model.deepseek import LatentAttention
from llm_serving.model.families import Experts
from llm_serving.model.gated_delta import GatedDelta

CacheLayout = tuple[tuple[int, ...], str]
"""Shape and element type of a cache. ``agent.weights.storage`` lists the names of the types."""


@dataclass(frozen=True, slots=True)
class LinearParameters:
    """The MindSpore Parameters of a linear layer. A parameter that the layer does not have is None.

    The op table's operators take a float weight as a single tensor, and an integer weight as a tuple: (weight, scale)
    or (weight, scale, offset). If inputs are quantised with calibrated scales, the tuple is (weight, scale,
    input_scale, input_offset, sum_offset).
    """

    weight: Any
    scale: Any = None
    offset: Any = None
    """Offsets, which are added to the weight's integers before the multiplication by the scales."""
    input_scale: Any = None
    input_offset: Any = None
    sum_offset: Any = None
    """int32, one number for each output. It is added to the integer sum of the output and corrects for
    ``input_offset``."""
    bias: Any = None
    """The bias of an expert router or of the experts, if it is not part of the weight."""


Operator = Any
"""A primitive or Cell of MindSpore. A model keeps it as an attribute of a Cell and calls it in ``construct``."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The properties of a layer's attention: numbers of heads, head size, window, norms of the heads, and sinks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Number of tokens that a token sees, itself included. 0 means that it sees all earlier tokens."""
    norm_epsilon: float | None = None
    """Epsilon of the RMSNorm of query and key heads. None means that there is no norm."""
    sinks: bool = False
    """True: the softmax of each query head has one more term, exp(sink). This term has no value vector."""
    block_size: int = 0
    """Number of tokens of a cache block."""


@dataclass(frozen=True, slots=True)
class LatentForm:
    """The properties of one layer's multi-head latent attention (DeepSeek-V2, 2024).

    ``llm_serving.model.deepseek.LatentAttention`` describes the sizes in ``latent``.
    """

    num_heads: int
    latent: LatentAttention
    norm_epsilon: float
    """Epsilon of the RMSNorm of the latent vectors."""


class OpTable(ABC):
    """Makes the operators of one device. Each call of a method makes a new operator for one place in the model."""

    traits: ClassVar[DeviceTraits]
    states: SequenceStates | None = None
    """Assigns the recurrent states of linear attention to sequences. None if the model has no linear attention."""

    def __init__(self, dtype: str, part: ModelPart | None = None, hooks: DeviceHooks | None = None) -> None:
        self.dtype = dtype
        """Type of the activations: ``float16``, ``bfloat16`` or ``float32``."""
        self.part = part
        """The part of the model that this agent has. None means the whole model."""
        self.hooks = hooks or DeviceHooks()
        self.takes_rows = False
        """True if the model reads images. Then the graph's first input is not token ids but a matrix [tokens,
        hidden_size]: the embedding of each text token, and a row of the vision encoder's output for each image token.
        """
        self.rows: Array | None = None
        """[tokens, hidden_size]: the fixed array that every step reads as its first input, if ``takes_rows``. None if
        each step passes its own array to the graph."""
        self.rotary_rows: tuple[Array, Array] | None = None
        """Two arrays [tokens, rotary width] with the cosines and sines of a step's tokens. They exist if the agent
        gathers them from the rotary tables. None if the graph does this."""
        self.reads_rotary_positions = False
        """True if the graph's input ``positions`` is [4, tokens]. Row 0 has the position of each token in its sequence.
        Rows 1 to 3 have the three dimensions of its rotary position.

        If False, ``positions`` is [tokens], and each rotary position equals the position in the sequence.
        """
        self.num_taps = 0
        """Number of operators that ``tap`` has made. The graph has one more output for each of them."""

    @property
    def is_split(self) -> bool:
        """Whether the agent has only a part of each of its layers, and other agents have the other parts."""
        return self.part is not None and self.part.is_split

    @property
    def is_first(self) -> bool:
        """Whether this agent is the first agent of its stage. The agents of a stage share the same layers."""
        return self.part is None or self.part.place.tp_index == 0

    @property
    def is_first_stage(self) -> bool:
        return self.part is None or self.part.shard.is_first_stage

    @property
    def embeds(self) -> bool:
        """Whether the graph begins with the embedding of token ids. Otherwise its first input is hidden states.

        True for the first stage of a model that reads only text. If the model reads images, the agent embeds the tokens
        itself, because outputs of the vision encoder replace some embeddings.
        """
        return self.is_first_stage and not self.takes_rows

    @property
    def is_last_stage(self) -> bool:
        return self.part is None or self.part.shard.is_last_stage

    @property
    def inserts_ids(self) -> bool:
        """Whether graphs can read sampled token ids that are still on the device, as inputs of the next step."""
        return self.part is None or self.part.may_run_ahead

    def vocab_rows(self, vocab_size: int) -> int:
        """Returns the number of vocabulary rows that this agent's embedding and output weight have."""
        if self.part is None or not self.is_split:
            return vocab_size
        return len(self.part.shard.vocab) if self.traits.packs_weights else self.part.vocab_stride

    @property
    def has_whole_prompt_graph(self) -> bool:
        """Whether the model needs a separate graph for steps in which every sequence is a whole prompt.

        If not, the graph for chunks also computes whole prompts. The value is valid after the model has been built.
        """
        return True

    @property
    def attends_by_token(self) -> bool:
        """Whether attention takes a block table and a context for each token instead of for each sequence.

        If True, ``block_tables`` is [tokens, blocks], and ``context_lens`` and ``query_lens`` are [tokens]. Then a
        single graph computes prefill, mixed and decode steps. The value is valid after the model has been built.
        """
        return False

    @property
    def holds_biases(self) -> bool:
        """Whether a linear weight includes the bias of its layer. Then the bias has no parameter of its own."""
        return self.traits.packs_weights

    @abstractmethod
    def linear_weight(self, in_features: int, out_features: int, *, output: bool = False) -> LinearParameters:
        """Makes the Parameters of a linear layer. The Parameters get their memory when the weights are bound.

        ``output`` is True for the output layer, which computes the logits.
        """

    @abstractmethod
    def expert_weight(self, num_experts: int, in_features: int, out_features: int) -> LinearParameters:
        """Makes the Parameters of one linear layer of all experts.

        The weight is one blob with the packed weights of all experts, or an array [experts, in, out].
        """

    def router_bias(self, num_experts: int) -> Any | None:
        """Makes the Parameter of an expert router's bias [num_experts]. None if the router's weight includes it."""
        return None

    def expert_bias(self, num_experts: int, out_features: int) -> Any | None:
        """Makes the Parameter of the experts' biases [num_experts, out_features]. None if the weight includes them."""
        return None

    @property
    def num_adapter_groups(self) -> int:
        """The length of the graph's input ``adapter_rows`` [groups], which has the number of tokens of each group.

        The tokens of a step are ordered by adapter slot. Each adapter slot has a group, and the last group has the
        tokens without an adapter.

        The result is 0 if the graph has no input ``adapter_rows``. Then the server has no adapters, or the operators
        find the adapter of each token in another way.
        """
        return 0

    def adapter_matrices(self, in_features: int, out_features: int, num_layers: int = 1) -> tuple[Any, Any] | None:
        """Makes the Parameters for the LoRA adapters of a linear layer: A and B (``agent.lora.stacked``).

        ``num_layers`` is the number of checkpoint layers that the linear layer joins, for example 3 for q, k and v.

        Returns None if the operators take no adapters. Otherwise, ``norm_linear``, ``linear`` and ``gated_mlp`` take a
        tuple (weight, A, B) instead of a weight.
        """
        return None

    def adapter_slots(self, parameters: Mapping[str, Any], weights: Mapping[str, Array]) -> AdapterSlots | None:
        """Allocates the memory of the Parameters of ``adapter_matrices``. Returns the object that stores adapters in
        this memory.

        ``parameters`` are all Parameters of the network, and ``weights`` the loaded weights in host memory, by name.
        Returns None if the server has no adapters.
        """
        return None

    def head_weight(self, heads: int, in_features: int, out_features: int) -> LinearParameters:
        """Makes the Parameters of an up-projection of latent attention: one float weight for each head.

        Their layouts are those of ``expert_weight``, with heads instead of experts.
        """
        return self.expert_weight(heads, in_features, out_features)

    @abstractmethod
    def router_weight(self, in_features: int, num_experts: int) -> Any:
        """Makes the float32 Parameter for the weight of an expert router, which chooses the experts of each token."""

    @abstractmethod
    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        """Returns the shape and type of a layer's key cache. The value cache has the same shape and type. The first
        axis is the block."""

    def scale_layout(self, num_blocks: int, block_size: int, num_kv_heads: int) -> CacheLayout | None:
        """Returns the shape and type of a layer's cache of scales. The first axis is the block.

        Returns None if the layer has no cache of scales. Then keys and values have no scales, or their caches include
        the scales.
        """
        return None

    @property
    def gathers_blocks(self) -> bool:
        """Whether attention over the cache first gathers all blocks that the step reads.

        If True, the graph has one more input, ``step_blocks`` [blocks], with the numbers of these blocks. The entries
        of ``block_tables`` are then indices into ``step_blocks`` instead of block numbers.
        """
        return False

    def latent_cache_layout(self, num_blocks: int, block_size: int, width: int) -> CacheLayout:
        """Returns shape and type of a layer's cache of latent attention, with ``width`` elements for each token."""
        return (num_blocks, block_size, width), self.dtype

    @abstractmethod
    def block_moves(
        self,
        arrays: Sequence[Array],
        parameters: Sequence[Any],
        host: CacheLayout,
        pool: Sequence[Array] | None = None,
    ) -> BlockMoves:
        """Makes the object that copies blocks of the caches. Allocates the host pool unless ``pool`` is given.

        ``arrays`` has the memory of the caches, and ``parameters`` has the Parameters that are bound to these arrays,
        in the same order. ``host`` is the shape and type of the host pool of each cache. ``pool`` is a host pool in
        shared memory, with one array of this shape for each cache.
        """

    @abstractmethod
    def all_reduce(self, width: int) -> Operator:
        """Returns an operator (x, step) -> the sum of x over the agents of the stage, added in the agents' order.

        x and the sum are [tokens, width].
        """

    @abstractmethod
    def hand_over(self, width: int) -> Operator:
        """Returns an operator that ends each pipeline stage except the last: (hidden, residual, step) -> output.

        hidden and residual are [tokens, width]. ``output`` is the result of the stage's graph. ``StepGraph`` reads
        hidden + residual from it, and this sum is the input of the next stage.
        """

    @abstractmethod
    def tap(self, width: int) -> Operator:
        """Returns an operator (hidden, residual, step) that makes hidden + residual an additional output of the graph.

        hidden and residual are [tokens, width]. Their sum is the residual stream between two layers. A head (EAGLE,
        MTP) makes drafts from it, and gets it from ``StepGraph.tapped``. ``num_taps`` counts these operators.
        """

    @abstractmethod
    def embedding(self, width: int) -> Operator:
        """Returns an operator (table [vocabulary, width], token_ids [tokens], step) -> embeddings [tokens, width].

        The rows of the table may be divided among agents. Then each agent uses zeros for tokens outside its rows, and
        the operator sums over the agents.
        """

    @abstractmethod
    def norm_linear(self, out_features: int, epsilon: float, *, first: bool) -> Operator:
        """Returns an operator (hidden, residual, gamma [in], weight, bias, step) -> (output, total).

        hidden, residual and total are [tokens, in]. total = hidden + residual, and output [tokens, out_features] =
        RMSNorm(total) @ weight.T + bias. In the first layer of a stage (``first``), there is no residual yet, and total
        = hidden. The argument ``bias`` is None if the layer has no bias or the weight includes the bias.
        """

    @abstractmethod
    def join_norms(self, width: int, epsilon: float, *, keeps_second: bool) -> Operator:
        """Returns an operator (first, second, first gamma [width], second gamma [width], step) -> [RMSNorm(first),
        RMSNorm(second)].

        first and second are [tokens, width]. The result is [tokens, 2 x width]. With ``keeps_second``, the result is a
        pair of this matrix and RMSNorm(second) [tokens, width].
        """

    @abstractmethod
    def linear(self, out_features: int) -> Operator:
        """Returns an operator (x [tokens, in], weight, bias, step) -> x @ weight.T + bias [tokens, out_features].

        The argument ``bias`` is None if the layer has no bias or the weight includes the bias.
        """

    @abstractmethod
    def gated_mlp(self, width: int, epsilon: float) -> Operator:
        """Returns an operator (hidden, residual, gamma [width], gate_up weight, down weight, step) -> (output, total).

        total = hidden + residual, x = RMSNorm(total), and output = down(silu(gate(x)) * up(x)). hidden, residual, total
        and output are [tokens, width]. The model's ``hidden_act`` may name another function than silu.
        """

    @abstractmethod
    def expert_mlp(self, width: int, experts: Experts, epsilon: float) -> Operator:
        """Returns an operator (hidden, residual, gamma [width], weights, step) -> (output, total).

        hidden, residual, output and total are [tokens, width]. total = hidden + residual. The output is the weighted
        sum of the MLPs of the chosen experts, applied to RMSNorm(total). The output of the shared experts is added.

        ``weights`` is a tuple: router, gate_up of all experts, down of all experts. If the router has a correction, its
        float32 array [experts] follows. If there are shared experts, their gate_up and down weights follow. If
        ``experts.shared_gate``, the float32 weight of their gate comes next. If ``OpTable.expert_bias`` makes biases,
        those of router, gate_up and down come last. The bias of down is None if another agent adds this bias.

        The router computes a float32 softmax over all experts and chooses the ``experts.per_token`` experts with the
        largest values. If values are equal, it chooses the expert with the lower number. If ``experts.normalised``, the
        chosen values are divided by their sum. ``Experts.routing`` describes other routers. If an agent has only some
        of the experts, its output is the sum over these experts.
        """

    def decoder_layers(
        self, width: int, epsilon: float, form: AttentionForm, count: int, *, first: bool, result_norms: bool = False
    ) -> Operator | None:
        """Returns an operator that runs several layers: (hidden, residual, layers, rotary, step) -> (hidden, residual).

        The operator runs ``count`` consecutive layers of norm, attention, norm and gated MLP. hidden and residual are
        [tokens, width]. ``first`` means that the stage begins with these layers. If agents share the layers, the
        operator also sums over the agents. Returns None if the device cannot run several layers as one operator. The
        model then uses one operator for each part of a layer.

        ``layers`` has a tuple for each layer. First come the gammas of the norms before attention and before the MLP.
        Then come the weights qkv, output, gate_up and down, the two caches, and ``of_heads`` of ``attention``. With
        ``result_norms``, two gammas follow, for the results of attention and of the MLP before they are added.
        """
        return None

    def result_norm(self, epsilon: float) -> Operator | None:
        """Returns an operator (x [tokens, width], gamma [width], step) -> RMSNorm(x), of the type of x.

        Gemma applies it to the results of attention and of the MLP. Returns None if ``decoder_layers`` applies it.
        """
        return None

    @abstractmethod
    def lm_head(self, vocab_size: int, epsilon: float) -> Operator:
        """Returns the operator of the output layer.

        Its arguments are (hidden [tokens, in], residual [tokens, in], gamma [in], weight, last_tokens [seqs], step).
        ``last_tokens`` has the index of each sequence's last token. The operator's result is an output of the graph.

        ``StepGraph`` reads the logits [seqs, vocab_size] from this output. The logits are RMSNorm(hidden + residual) of
        the tokens ``last_tokens``, times the weight. If agents share the vocabulary, each agent gets the logits of its
        own tokens. With packed weights, the first agent gets all logits instead.
        """

    @abstractmethod
    def rotary(self, cos: Array, sin: Array, window: int) -> Operator:
        """Returns an operator: the graph's input ``positions`` -> a tuple of tensors, which ``attention`` takes as its
        argument ``rotary``.

        The model runs this operator once in each step. ``cos`` and ``sin`` are the tables of
        ``agent.layers.rotary.rotary_tables``, float32 [positions, head_size]. ``window`` is the attention window of the
        layers that have a window. 0 means that no layer has a window.
        """

    def chunk_mask(self) -> Operator | None:
        """Returns an operator: the graph's input ``positions`` -> the attention mask of a step with chunks of prompts.

        The model runs this operator once in each step with chunks. Returns None if the device's ``attention`` needs no
        mask.
        """
        return None

    @abstractmethod
    def attention(self, form: AttentionForm) -> Operator:
        """Returns an operator (qkv, of_heads, rotary, caches, step, whole_prompts) -> attention of all heads.

        qkv is [tokens, (query heads + 2 x key-value heads) x head_size], and the result is [tokens, query heads x
        head_size]. ``caches`` has the cache of keys, the cache of values and, if there is one, the cache of scales. The
        operator normalises and rotates queries and keys. It writes keys and values into the caches in place, except
        where ``slot_mapping`` is -1. Then it computes causal attention within the window, with scores scaled by 1 /
        sqrt(head_size). ``of_heads`` is a tuple: the gammas [head_size] of the norms of query and key heads, or the
        float32 sinks [query heads], or ().

        ``whole_prompts`` is a constant of the graph. If it is True, every sequence of the step is a whole prompt, so
        the operator need not read the cache. ``query_lens`` then has the form that ``DeviceTraits.pads_whole_prompts``
        describes.
        """

    def latent_attention(self, form: LatentForm) -> Operator:
        """Returns an operator (joined, weights, rotary, cache, step) -> attention of all heads.

        The result is [tokens, heads x value_dim]. ``form.latent`` defines rank, query_rank, rope_dim, head_dim and
        value_dim. ``joined`` [tokens, columns] has the columns of the queries, then ``rank`` columns of the latent
        vector, then ``rope_dim`` columns of the key that is rotated.

        - If queries have a latent vector, the columns of the queries are this vector, with ``query_rank`` columns.
          ``weights`` is (gamma [rank], key_up, value_up, query_gamma [query_rank], query). The weight ``query`` maps
          the normalised latent vector to the queries of all heads.
        - Otherwise the columns of the queries are the queries themselves, heads x head_dim columns. ``weights`` is
          (gamma [rank], key_up, value_up).

        For each head, ``key_up`` maps the elements of a query that are not rotated to ``rank`` elements. ``value_up``
        maps an attended latent vector to a value. Both weights come from ``head_weight``.

        The operator writes the normalised latent vector and the rotated key of each token into the cache in place,
        except where ``slot_mapping`` is -1. Every query attends causally to latent vectors, in prompts and in decode
        steps (absorbed attention). The scores are scaled by score_factor / sqrt(head_dim).

        Raises AgentStartError if the op table does not have this operator.
        """
        raise AgentStartError(f"the op table {self.traits.op_table} has no latent attention; use op_table fused (CPU)")

    def sigmoid_gate(self, width: int) -> Operator:
        """Returns an operator (x, gate, step) -> x * sigmoid(gate). All three are [tokens, width].

        Raises AgentStartError if the op table does not have this operator.
        """
        raise AgentStartError(f"the op table {self.traits.op_table} has no output gate; use op_table fused (CPU)")

    def state_layout(self, delta: GatedDelta) -> CacheLayout:
        """Returns the shape [states, floats] and the type of a layer's states of linear attention.

        Raises AgentStartError if the op table does not have ``gated_delta``.
        """
        raise AgentStartError(f"the op table {self.traits.op_table} has no linear attention; use op_table fused (CPU)")

    def gated_delta(self, delta: GatedDelta, epsilon: float) -> Operator:
        """Returns an operator (projected, weights, states, step) -> Gated DeltaNet of all heads.

        The result is [tokens, delta.values]. ``projected`` [tokens, delta.projected] has the channels of queries, keys
        and values, then the output gates. Then b and a of each value head follow, from which its write strength and its
        decay are computed. ``weights`` has the float32 arrays convolution [channels, 1, taps], log_rate and rate_bias
        [value heads], and gamma [value_dim] of the norm.

        ``OpTable.states`` divides the step into runs of tokens. Each run reads one state of ``states`` and writes
        another state. Prompts, chunks and decode steps compute the same recurrence, token by token.

        Raises AgentStartError if the op table does not have this operator.
        """
        raise AgentStartError(f"the op table {self.traits.op_table} has no linear attention; use op_table fused (CPU)")
