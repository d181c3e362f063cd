"""The endpoints ``/v1/rerank``, ``/v2/rerank`` (Jina's and Cohere's API), ``/v1/score`` (vLLM's API), and their short
paths ``/rerank`` and ``/score``.

If the server's task is scores, the model reads the query and a text together, as Qwen3-Reranker does. A classifier with
one class also reads both together, and the logit of its class gives the score. If the task is embeddings, the score is
the cosine of the embeddings of query and text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field
from starlette.requests import Request

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import RequestError
from llm_serving.model.pooling import IDENTITY, NO_PROMPT, Pooling
from llm_serving.server.fields.shared import IGNORED, Name
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.generation.prompts import Prompt, check_choices, check_prompt, max_chars, resolve_prompts
from llm_serving.server.generation.scheduling import SchedulingFields, tenant_of
from llm_serving.server.generation.sequences import Generation
from llm_serving.server.generation.work import check_work, off_loop
from llm_serving.server.http.body import read_request, whole_response
from llm_serving.server.limits import INLINE_TOKENIZE_CHARS, MAX_PROMPTS
from llm_serving.server.models.lookup import served
from llm_serving.server.pooling.embeddings import prompt_text, with_prompt
from llm_serving.server.pooling.pooled import cosine, pooled_results, pooling_of, receipt_member, usage_of
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction for requests that state no instruction. It is the default of Qwen3-Reranker."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QUERY_PROMPT, _DOCUMENT_PROMPTS = "query", ("document", "passage")
"""Names of prompts that sentence-transformers uses for queries and documents."""


class DocumentText(StrictModel):
    """A document that the request gives as a JSON object."""

    text: str


class RankingFields(SchedulingFields, StrictModel):
    """Fields of all endpoints that compare texts."""

    ignored = IGNORED

    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    instruction: str | None = Field(
        default=None, description="What makes a document relevant. Only with the prompt of Qwen3-Reranker."
    )
    use_activation: bool | None = Field(
        default=None,
        description="False: return the logit, or logit(yes) - logit(no), instead of a probability from 0 to 1. Not for "
        "embeddings.",
    )


T = TypeVar("T")
Documents = Annotated[list[str | DocumentText], Field(min_length=1, max_length=MAX_PROMPTS, description="The texts.")]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]


class RerankRequest(RankingFields):
    """Request body of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``: a query, and documents to sort."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"max_chunks_per_doc": (None,)}

    query: str = Field(description="What the documents should answer.")
    documents: Documents
    top_n: int | None = Field(default=None, ge=1, description="Number of documents to return (default: all).")
    return_documents: bool | None = Field(default=None, description="Add the text of each document.")
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, description="Maximum number of tokens that are read of each document (default: all)."
    )


class ScoreRequest(RankingFields):
    """Request body of ``/v1/score`` and ``/score``: pairs of texts."""

    text_1: str | Texts = Field(
        description="A text for all texts of `text_2`, or a list with a text for each text of `text_2`."
    )
    text_2: str | Texts = Field(description="The texts to score.")


async def rerank(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``/v1/rerank`` and its other paths: return the documents with scores, the most relevant first."""
    state.check_queue(tenant_of(request))
    body = await read_request(RerankRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    pooling = _pooling_of(state)
    generation = Generation(state, request, "rerank", "rerank", body, stream=False)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    names = ("query", "documents")
    texts = await _shortened(state, documents, body.max_tokens_per_doc)
    if pooling.task != "embed":
        scores = await _judged(generation, request, body, [body.query], texts, names)
    else:
        known = {prompt.name for prompt in pooling.prompts}
        query_prompt = _QUERY_PROMPT if _QUERY_PROMPT in known else None
        document_prompt = next((name for name in _DOCUMENT_PROMPTS if name in known), None)
        before = (prompt_text(pooling, query_prompt), prompt_text(pooling, document_prompt))
        scores = await _compared(generation, request, body, [body.query], texts, names, before)
    best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]

    def build() -> dict[str, Any]:
        results: list[dict[str, Any]] = []
        for index in best:
            document = {"document": {"text": documents[index]}} if body.return_documents else {}
            results.append({"index": index, "relevance_score": scores[index], **document})
        return {
            "id": generation.request_id,
            "model": state.engine.model_name,
            "results": results,
            "usage": usage_of(generation),
            **receipt_member(generation),
        }

    return await whole_response(generation.request_id, len(best), build)


async def score(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``/v1/score`` and ``/score``: return the score of each pair of texts."""
    state.check_queue(tenant_of(request))
    body = await read_request(ScoreRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    pooling = _pooling_of(state)
    generation = Generation(state, request, "score", "score", body, stream=False)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"'text_1' holds {len(first)} texts and 'text_2' holds {len(second)}; give one text_1, or as many.",
            param="text_1",
            code="invalid_value",
        )
    names = ("text_1", "text_2")
    if pooling.task != "embed":
        scores = await _judged(generation, request, body, first, second, names)
    else:
        before = prompt_text(pooling, None)
        scores = await _compared(generation, request, body, first, second, names, (before, before))

    def build() -> dict[str, Any]:
        return {
            "id": generation.request_id,
            "object": "list",
            "created": generation.created,
            "model": state.engine.model_name,
            "data": [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)],
            "usage": usage_of(generation),
            **receipt_member(generation),
        }

    return await whole_response(generation.request_id, len(scores), build)


_RERANK_EXAMPLE = '{"query": "Where does the fox live?", "documents": ["By the river.", "It is noon."]}'
_RERANK_SUMMARY = "Sort documents by their relevance for a query."
_SCORE_EXAMPLE = '{"text_1": "Where does the fox live?", "text_2": ["By the river.", "It is noon."]}'
_SCORE_SUMMARY = "Scores of pairs of texts."

ENDPOINTS = (
    *(
        Endpoint("POST", path, rerank, _RERANK_SUMMARY, RerankRequest, _RERANK_EXAMPLE, queued=True)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Endpoint("POST", path, score, _SCORE_SUMMARY, ScoreRequest, _SCORE_EXAMPLE, queued=True)
        for path in ("/v1/score", "/score")
    ),
)


def _pooling_of(state: ServerState) -> Pooling:
    """Returns the server's settings for scores. Raises RequestError if it computes text, or several classes."""
    pooling = pooling_of(state, "embed", "score", "classify")
    if len(pooling.labels) > 1:
        raise RequestError(
            f"This model has {len(pooling.labels)} classes, and a score needs a model with one class. Use /classify.",
            code="unsupported_task",
        )
    return pooling


async def _shortened(state: ServerState, texts: Sequence[str], max_tokens: int | None) -> list[str]:
    """Returns the texts, each cut after ``max_tokens`` tokens. None cuts no text."""
    if max_tokens is None:
        return list(texts)
    tokenizer = state.engine.tokenizer
    max_length = min(max_tokens * tokenizer.max_piece_chars, max_chars(state))
    parts = [text[:max_length] for text in texts]
    cut = partial(_first_tokens, tokenizer, parts, max_tokens)
    return await off_loop(sum(map(len, parts)), cut, INLINE_TOKENIZE_CHARS)


def _first_tokens(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Returns the texts, each cut after ``max_tokens`` tokens, but at least one character long."""
    short = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > max_tokens:
            text = tokenizer.decode(ids[:max_tokens], skip_special_tokens=False).rstrip("\ufffd") or text[:1]
        short.append(text)
    return short


async def _judged(
    generation: Generation,
    request: Request,
    body: RankingFields,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
) -> list[float]:
    """Returns the scores of pairs of texts, from a model that reads both texts of a pair together.

    ``names`` are the request's fields of ``first`` and ``second``, for errors.
    """
    _check_texts(first, second, names)
    _check_copies(generation.state.settings.max_body_bytes, body.instruction or "", first, second, names)
    check_choices(len(second), 1)
    pooling = _pooling_of(generation.state)
    if pooling.pair_prompt == NO_PROMPT:
        prompts = await _joined(generation.state, body, first, second, names)
    else:
        instruction = INSTRUCTION if body.instruction is None else body.instruction
        texts: list[str | list[int]] = [
            f"{_BEFORE}<Instruct>: {instruction}\n<Query>: {one}\n<Document>: {other}{_AFTER}"
            for one, other in _pairs(first, second)
        ]
        prompts = await resolve_prompts(generation.state, texts, names[1])
    results = await pooled_results(generation, request, prompts, names[1])
    logits = [float(result[0]) for result in results]
    keeps_logits = body.use_activation is False or pooling.score_activation == IDENTITY
    return logits if keeps_logits else list(map(_sigmoid, logits))


async def _joined(
    state: ServerState, body: RankingFields, first: Sequence[str], second: Sequence[str], names: tuple[str, str]
) -> list[Prompt]:
    """Returns the prompts of pairs of texts without further words: the tokens of both texts.

    Each text has the tokenizer's special tokens, as in a pair of texts in Hugging Face's tokenizers of decoder models.
    """
    if body.instruction is not None:
        raise RequestError(
            "'instruction' has no effect on this model, which reads only the two texts (model_config.pair_prompt); "
            "leave it out.",
            param="instruction",
            code="unsupported_parameter",
        )
    queries = await resolve_prompts(state, list(first), names[0])
    documents = await resolve_prompts(state, list(second), names[1])
    pairs = _pairs(queries, documents)
    lengths = [len(one.token_ids) + len(other.token_ids) for one, other in pairs]
    for index, length in enumerate(lengths):
        check_prompt(length, state.settings, names[1] if len(pairs) == 1 else f"{names[1]}[{index}]")
    check_work(state.settings, [(length, 1) for length in lengths], 1, name=names[1])
    return await off_loop(
        sum(lengths), lambda: [Prompt([*one.token_ids, *other.token_ids]) for one, other in pairs]
    )


async def _compared(
    generation: Generation,
    request: Request,
    body: RankingFields,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    before: tuple[str, str],
) -> list[float]:
    """Returns the cosine of the two embeddings of each pair of texts.

    ``before`` are two prompts: one is put before each text of ``first``, the other before each text of ``second``.
    """
    for name in ("instruction", "use_activation"):
        if getattr(body, name) is not None:
            raise RequestError(
                f"'{name}' has no effect on embeddings, which this server computes; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    _check_texts(first, second, names)
    check_choices(len(first) + len(second), 1)
    groups = [
        await resolve_prompts(generation.state, with_prompt(list(texts), prompt), name)
        for texts, name, prompt in zip((first, second), names, before, strict=True)
    ]
    vectors = await pooled_results(generation, request, [*groups[0], *groups[1]], names[1])
    pairs = _pairs(vectors[: len(first)], vectors[len(first) :])
    # 255 pairs of wide embeddings would block the event loop for 20 ms.
    return await asyncio.to_thread(lambda: [cosine(one, other) for one, other in pairs])


def _check_texts(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> None:
    for name, texts in zip(names, (first, second), strict=True):
        empty = next((index for index, text in enumerate(texts) if not text), None)
        if empty is not None:
            place = name if len(texts) == 1 else f"{name}[{empty}]"
            raise RequestError(f"'{place}' is empty; give a text.", param=place, code="invalid_value")


def _check_copies(
    limit: int, instruction: str, first: Sequence[str], second: Sequence[str], names: tuple[str, str]
) -> None:
    """Raises RequestError if the texts of all pairs together have more than ``limit`` characters.

    Each pair has its own copy of the instruction, and of a text that is compared with all others. Without this check, a
    small body could take much memory.
    """
    pairs, num_second = len(second), sum(map(len, second))
    one, num_first = f"{pairs} x {len(first[0])}", pairs * len(first[0])
    if len(first) > 1:
        num_first = sum(map(len, first))
        one = f"{num_first}"
    total = pairs * len(instruction) + num_first + num_second
    if total > limit:
        raise RequestError(
            f"The model would read {pairs} x {len(instruction)} (instruction) + {one} ({names[0]}) + {num_second} "
            f"({names[1]}) = {total} characters; the maximum is {limit} (serving_config.max_body_bytes). Send fewer or "
            "shorter texts.",
            param=names[1],
            code="request_too_large",
        )


def _pairs(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    return list(zip(first if len(first) > 1 else list(first) * len(second), second, strict=True))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
