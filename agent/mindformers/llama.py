"""Adapts the Llama of MindFormers' older library to the inputs and outputs of ``agent.models.llama.Llama``.

The model is built for parallel decoding (``families.llama_settings``). Steps of whole prompts use
``FlashAttentionScore``, and all other steps use ``PagedAttention`` with a mask. The model takes all tokens of a step as
one sequence, [1, tokens]. The adapter calls the ``LlamaModel`` directly and computes logits only for last tokens.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from agent.backends.base import OpTable
from agent.backends.native.attention import no_mask
from llm_serving.config import Config


class LlamaAdapter(nn.Cell):
    """Computes the logits of each sequence's last token. Call ``take_form`` before each graph is compiled."""

    owns_caches = True
    """True if the KV caches are parameters of MindFormers' layers. False if they are parameters of this adapter."""

    def __init__(self, network: Any, config: Config, ops_table: OpTable) -> None:
        super().__init__(auto_prefix=False)
        self.llama, self.lm_head = network.model, network.lm_head
        # The tuple hides the network from MindSpore. Otherwise MindSpore would register the network's Cells a second
        # time.
        self._network = (network,)
        self.hidden_size = config.shape.hidden_size
        self.no_mask = no_mask(ops_table.dtype)
        self.gather, self.reshape = ops.Gather(), ops.Reshape()

    def take_form(self, *, whole_prompts: bool) -> None:
        """Selects the attention of the graph that is compiled next.

        With ``whole_prompts``, a token attends only to tokens of the same step. Otherwise it attends to the KV cache.
        """
        (network,) = self._network
        network.add_flags_custom(is_first_iteration=whole_prompts)

    def construct(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...], whole_prompts: bool
    ) -> Tensor:
        """Returns the logits [sequences, vocab_size] of each sequence's last token.

        ``GptAdapter.construct`` describes the arguments.
        """
        slot_mapping, block_tables, context_lens, query_lens = step[:4]
        hidden = self.llama(
            self.reshape(token_ids, (1, -1)),
            batch_valid_length=query_lens if whole_prompts else context_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            attention_mask=step[4] if len(step) > 4 else self.no_mask,
            position_ids=positions,
            q_seq_lens=query_lens,
        )
        hidden = self.reshape(hidden, (-1, self.hidden_size))
        return self.lm_head(self.gather(hidden, last_tokens, 0))
