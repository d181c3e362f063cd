"""Passes the inputs of a step and the layouts of weights to objects that record them, and prints JSON.

The recorders replace MindFormers' classes. test_mapping.py starts this program in its own process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

from agent.backends.runtime import start_runtime  # noqa: E402
from support.step_config import make_config  # noqa: E402


class Gpt:
    """A recorder that replaces ``GPTModel`` and keeps its arguments.

    It returns hidden states whose elements are the number of their row.
    """

    def __init__(self) -> None:
        self.call: dict[str, Any] = {}
        self.return_hidden_states, self.move_lens_to_cpu = False, True

    def __call__(self, token_ids: Any, **inputs: Any) -> Any:
        from mindspore import Tensor

        self.call = {"token_ids": token_ids, **inputs}
        return Tensor([[float(row)] for row in range(token_ids.shape[0])])

    def output_layer(self, hidden: Any) -> Any:
        return hidden


class Llama:
    """A recorder that replaces ``LlamaModel`` of MindFormers' older library. Its hidden size is 64."""

    def __init__(self) -> None:
        self.call: dict[str, Any] = {}

    def __call__(self, token_ids: Any, **inputs: Any) -> Any:
        from mindspore import Tensor

        self.call = {"token_ids": token_ids, **inputs}
        return Tensor([[[float(row)] * 64 for row in range(token_ids.shape[1])]])


class LlamaNetwork:
    def __init__(self) -> None:
        self.model, self.lm_head = Llama(), lambda hidden: hidden
        self.flags: list[dict[str, bool]] = []

    def add_flags_custom(self, **flags: bool) -> None:
        self.flags.append(flags)


class Network:
    def __init__(self) -> None:
        self.model = Gpt()
        self.flags: list[dict[str, bool]] = []

    def add_flags_custom_mcore(self, **flags: bool) -> None:
        self.flags.append(flags)

    def add_flags_chunked(self, **flags: bool) -> None:
        self.flags.append(flags)


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.asnumpy().tolist()


def main() -> None:
    config = make_config(Path(sys.argv[1]), "float16", "native")
    start_runtime(config)
    import numpy as np
    from mindspore import Tensor

    from agent.backends.selector import select_op_table
    from agent.mindformers.gpt import GptAdapter
    from agent.mindformers.llama import LlamaAdapter

    network = Network()
    model = GptAdapter(network, config, select_op_table(config))
    llama_network = LlamaNetwork()
    llama = LlamaAdapter(llama_network, config, select_op_table(config))

    def int32(*values: Any) -> Tensor:
        return Tensor(np.array(values, np.int32))

    token_ids, positions, last_tokens = int32(5, 6, 7, 8, 9), int32(0, 1, 2, 0, 1), int32(2, 4)
    slots, tables, contexts, queries = int32(16, 17, 18, 32, 33), int32([1, 0], [2, 0]), int32(3, 2), int32(3, 2)
    mask = Tensor([[7.0]])
    results: dict[str, Any] = {"llama": {}}
    steps = {
        "prefill": ((slots, tables, contexts, int32(3, 2, 0, 0)), True),
        "chunked": ((slots, tables, contexts, queries, mask), False),
        "decode": ((slots, tables, contexts, queries), False),
    }
    for name, (step, whole_prompts) in steps.items():
        model.take_form(whole_prompts=whole_prompts)
        logits = model.construct(token_ids, positions, last_tokens, step, whole_prompts)
        call = dict(network.model.call)
        caches = [call.pop("key_cache"), call.pop("value_cache")]
        results[name] = {
            "flags": network.flags[-2:],
            "logits": plain(logits),
            "mask_shape": list(call["attention_mask"].shape),
            "caches": [[parameter.name for parameter in each] for each in caches],
            **{key: plain(value) for key, value in call.items() if key != "attention_mask"},
        }
        llama.take_form(whole_prompts=whole_prompts)
        logits = llama.construct(token_ids, positions, last_tokens, step, whole_prompts)
        inputs = {key: plain(value) for key, value in llama_network.model.call.items()}
        results["llama"][name] = {"flags": llama_network.flags[-1:], "logits": plain(logits), **inputs}
    results["switches"] = [network.model.return_hidden_states, network.model.move_lens_to_cpu]
    results["cache_shape"] = list(model.key_caches[0].shape)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
