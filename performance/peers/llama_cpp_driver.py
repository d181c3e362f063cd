"""Runs llama.cpp through its C interface: all prompts in one batch, then one token per sequence and call."""

from __future__ import annotations

from typing import Any

import driver
import llama_cpp as llama
import numpy as np


class Model:
    """A model in llama.cpp. Makes a new context of llama.cpp when the number or the length of the sequences changes."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(request["model"].encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{request['model']} could not be loaded")
        self._key: tuple[int, int] | None = None
        self._context: Any = None

    def generate(self, prompts: list[list[int]], new: int) -> None:
        context = self._context_for(len(prompts), len(prompts[0]) + self._request["new"])
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        length = len(prompts[0])
        tokens = self._decode(context, prompts, 0)
        for position in range(length, length + new - 1):
            tokens = self._decode(context, [[token] for token in tokens], position)

    def _context_for(self, sequences: int, tokens: int) -> Any:
        if self._key != (sequences, tokens):
            if self._context is not None:
                llama.llama_free(self._context)
            params = llama.llama_context_default_params()
            params.n_ctx = sequences * (-(-tokens // 256) * 256)
            params.n_seq_max = sequences
            params.n_batch = max(2048, sequences * tokens)
            params.n_threads = params.n_threads_batch = self._request["threads"]
            self._context = llama.llama_init_from_model(self._model, params)
            self._key = (sequences, tokens)
        return self._context

    def _decode(self, context: Any, rows: list[list[int]], position: int) -> list[int]:
        """Computes the tokens ``rows`` of each sequence, which begin at ``position``. Returns the next greedy token of
        each sequence.
        """
        batch = llama.llama_batch_init(sum(map(len, rows)), 0, 1)
        last = []
        index = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[index], batch.pos[index] = token, position + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = offset == len(row) - 1
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        code = llama.llama_decode(context, batch)
        llama.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with {code}")
        vocab_size = self._request["vocab_size"]
        logits = (llama.llama_get_logits_ith(context, place) for place in last)
        return [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in logits]


def make_generate(request: dict[str, Any]) -> driver.Generate:
    return Model(request).generate


driver.main(make_generate)
