"""Tests that real servers compute embeddings and scores as sentence-transformers does, with the same bits in every
batch.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from performance.models.folders import write_model
from performance.models.variants import VARIANTS
from support.embedding_folders import (
    VARIANT,
    class_weights,
    expected_embedding,
    write_classifier_folder,
    write_embedding_folder,
)
from support.llama_in_numpy import NumpyLlama
from support.server_process import ServerProcess, running_server
from support.sweeps import with_sweeps

COSINE = 0.99999
FLOAT32 = "model_config.model_dtype=float32"
_RANDOM = np.random.default_rng(27)
TEXTS = [_RANDOM.integers(3, 700, size).tolist() for size in (1, 2, 15, 16, 17, 33, 90, 200, 5, 61, 120, 31)]
"""Token ids of texts of many lengths. Some lengths are multiples of a block or of a chunk."""
PRESSED = [
    "scheduler_config.max_num_batched_tokens=24",
    "scheduler_config.policy=chunked",
    "pa_config.num_blocks=40",
    "scheduler_config.prefix_cache=True",
]
"""Settings with small chunks, few blocks and a prefix cache."""


def embeddings(server: ServerProcess, inputs: object, **fields: Any) -> list[npt.NDArray[np.float32]]:
    answer = server.post("/v1/embeddings", {"input": inputs, "encoding_format": "base64", **fields})
    assert "data" in answer, answer
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]


def error_of(server: ServerProcess, path: str, body: object) -> tuple[int, str | None, str]:
    answer = server.post(path, body)
    return answer["status"], answer["error"]["param"], answer["error"]["message"]


@pytest.mark.parametrize(
    ("mode", "dense", "has_prefix"),
    with_sweeps(
        [("mean_tokens", True, True), ("lasttoken", False, False), ("weightedmean_tokens", False, True)],
        # tests/agent/test_pooling.py compares each mode, and pipeline stages compute "lasttoken" below.
        lambda mode, dense, has_prefix: mode != "mean_tokens",
    ),
)
def test_embeddings_equal_the_oracle_and_have_the_same_bits_in_every_batch(
    tmp_path: Path, mode: str, dense: bool, has_prefix: bool
) -> None:
    folder = write_embedding_folder(tmp_path / "model", mode, dense=dense, has_prefix=has_prefix)
    with running_server(tmp_path / "one", [f"model_config.model_path={folder}", FLOAT32]) as server:
        alone = [embeddings(server, text)[0] for text in TEXTS]
        together = embeddings(server, TEXTS)
        shown = server.post("/v1/embeddings", {"input": TEXTS[3]})["data"][0]["embedding"]
        refused = error_of(server, "/v1/embeddings", {"input": "t1", "dimensions": 32})
    assert (refused[:2], "declares no shorter embeddings" in refused[2]) == ((400, "dimensions"), True)
    llama = NumpyLlama(folder, "float", "float32")
    for text, embedding in zip(TEXTS, alone, strict=True):
        assert float(embedding @ expected_embedding(llama, text, mode, dense=dense)) >= COSINE
        assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
    assert np.array(shown, np.float32).tobytes() == alone[3].tobytes()
    overrides = [f"model_config.model_path={folder}", FLOAT32, *PRESSED]
    with running_server(tmp_path / "two", overrides) as server, ThreadPoolExecutor(4) as clients:
        orders = [TEXTS, TEXTS[::-1], TEXTS[6:] + TEXTS[:6], TEXTS]
        pressed = list(clients.map(lambda texts: embeddings(server, texts), orders))
        usage = server.post("/v1/embeddings", {"input": TEXTS[7]})["usage"]
    found = [together, pressed[0], pressed[1][::-1], pressed[2][6:] + pressed[2][:6], pressed[3]]
    for batch in found:
        assert [each.tobytes() for each in batch] == [each.tobytes() for each in alone]
    # A mean needs the hidden states of all tokens, which a cached prefix does not have.
    assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is (mode == "lasttoken")


@pytest.mark.parametrize("mode", with_sweeps([("mean_tokens",), ("lasttoken",)], lambda mode: mode == "lasttoken"))
def test_native_operators_return_embeddings_too(tmp_path: Path, mode: str) -> None:
    folder = write_embedding_folder(tmp_path / "model", mode)
    overrides = [
        f"model_config.model_path={folder}",
        "model_config.model_dtype=bfloat16",
        "model_config.op_table=native",
    ]
    texts = TEXTS[:5]
    with running_server(tmp_path / "server", overrides) as server:
        alone = [embeddings(server, text)[0] for text in texts]
        together = embeddings(server, texts)
    llama = NumpyLlama(folder, "float", "float32")
    for text, embedding, again in zip(texts, alone, together, strict=True):
        assert float(embedding @ expected_embedding(llama, text, mode)) >= 0.99
        assert embedding.tobytes() == again.tobytes()


@pytest.mark.parametrize(
    ("mode", "groups"),
    [
        pytest.param("mean_tokens", ["parallel_config.tensor_parallel=2"], marks=pytest.mark.sweep),
        ("lasttoken", ["parallel_config.pipeline_parallel=2"]),
    ],
    ids=["tensor parallel", "stages"],
)
def test_groups_of_agents_return_embeddings(tmp_path: Path, mode: str, groups: list[str]) -> None:
    folder = write_embedding_folder(tmp_path / "model", mode, dense=mode == "mean_tokens")
    overrides = [f"model_config.model_path={folder}", FLOAT32, *PRESSED, *groups]
    with running_server(tmp_path / "server", overrides) as server:
        alone = [embeddings(server, text)[0] for text in TEXTS[:8]]
        together = embeddings(server, TEXTS[:8])
    llama = NumpyLlama(folder, "float", "float32")
    for text, one, other in zip(TEXTS, alone, together, strict=False):
        assert float(one @ expected_embedding(llama, text, mode, dense=mode == "mean_tokens")) >= COSINE
        assert one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, NumpyLlama]]:
    """A server with matryoshka embeddings and prompts, and the oracle of its model."""
    place = tmp_path_factory.mktemp("embedder")
    folder = write_embedding_folder(place / "model", "lasttoken", dimensions=(32, 64), prompts=True)
    with running_server(place / "server", [f"model_config.model_path={folder}", FLOAT32]) as server:
        yield server, NumpyLlama(folder, "float", "float32")


def test_shorter_embeddings_are_cut_before_they_are_normalised(embedder: tuple[ServerProcess, NumpyLlama]) -> None:
    server, llama = embedder
    [found] = embeddings(server, TEXTS[4], dimensions=32)
    assert found.size == 32
    assert float(found @ expected_embedding(llama, TEXTS[4], "lasttoken", dimensions=32)) >= COSINE


def test_texts_prompts_and_token_ids_give_the_same_embedding(embedder: tuple[ServerProcess, NumpyLlama]) -> None:
    server, _ = embedder
    text, ids = "t40 t41 t42", [40, 41, 42]
    [from_text], [from_ids] = embeddings(server, text), embeddings(server, ids)
    assert from_text.tobytes() == from_ids.tobytes()
    [prompted], [written] = embeddings(server, text, prompt_name="query"), embeddings(server, [7, 8, *ids])
    assert prompted.tobytes() == written.tobytes() != from_text.tobytes()
    first, _ = embeddings(server, [text, "t9"])
    assert first.tobytes() == from_text.tobytes()


def test_a_server_of_embeddings_ranks_by_cosine(embedder: tuple[ServerProcess, NumpyLlama]) -> None:
    server, llama = embedder
    documents = [[40, 41, 42], [300], [50, 51]]
    expected = [
        float(
            expected_embedding(llama, [7, 8, 50, 52], "lasttoken") @ expected_embedding(llama, document, "lasttoken")
        )
        for document in documents
    ]
    texts = [" ".join(f"t{token}" for token in document) for document in documents]
    answer = server.post("/v2/rerank", {"query": "t50 t52", "documents": texts, "return_documents": True})
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
        assert each["document"] == {"text": texts[each["index"]]}
    body = {"query": "t50 t52", "documents": texts, "top_n": 1}
    assert [each["index"] for each in server.post("/v1/rerank", body)["results"]] == order[:1]
    assert server.post("/rerank", body)["results"] == server.post("/v1/rerank", body)["results"]
    scores = server.post("/v1/score", {"text_1": texts[0], "text_2": [texts[0], {}]})
    assert scores["status"] == 400
    scores = server.post("/v1/score", {"text_1": texts[0], "text_2": texts})["data"]
    assert scores[0]["score"] == pytest.approx(1, abs=1e-5)
    assert server.post("/score", {"text_1": texts[0], "text_2": texts})["data"] == scores


def test_rerank_reads_the_first_tokens_of_each_document(embedder: tuple[ServerProcess, NumpyLlama]) -> None:
    server, _ = embedder
    documents = ["t40 t41 t42", "t300", "t50 " * 3000]
    body = {"query": "t50 t52", "documents": documents, "max_tokens_per_doc": 2, "return_documents": True}
    cut = server.post("/v1/rerank", {**body, "documents": ["t40 t41", "t300", "t50 t50"], "max_tokens_per_doc": None})
    found = server.post("/v1/rerank", body)
    scores = [{each["index"]: each["relevance_score"] for each in answer["results"]} for answer in (found, cut)]
    assert scores[0] == scores[1]
    assert {each["document"]["text"] for each in found["results"]} == set(documents)
    whole = server.post("/v1/rerank", {**body, "documents": documents[:2], "max_tokens_per_doc": 3})["results"]
    assert next(each["relevance_score"] for each in whole if each["index"] == 0) != scores[0][0]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/embeddings", {"input": "t1", "dimensions": 33}, "dimensions", "one of 32, 64"),
        ("/v1/embeddings", {"input": []}, "input", "empty list"),
        ("/v1/embeddings", {"input": ""}, "input", "empty"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]", "no tokens"),
        ("/v1/embeddings", {"input": ["t1", ""]}, "input[1]", "empty"),
        ("/v1/embeddings", {"input": {"text": "t1"}}, "input", "token ids"),
        ("/v1/embeddings", {"input": ["t1"] * 257}, "input", "maximum is 256"),
        ("/v1/embeddings", {"input": [9999]}, "input", "vocabulary"),
        ("/v1/embeddings", {"input": [5] * 600}, "input", "maximum is 512"),
        ("/v1/embeddings", {"input": "t1", "encoding_format": "hex"}, "encoding_format", "base64"),
        ("/v1/embeddings", {"input": "t1", "prompt_name": "title"}, "prompt_name", "query, document"),
        ("/v1/rerank", {"query": "", "documents": ["t1"]}, "query", "empty"),
        ("/v1/rerank", {"query": "t1", "documents": []}, "documents", "at least 1"),
        ("/v1/rerank", {"query": "t1", "documents": ["t1"], "instruction": "x"}, "instruction", "leave it out"),
        ("/v1/rerank", {"query": "t", "documents": ["t1"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "equal to"),
        ("/v1/rerank", {"query": "t", "documents": ["t1"], "max_chunks_per_doc": 2}, "max_chunks_per_doc", "not supp"),
        ("/v1/score", {"text_1": "t1", "text_2": "t1", "max_tokens_per_doc": 2}, "max_tokens_per_doc", "Unrecognized"),
        ("/v1/score", {"text_1": ["t1", "t2"], "text_2": ["t1"] * 3}, "text_1", "2 texts"),
        ("/v1/completions", {"prompt": "t1"}, None, "generates no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "t1"}]}, None, "generates no text"),
        ("/generate", {"inputs": "t1"}, None, "generates no text"),
    ],
)
def test_bad_requests_name_the_field(
    embedder: tuple[ServerProcess, NumpyLlama], path: str, body: object, param: str | None, words: str
) -> None:
    status, found, message = error_of(embedder[0], path, body)
    assert (status, found) == (400, param), message
    assert words in message


def test_a_reranker_scores_by_the_logits_of_yes_and_no(tmp_path: Path) -> None:
    """The score is logit(yes) - logit(no), and the probability of yes if these are the only two answers."""
    folder = tmp_path / "model"
    write_model(VARIANTS[VARIANT], folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    overrides = [
        f"model_config.model_path={folder}",
        FLOAT32,
        "model_config.task=score",
        "model_config.score_token_ids=[11, 12]",
        "scheduler_config.max_num_batched_tokens=24",
    ]
    body = {"query": "t5 t6", "documents": ["t40 t41 t1", "t300 t2", "t9 t9 t10 t3"]}
    with running_server(tmp_path / "server", overrides) as server:
        raw = server.post("/v1/rerank", {**body, "use_activation": False})["results"]
        ranked = server.post("/v1/rerank", body)["results"]
        single = server.post("/v1/score", {"text_1": "t5 t6", "text_2": "t300 t2", "use_activation": False})["data"]
        tokens = server.post("/tokenize", {"prompt": judged("t5 t6", "t300 t2")})["tokens"]
        refused = error_of(server, "/v1/embeddings", {"input": "t1"})
    assert tokenizer["model"]["vocab"]["▁t300"] in tokens
    llama = NumpyLlama(folder, "float", "float32")
    no, yes = llama.rows([11, 12]) @ llama.hidden(tokens)[-1]
    of_index = {each["index"]: each["relevance_score"] for each in raw}
    assert of_index[1] == pytest.approx(yes - no, rel=1e-4, abs=1e-4)
    assert of_index[1] == single[0]["score"]
    assert [each["index"] for each in ranked] == [each["index"] for each in raw]
    for each in ranked:
        assert each["relevance_score"] == pytest.approx(1 / (1 + math.exp(-of_index[each["index"]])))
    assert refused[0] == 400
    assert "computes scores" in refused[2]


def test_a_classifier_returns_the_classes_of_each_text_with_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    labels = ["calm", "angry", "glad"]
    folder = write_classifier_folder(tmp_path / "model", labels)
    overrides = [f"model_config.model_path={folder}", FLOAT32, *PRESSED]
    with running_server(tmp_path / "server", overrides) as server:
        together = server.post("/v1/classify", {"input": TEXTS, "use_activation": False})["data"]
        alone = [server.post("/classify", {"input": text, "use_activation": False})["data"][0] for text in TEXTS]
        shown = server.post("/classify", {"input": "t40 t41 t42"})["data"]
        refused = [error_of(server, "/v1/embeddings", {"input": "t1"})]
        refused.append(error_of(server, "/v1/completions", {"prompt": "t1"}))
        several = error_of(server, "/v1/rerank", {"query": "t1", "documents": ["t1"]})
        empty = error_of(server, "/classify", {"input": ["t1", ""]})
    llama = NumpyLlama(folder, "float", "float32")
    rows = class_weights(len(labels), llama.hidden([1]).shape[1])
    for text, one, other in zip(TEXTS, together, alone, strict=True):
        expected = rows @ llama.hidden(text)[-1]
        assert one["probs"] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
        assert (one["label"], one["num_classes"]) == (labels[int(expected.argmax())], 3)
        assert {**one, "index": 0} == other
    powers = np.exp(rows @ llama.hidden([40, 41, 42])[-1])
    assert shown[0]["probs"] == pytest.approx((powers / powers.sum()).tolist(), abs=1e-4)
    assert [status for status, _, _ in refused] == [400, 400]
    assert "computes classes" in refused[0][2]
    assert several[0] == 400
    assert "has 3 classes" in several[2]
    assert empty[:2] == (400, "input[1]")


def scores_of(server: ServerProcess, query: str, documents: list[str], **fields: Any) -> list[float]:
    answer = server.post("/v1/rerank", {"query": query, "documents": documents, **fields})
    assert "results" in answer, answer
    of_index = {each["index"]: each["relevance_score"] for each in answer["results"]}
    pairs = server.post("/v1/score", {"text_1": query, "text_2": documents, **fields})["data"]
    assert [each["score"] for each in pairs] == [of_index[index] for index in range(len(documents))]
    return [of_index[index] for index in range(len(documents))]


@pytest.mark.parametrize("prompt", with_sweeps([("auto",), ("qwen3",)], lambda prompt: prompt == "qwen3"))
def test_a_classifier_with_one_class_scores_pairs_as_a_cross_encoder(tmp_path: Path, prompt: str) -> None:
    folder = write_classifier_folder(tmp_path / "model", ["relevant"])
    query, documents = "t5 t6", ["t40 t41 t1", "t300 t2", "t9 t9 t10 t3"]
    overrides = [f"model_config.model_path={folder}", FLOAT32, *PRESSED, f"model_config.pair_prompt={prompt}"]
    with running_server(tmp_path / "server", overrides) as server:
        logits = scores_of(server, query, documents, use_activation=False)
        scores = scores_of(server, query, documents)
        alone = [scores_of(server, query, [document])[0] for document in documents]
        classes = server.post("/classify", {"input": "t1"})["data"]
        if prompt == "auto":
            first, *others = (server.post("/tokenize", {"prompt": text})["tokens"] for text in (query, *documents))
            tokens = [first + other for other in others]
        else:
            tokens = [server.post("/tokenize", {"prompt": judged(query, one)})["tokens"] for one in documents]
        other = server.post("/v1/rerank", {"query": "t1", "documents": ["t1"], "instruction": "x"})
    llama = NumpyLlama(folder, "float", "float32")
    expected = [float((class_weights(1, llama.hidden([1]).shape[1]) @ llama.hidden(each)[-1])[0]) for each in tokens]
    assert logits == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert scores == pytest.approx([1 / (1 + math.exp(-each)) for each in logits])
    assert scores == alone
    assert classes[0]["num_classes"] == 1
    assert ("results" in other) is (prompt == "qwen3")
    assert prompt == "qwen3" or other["error"]["param"] == "instruction"


def test_the_config_may_name_scores_without_an_activation(tmp_path: Path) -> None:
    named = {"activation_fn": "torch.nn.modules.linear.Identity"}
    folder = write_classifier_folder(tmp_path / "model", ["relevant"], sentence_transformers=named)
    with running_server(tmp_path / "server", [f"model_config.model_path={folder}", FLOAT32]) as server:
        logits = scores_of(server, "t5", ["t40", "t300 t2"], use_activation=False)
        assert scores_of(server, "t5", ["t40", "t300 t2"]) == logits


def judged(query: str, document: str) -> str:
    """Returns the text that Qwen3-Reranker reads."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
