"""Tests the training of the embedded model: its corpus, its tokenizer in both forms, and a very short run."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
import tokenizers
from jinja2 import Environment
from safetensors import safe_open

from support.forked_programs import run_forked
from tools.tiny_llama.corpus import documents, training_documents
from tools.tiny_llama.data import batches, encoded_documents, is_held_out
from tools.tiny_llama.initial import Circuit, Matrix
from tools.tiny_llama.tokenizer import BOS_ID, EOS_ID, encode_document, render

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
COMMITTED = ROOT / "models" / "tiny_llama"

FILES = {
    "config.json", "generation_config.json", "loss_curve.png", "model.safetensors", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "training.json",
}  # fmt: skip
ODD_TEXTS = (
    *("", " ", "  two  spaces ", "\n\nline\r\n\ttab", "\x00\x01\x7f", "a\u00a0b\u200d", "e\u0301 é ß ﬁ", "\U0010ffff"),
    *("日本語", "🦙 llama 🦙", "aaaaaaaaaaaaaaa", "12345.67", "<unk>"),
    *("<s><|user|>Hi</s><|assistant|>", "<|assistant|", "<|user|> x <|user|>"),
)


@pytest.fixture(scope="module")
def processor() -> spm.SentencePieceProcessor:
    """Returns the SentencePiece model that is committed in the repository."""
    return spm.SentencePieceProcessor(model_file=str(COMMITTED / "tokenizer.model"))


@pytest.fixture(scope="module")
def fast_tokenizer() -> tokenizers.Tokenizer:
    """Returns the ``tokenizer.json`` that is committed in the repository."""
    return tokenizers.Tokenizer.from_file(str(COMMITTED / "tokenizer.json"))


def some_documents(count: int, seed: int = 5) -> list[list[tuple[str, str]]]:
    """Returns the first ``count`` documents of the corpus with this seed."""
    return list(itertools.islice(documents(seed), count))


def test_corpus_is_deterministic_under_a_seed() -> None:
    """Two corpus streams with one seed are equal. Two streams with different seeds differ."""
    assert some_documents(300) == some_documents(300)
    assert some_documents(300) != some_documents(300, seed=6)


def test_corpus_has_no_open_slots_and_ends_with_an_answer() -> None:
    """No placeholder of a template remains in a text, and each conversation ends with the assistant."""
    for document in some_documents(2000):
        assert all(text.strip() == text and text and "{" not in text for _, text in document)
        assert document[-1][0] in ("text", "assistant")


def test_both_tokenizer_files_give_the_same_ids_and_decode_exactly(
    processor: spm.SentencePieceProcessor, fast_tokenizer: tokenizers.Tokenizer
) -> None:
    """The texts include unusual Unicode characters and special tokens."""
    for text in (*ODD_TEXTS, *(render(document) for document in some_documents(1500))):
        ids = processor.Encode(text)
        assert fast_tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert fast_tokenizer.encode(text).ids == [BOS_ID, *ids]
        assert processor.Decode(ids) == text
        assert fast_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_training_ids_are_those_of_the_chat_template(processor: spm.SentencePieceProcessor) -> None:
    """The model is trained on exactly the ids that a server renders and encodes."""
    config = json.loads((COMMITTED / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = Environment(autoescape=False).from_string(config["chat_template"])  # noqa: S701
    chats = [document for document in some_documents(200) if document[0][0] != "text"]
    for chat in chats:
        messages = [{"role": role, "content": text} for role, text in chat]
        text = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=False)
        assert text == render(chat)
        assert processor.Encode(text) == encode_document(processor, chat)
        prompt = template.render(messages=messages[:-1], bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
        assert text.startswith(prompt)
        assert prompt.endswith("<|assistant|>")


def test_rows_are_full_and_begin_with_a_document(processor: spm.SentencePieceProcessor) -> None:
    """Training rows have no padding.

    Labels are the tokens shifted by one, and documents in a row are numbered from 1.
    """
    tokens, numbers, labels = next(batches(processor, 1, False, batch=4, length=128))
    assert tokens.shape == numbers.shape == labels.shape == (4, 128)
    assert (tokens[:, 1:] == labels[:, :-1]).all()
    assert (tokens[:, 0] == BOS_ID).all()
    assert (numbers[:, 0] == 1).all()
    assert (np.diff(numbers, axis=1) == (tokens[:, 1:] == BOS_ID)).all()


def test_held_out_documents_are_never_trained_on(processor: spm.SentencePieceProcessor) -> None:
    """The training documents and the held-out documents have no document in common.

    On both sides, each document ends with EOS.
    """
    sides = [list(itertools.islice(encoded_documents(processor, 1, side), 60)) for side in (False, True)]
    assert all(ids[0] == BOS_ID and ids[-1] == EOS_ID for side in sides for ids in side)
    for side, held_out in zip(sides, (False, True), strict=True):
        assert all(is_held_out(processor.Decode(ids)) == held_out for ids in side)


def test_tokenizer_does_not_depend_on_the_drills(processor: spm.SentencePieceProcessor) -> None:
    """The tokenizer is trained on the corpus. The model is trained on the corpus with exercises (drills) between
    documents.

    This test checks that both have the same corpus documents in the same order.
    """
    corpus = some_documents(200, seed=1)
    training = iter(itertools.islice(training_documents(1), 600))
    assert all(document in training for document in corpus)


def rotated(vectors: Matrix, theta: float) -> Matrix:
    """Applies the rotary embedding (rotate-half form) as in the model. The row index is the position."""
    half = vectors.shape[1] // 2
    angles = np.outer(np.arange(len(vectors)), theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = vectors[:, :half], vectors[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1).astype(np.float32)


def test_initial_previous_token_head_looks_at_the_previous_token() -> None:
    """One attention head is initialised to attend to the previous token. It puts most attention on that token, also
    with random tokens.
    """
    rng = np.random.default_rng(0)
    circuit = Circuit(1000, 256, 32, 10000.0, rng)
    tokens = circuit.embedding(rng)[rng.integers(0, 1000, 60)]
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
    query, key = (rotated(tokens @ weight.T, 10000.0) for weight in circuit.previous_token_query_key())
    scores = np.where(np.tri(60, dtype=bool), query @ key.T / np.sqrt(32), -np.inf)
    attention = np.exp(scores - scores.max(axis=1, keepdims=True))
    attention /= attention.sum(axis=1, keepdims=True)
    assert np.diagonal(attention, offset=-1).mean() > 0.7


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that a very short training run of a very small model writes."""
    out = tmp_path_factory.mktemp("tiny") / "model"
    options = (
        "--steps 40 --batch 4 --length 32 --long-length 64 --hidden-size 64 --layers 1 --heads 2 --kv-heads 1 "
        "--intermediate-size 96 --vocab-size 600 --learning-rate 0.02"
    )
    process = run_forked(TOOLS / "train_tiny_llama.py", "--out", str(out), *options.split(), folder=ROOT, timeout=200)
    assert process.returncode == 0, process.stderr[-2000:]
    return out


def test_short_run_lowers_the_loss(trained: Path) -> None:
    """The loss is lower than that of a uniform guess, also after the weights are rounded to bfloat16."""
    report = json.loads((trained / "training.json").read_text(encoding="utf-8"))
    assert report["steps"] == 40
    assert report["held_out_loss"] < math.log(600) - 0.5
    assert report["held_out_loss_bfloat16"] == pytest.approx(report["held_out_loss"], abs=0.02)


def test_short_run_writes_a_complete_folder(trained: Path) -> None:
    """The folder has all files of a model, and the tensors of a Llama with tied embedding in bfloat16."""
    assert {path.name for path in trained.iterdir()} == FILES
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": [600, 64],
        "model.norm.weight": [64],
        layer + "input_layernorm.weight": [64],
        layer + "post_attention_layernorm.weight": [64],
        layer + "self_attn.q_proj.weight": [64, 64],
        layer + "self_attn.k_proj.weight": [32, 64],
        layer + "self_attn.v_proj.weight": [32, 64],
        layer + "self_attn.o_proj.weight": [64, 64],
        layer + "mlp.gate_proj.weight": [96, 64],
        layer + "mlp.up_proj.weight": [96, 64],
        layer + "mlp.down_proj.weight": [64, 96],
    }
    with safe_open(trained / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in slices.items()} == expected
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
        assert file.metadata() == {"format": "pt"}


def test_committed_folder_is_complete_and_small() -> None:
    """The committed model folder has at most 12 MB. Its config matches its tokenizer and its training report."""
    paths = list(COMMITTED.iterdir())
    assert {path.name for path in paths} == FILES
    assert sum(path.stat().st_size for path in paths) <= 12_000_000
    config = json.loads((COMMITTED / "config.json").read_text(encoding="utf-8"))
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (BOS_ID, EOS_ID, 2048)
