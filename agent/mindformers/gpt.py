"""Adapts MindFormers' newer inference models to the inputs and outputs of ``agent.models.llama.Llama``.

``InferenceQwen3ForCausalLM`` and similar classes build a ``GPTModel`` and pass their arguments on to it. The adapter
calls the ``GPTModel`` directly. It sets ``return_hidden_states``, and computes logits only for last tokens. It turns
``move_lens_to_cpu`` off, because these models do not use the copies of the sequence lengths on the host.
"""

from __future__ import annotations

from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops

from agent.backends.base import OpTable
from agent.backends.native.attention import causal_mask, no_mask
from agent.layers.attention import attention_form
from agent.layers.parameter import unbound_parameter
from agent.mindformers.names import cache_names
from llm_serving.config import Config


class GptAdapter(nn.Cell):
    """Computes the logits of each sequence's last token from token ids.

    Owns the parameters of the KV cache and passes them to MindFormers as arguments. Call ``take_form`` before each
    graph is compiled.
    """

    owns_caches = False
    """True if the KV caches are parameters of MindFormers' layers. False if they are parameters of this adapter."""

    def __init__(self, network: Any, config: Config, ops_table: OpTable) -> None:
        super().__init__(auto_prefix=False)
        shape, cache = config.shape, config.pa_config
        self.gpt = network.model
        self.gpt.return_hidden_states = True
        self.gpt.move_lens_to_cpu = False
        # The tuple hides the network from MindSpore. Otherwise MindSpore would register the network's Cells a second
        # time.
        self._network = (network,)
        layout = ops_table.cache_layout(cache.num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)
        keys, values = zip(*cache_names(shape.num_layers), strict=True)
        self.key_caches = ParameterTuple([_cache(name, *layout) for name in keys])
        self.value_caches = ParameterTuple([_cache(name, *layout) for name in values])
        self.causal_mask = causal_mask(attention_form(shape, 0), ops_table.dtype)
        self.no_mask = no_mask(ops_table.dtype)
        self.gather = ops.Gather()

    def take_form(self, *, whole_prompts: bool) -> None:
        """Selects the attention of the graph that is compiled next.

        With ``whole_prompts``, a token attends only to tokens of the same step. Otherwise it attends to the KV cache.
        MindFormers' flag ``is_chunked`` is always set, because the rotary embedding then takes cosines and sines of
        each token.
        """
        (network,) = self._network
        network.add_flags_custom_mcore(is_prefill=whole_prompts)
        network.add_flags_chunked(is_chunked=True)

    def construct(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...], whole_prompts: bool
    ) -> Tensor:
        """Returns the logits [sequences, vocab_size] of each sequence's last token.

        ``token_ids`` and ``positions`` are [tokens]. ``last_tokens`` [sequences] has the index of each sequence's last
        token. ``OpTable`` describes ``step`` and ``whole_prompts``.
        """
        slot_mapping, block_tables, context_lens, query_lens = step[:4]
        mask = self.no_mask
        if whole_prompts:
            mask = self.causal_mask
        elif len(step) > 4:
            mask = step[4]
        hidden = self.gpt(
            token_ids,
            positions=positions,
            # In steps of whole prompts, this argument goes to FlashAttentionScore, which expects the number of query
            # tokens.
            batch_valid_length=query_lens if whole_prompts else context_lens,
            context_lens_tensor=context_lens,
            q_seq_lens=query_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            attention_mask=mask,
            key_cache=self.key_caches,
            value_cache=self.value_caches,
        )
        return self.gpt.output_layer(self.gather(hidden, last_tokens, 0))


def _cache(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    parameter = unbound_parameter(shape, dtype)
    parameter.name = name
    return parameter
