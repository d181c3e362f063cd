"""Runs logits processors: Python code of the server's operator that changes the logits before each token is sampled.

The config names the classes (``model_config.logits_processors``). A request cannot name or load a processor. A
processor gets the tokens and the logits of one sequence at a time, so that no sequence depends on another.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AgentError, AgentStartError

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class LogitsProcessor(Protocol):
    """The interface of a logits processor, a class that the operator of the server has written.

    Each agent makes one object of the class, with the size of the vocabulary as its argument. The result of a call must
    depend only on its arguments. Otherwise texts would depend on the order of the steps.
    """

    def __call__(self, prompt_token_ids: Int32Array, output_token_ids: Int32Array, logits: Float32Array, /) -> None:
        """Changes ``logits`` [vocabulary] of the next token in place. The value -infinity forbids a token.

        ``prompt_token_ids`` and ``output_token_ids`` are the tokens of the sequence so far. They are read-only.
        """


def load_processors(names: Sequence[str], vocab_size: int) -> list[tuple[str, LogitsProcessor]]:
    """Makes the processors with the names ``module:Class``. Returns (name, processor) in the order of ``names``.

    Raises AgentStartError if a processor cannot be made.
    """
    return [(name, _loaded(name, vocab_size)) for name in names]


def _loaded(name: str, vocab_size: int) -> LogitsProcessor:
    module, _, cls = name.partition(":")
    try:
        processor: LogitsProcessor = getattr(importlib.import_module(module), cls)(vocab_size)
    except Exception as error:  # the operator of the server wrote this code, so it may raise any error
        raise AgentStartError(
            f"model_config.logits_processors: {name!r} cannot be made: {error!r}. The module must be importable "
            "(PYTHONPATH), and the class takes the size of the vocabulary"
        ) from error
    if not callable(processor):
        raise AgentStartError(f"model_config.logits_processors: an object of {name!r} cannot be called")
    return processor


def process(
    processors: Sequence[tuple[str, LogitsProcessor]], history: Int32Array, num_prompt_tokens: int, logits: Float32Array
) -> None:
    """Changes the logits [vocabulary] of one sequence in place. ``history`` has the tokens of its prompt and output.

    Raises AgentError if a processor fails, if it forbids every token, or if a logit is NaN or +infinity.
    """
    tokens = history.view()
    tokens.flags.writeable = False
    prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
    for name, processor in processors:
        try:
            processor(prompt, output, logits)
        except Exception as error:  # the operator of the server wrote this code, so it may raise any error
            raise AgentError(f"the logits processor {name!r} failed: {error!r}") from error
        if not (logits < np.inf).all() or not (logits > -np.inf).any():
            raise AgentError(f"the logits processor {name!r} left NaN, +infinity or no token that may follow")
