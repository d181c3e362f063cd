"""Adds LoRA adapters to the linear layers of the native op table (``agent.lora.stacked`` describes the matrices).

The tokens of a step are ordered by adapter slot, so the rows of an adapter are consecutive. Two grouped matrix products
compute ``B (A x)`` for all adapters of the step. Each product multiplies the rows of every slot by the matrix of this
slot.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from agent.backends.base import Operator
from agent.backends.native.experts import grouped_product
from agent.weights.forms import LinearForm


class AddAdapters(nn.Cell):
    """Adds the products of the adapters to the output of a linear layer. Rounds after each product and after the
    addition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shrink, self.expand = grouped_product(LinearForm()), grouped_product(LinearForm())
        self.add = ops.Add()

    def construct(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """Returns out + B (A x) [tokens, outputs].

        x is [tokens, inputs], a [groups, inputs, ranks] and b [groups, ranks, outputs]. The last entry of ``step`` is
        the number of rows of each group.
        """
        rows = step[-1]
        return self.add(out, self.expand(self.shrink(x, a, rows), b, rows))


class WithoutAdapters(nn.Cell):
    """Calls an attention operator without ``adapter_rows``, the last entry of ``step``, because the operator does not
    take it.
    """

    def __init__(self, attention: Operator) -> None:
        super().__init__()
        self.attention = attention

    def construct(
        self,
        qkv: Tensor,
        of_heads: tuple[Tensor, ...],
        rotary: tuple[Tensor, ...],
        caches: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Any:
        return self.attention(qkv, of_heads, rotary, caches, step[:-1], whole_prompts)


class LatentWithoutAdapters(nn.Cell):
    """Calls an operator of latent attention without ``adapter_rows``, the last entry of ``step``, because the operator
    does not take it.
    """

    def __init__(self, attention: Operator) -> None:
        super().__init__()
        self.attention = attention

    def construct(
        self,
        joined: Tensor,
        weights: tuple[Any, ...],
        rotary: tuple[Tensor, ...],
        cache: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        return self.attention(joined, weights, rotary, cache, step[:-1])
