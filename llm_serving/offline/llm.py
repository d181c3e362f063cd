"""The class ``LLM``: uses a model in a Python program, with the engine of the server but without HTTP."""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.offline.calls import answer_all
from llm_serving.offline.host import EngineHost
from llm_serving.offline.outputs import Output, embedding_of, output_of
from llm_serving.offline.progress import call_progress
from llm_serving.offline.requests import Sampling, bodies_of, conversations_of, prompts_of
from llm_serving.offline.settings import config_of
from llm_serving.server.openai import chat, completions
from llm_serving.server.pooling import embeddings
from llm_serving.server.state import Endpoint
from llm_serving.telemetry.progress import ProgressDisplay

_COMPLETIONS, *_ = completions.ENDPOINTS
_CHAT, *_ = chat.ENDPOINTS
_EMBEDDINGS, *_ = embeddings.ENDPOINTS


class LLM:
    """A model with its agents. Use it as a context manager, or call ``close`` at the end.

    The outputs have the same tokens as the server's response to the same request. Any thread may call the methods.

    The constructor raises ConfigError, CheckpointError or MemoryPlanError before it starts processes, and
    AgentStartError if an agent fails. The methods raise RequestError for a wrong request and EngineFailedError if the
    engine fails. The text of a RequestError names the index of the request.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: str | PathLike[str] | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        offline: bool = False,
        progress: bool | None = None,
        **settings: object,
    ) -> None:
        """Loads a model and waits until it is ready.

        ``model`` is a model folder, a GGUF file or a name on a hub. None: the model of ``config``. ``config`` is a YAML
        file, as for the server. ``dtype`` and ``quantize`` are the options of the command line. ``offline`` forbids
        downloads. ``progress`` shows progress on the standard error stream. None: only if this stream is a terminal.
        ``settings`` are sections of the configuration with a dict of their keys, for example ``pa_config={"num_blocks":
        512}``.
        """
        self._show = sys.stderr.isatty() if progress is None else progress
        options = {"dtype": dtype, "quantize": quantize}
        with ExitStack() as owned:
            folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="llm-serving-")))
            places = (None if model is None else fspath(model), None if config is None else fspath(config))
            loaded = config_of(*places, options, settings, folder, offline=offline)
            display = ProgressDisplay(num_agents=loaded.parallel_config.world_size) if self._show else None
            note = _no_note if display is None else display.update
            self._host = EngineHost(loaded, note)
            owned.callback(self._host.close)
            try:
                if display is not None:
                    display.watch()
                self._host.start()
            finally:
                if display is not None:
                    display.close()
            # The finalizer closes the LLM if the program does not. It runs when the object is freed or the interpreter
            # ends.
            self._finalizer = weakref.finalize(self, owned.pop_all().close)

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._host.config.model_name

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Generates a continuation of each prompt. Returns the outputs in order. A prompt is a text or a list of token
        ids.

        ``sampling`` has fields of ``/v1/completions`` by name: one mapping for all prompts, or a list with one for
        each. ``progress`` overrides the argument of the constructor.
        """
        bodies = bodies_of("prompt", prompts_of(prompts), sampling, _WITH_IDS, is_chat=False)
        return list(map(output_of, self._answers(_COMPLETIONS, bodies, "prompts", progress)))

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answers each conversation and returns the outputs in order. A conversation is a list of messages.

        ``sampling`` has fields of ``/v1/chat/completions`` by name. ``tools`` describes the functions that the model
        may call in all conversations. The calling program must run them.
        """
        more = _WITH_IDS if tools is None else {**_WITH_IDS, "tools": list(tools)}
        bodies = bodies_of("messages", conversations_of(conversations), sampling, more, is_chat=True)
        return list(map(output_of, self._answers(_CHAT, bodies, "conversations", progress)))

    def embed(
        self,
        texts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Returns the embedding of each text: float32 [texts, width].

        ``dimensions`` shortens the embeddings, if the model permits it. ``prompt_name`` names a prompt of the model
        that is put before each text. Raises RequestError for a model that generates text instead of embeddings.
        """
        more = {"dimensions": dimensions, "prompt_name": prompt_name, "encoding_format": "base64"}
        bodies = bodies_of("input", prompts_of(texts), None, more, is_chat=False)
        vectors = list(map(embedding_of, self._answers(_EMBEDDINGS, bodies, "texts", progress)))
        return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)

    def close(self) -> None:
        """Ends all calls, the engine and the agents. Further calls of this method have no effect."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(
        self, endpoint: Endpoint, bodies: Sequence[bytes], name: str, progress: bool | None
    ) -> Iterable[bytes]:
        """Calls ``endpoint`` with each body and returns the responses. The texts of errors begin with ``name``."""
        config = self._host.config
        parallel = min(2 * config.max_num_seqs * config.parallel_config.data_parallel,
                       config.scheduler_config.max_waiting_requests)  # fmt: skip
        show = self._show if progress is None else progress
        with call_progress(name, len(bodies), show=show) as note:
            return self._host.run(answer_all(self._host.app, endpoint, name, bodies, parallel, note))


_WITH_IDS: Mapping[str, Any] = {"return_token_ids": True}


def _no_note(rank: int, stage: str, done: int, total: int) -> None:
    """Ignores progress."""
