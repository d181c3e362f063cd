"""Compiles models with a primitive that has no CPU kernel, and prints the errors as JSON.

The kernel is missing for the type of the model or for every type. test_missing_primitive.py starts this program in a
separate process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

from agent.backends.runtime import start_runtime  # noqa: E402
from llm_serving.errors import AgentStartError  # noqa: E402
from support.step_config import make_config  # noqa: E402


def main() -> None:
    config = make_config(Path(sys.argv[1]), "bfloat16", "native")
    start_runtime(config)
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn, ops
    from mindspore.ops import auto_generate

    from agent.backends.selector import select_op_table
    from agent.kernels import StepBuffers
    from agent.step_graph.making import make_step_graph

    class Model(nn.Cell):
        """A model that only embeds the last tokens and calls one primitive."""

        def __init__(self, primitive: object) -> None:
            super().__init__()
            self.table = Parameter(Tensor([[1.0, 2.0]] * 8, ms.bfloat16))
            self.gather, self.primitive = ops.Gather(), primitive

        def construct(
            self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...], whole: bool
        ) -> Tensor:
            return self.primitive(self.gather(self.table, self.gather(token_ids, last_tokens, 0), 0))

    limits = config.slot_limits()
    buffers = StepBuffers(limits.max_tokens, limits.max_seqs, limits.max_seqs * limits.max_blocks_per_seq)
    errors = {}
    for primitive in (auto_generate.FastGeLU(), auto_generate.Exp2()):
        graph = make_step_graph(Model(primitive), select_op_table(config), buffers, limits, 1, config.shape.vocab_size)
        try:
            graph.compile()
        except AgentStartError as error:
            errors[primitive.name] = str(error)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
