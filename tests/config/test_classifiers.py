"""Tests how a model's classes are read from ``config.json``, and how probabilities are made of their logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_serving.errors import CheckpointError
from llm_serving.model.pooling import (
    IDENTITY,
    NO_PROMPT,
    QWEN3_PROMPT,
    SIGMOID,
    SOFTMAX,
    is_classifier,
    read_classifier,
)
from llm_serving.server.pooling.classification import probabilities

ARCHITECTURE = {"architectures": ["Qwen3ForSequenceClassification"]}


def folder_of(place: Path, values: dict[str, Any]) -> Path:
    (place / "config.json").write_text(json.dumps({**ARCHITECTURE, **values}))
    return place


@pytest.mark.parametrize(
    ("values", "labels", "activation"),
    [
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), SOFTMAX),
        ({"id2label": {"0": "a"}}, ("a",), SIGMOID),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), SOFTMAX),
        ({}, ("LABEL_0", "LABEL_1"), SOFTMAX),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), IDENTITY),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), SIGMOID),
        ({"problem_type": "single_label_classification", "num_labels": 1}, ("LABEL_0",), SOFTMAX),
    ],
)
def test_labels_and_activations(
    tmp_path: Path, values: dict[str, Any], labels: tuple[str, ...], activation: str
) -> None:
    pooling = read_classifier(folder_of(tmp_path, values))
    assert (pooling.labels, pooling.class_activation, pooling.width) == (labels, activation, len(labels))
    assert (pooling.task, pooling.reads_prefixes, pooling.scores) == ("classify", True, False)


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({}, SIGMOID),
        ({"problem_type": "regression"}, SIGMOID),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1"}}, IDENTITY),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, IDENTITY),
        (
            {
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            SIGMOID,
        ),
        ({"sentence_transformers": {"version": "4.1"}}, SIGMOID),
    ],
)
def test_scores_have_the_activation_of_sentence_transformers(
    tmp_path: Path, values: dict[str, Any], activation: str
) -> None:
    assert read_classifier(folder_of(tmp_path, {"num_labels": 1, **values})).score_activation == activation


def test_only_qwen3_has_the_prompt_of_its_reranker_by_default(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"num_labels": 1})
    assert read_classifier(folder).pair_prompt == QWEN3_PROMPT
    assert read_classifier(folder, NO_PROMPT).pair_prompt == NO_PROMPT
    folder_of(tmp_path, {"num_labels": 1, "architectures": ["LlamaForSequenceClassification"]})
    assert read_classifier(folder).pair_prompt == NO_PROMPT
    assert read_classifier(folder, QWEN3_PROMPT).pair_prompt == QWEN3_PROMPT


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "'torch.nn.Tanh' is not supp"),
        ({"id2label": {"0": "a", "2": "b"}}, "classes 0, 1, 2"),
        ({"id2label": ["a"]}, "classes 0, 1, 2"),
        ({"id2label": {}}, "classes 0, 1, 2"),
        ({"id2label": {"0": 5}}, "each label"),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"num_labels": True}, "num_labels is True"),
        ({"problem_type": "other"}, "problem_type is 'other'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not a model \\*ForSequenceClassification"),
    ],
)
def test_wrong_descriptions_of_classes_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_classifier(folder_of(tmp_path, values))


def test_a_folder_is_a_classifier_by_its_architecture(tmp_path: Path) -> None:
    assert not is_classifier(tmp_path)
    assert is_classifier(folder_of(tmp_path, {}))
    assert not is_classifier(folder_of(tmp_path, {"architectures": "ForSequenceClassification"}))


def test_probabilities() -> None:
    logits = np.array([-200.0, 0.0, 90.0, 90.0], np.float32)
    np.testing.assert_allclose(probabilities(logits, SOFTMAX), [0, 0, 0.5, 0.5], atol=1e-7)
    np.testing.assert_allclose(probabilities(logits, SIGMOID), [0, 0.5, 1, 1], atol=1e-7)
    assert probabilities(logits, IDENTITY) is logits
    assert probabilities(logits, SIGMOID).dtype == probabilities(logits, SOFTMAX).dtype == np.float32
