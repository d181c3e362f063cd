"""A MindFormers inference model with the inputs and outputs of ``agent.models.llama.Llama``.

``InferenceQwen3ForCausalLM`` and its like build a ``GPTModel`` and only hand their arguments on to it. It is called
here directly, with two of the switches it has for servers: ``return_hidden_states``, so that logits are worked out for
the last tokens only, and ``move_lens_to_cpu`` off, as nothing in these models reads the copies of the lengths that
``MoveTo`` makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters

from agent.backends.base import OpTable
from agent.backends.native.attention import causal_mask, no_mask
from agent.layers.attention import attention_form
from agent.layers.parameter import unbound_parameter
from agent.mindformers.families import inference_model, model_settings
from agent.mindformers.names import mindformers_name, our_parameters
from agent.mindformers.package import attribute, import_mindformers, without_prints
from agent.models.names import ignorable_suffixes, weight_specs
from llm_serving.config import Config
from llm_serving.errors import AgentStartError

__all__ = ["MindFormersModel", "build", "ignorable_suffixes", "weight_specs"]


class MindFormersModel(nn.Cell):
    """Token ids to logits of each sequence's last token. Owns the parameters of the KV cache, which MindFormers takes
    as arguments; ``take_form`` must be called before a graph is compiled."""

    def __init__(self, network: Any, config: Config, ops_table: OpTable) -> None:
        super().__init__(auto_prefix=False)
        shape, cache = config.shape, config.pa_config
        self.gpt = network.model
        self.gpt.return_hidden_states = True
        self.gpt.move_lens_to_cpu = False
        self._network = (network,)  # not a child: it would be a second parent of the same Cells
        layout = ops_table.cache_layout(cache.num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)
        self.key_caches = _caches("key_cache", shape.num_layers, *layout)
        self.value_caches = _caches("value_cache", shape.num_layers, *layout)
        self.causal_mask = causal_mask(attention_form(shape, 0), ops_table.dtype)
        self.no_mask = no_mask(ops_table.dtype)
        self.gather = ops.Gather()

    def take_form(self, *, whole_prompts: bool) -> None:
        """Choose the attention that the next graph to be compiled is made of: among the tokens of the step, or over the
        cache. Rotary always takes a row of cosines and sines for each token, as it does for MindFormers' chunks."""
        (network,) = self._network
        network.add_flags_custom_mcore(is_prefill=whole_prompts)
        network.add_flags_chunked(is_chunked=True)

    def construct(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...], whole_prompts: bool
    ) -> Tensor:
        """token_ids, positions [T]; last_tokens [S], the index in T of each sequence's last token; ``step`` and
        ``whole_prompts`` as in ``OpTable`` -> logits [S, vocab_size]."""
        slot_mapping, block_tables, context_lens, query_lens = step[:4]
        mask = self.no_mask
        if whole_prompts:
            mask = self.causal_mask
        elif len(step) > 4:
            mask = step[4]
        hidden = self.gpt(
            token_ids,
            positions=positions,
            # FlashAttentionScore takes them for the lengths of the queries, which those of whole prompts are.
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


def build(config: Config, ops_table: OpTable) -> MindFormersModel:
    """The Cell, its parameters without memory yet. Raises AgentStartError when the package is not there, or its model
    is not the one that the weights are for."""
    import_mindformers(Path(config.log_config.path).parent)
    classes = inference_model(config.shape.architecture)
    settings = attribute(classes.config)(**model_settings(config))
    with no_init_parameters(), without_prints():
        network = attribute(classes.network)(settings)
    network.set_train(False)
    _rename_parameters(network.parameters_dict(), our_parameters(config.shape))
    return MindFormersModel(network, config, ops_table)


def _rename_parameters(found: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Give MindFormers' parameters the names of ours, by which they are loaded and bound."""
    ours = {mindformers_name(name): name for name in wanted}
    for name in sorted(found.keys() | ours.keys()):
        shape = found[name].shape if name in found else "none"
        loaded = wanted[ours[name]] if name in ours else "none"
        if shape != loaded:
            raise AgentStartError(
                f"MindFormers' model has a parameter {name} of shape {shape}, and the model folder one of {loaded}"
            )
    for name, parameter in found.items():
        parameter.name = ours[name]


def _caches(name: str, num_layers: int, shape: tuple[int, ...], dtype: str) -> ParameterTuple:
    parameters = []
    for layer in range(num_layers):
        parameter = unbound_parameter(shape, dtype)
        parameter.name = f"layers.{layer}.attention.{name}"
        parameters.append(parameter)
    return ParameterTuple(parameters)
