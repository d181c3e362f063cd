"""Reads the files of sentence-transformers, which state how a model turns hidden states into an embedding or a score.

The files are ``modules.json``, the ``config.json`` of each module's folder and ``config_sentence_transformers.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object, read_small_text
from llm_serving.model.families import CLASSIFIER

MAX_FILE_BYTES = 1024 * 1024
"""Maximum size of a JSON file about the pooling of a model."""
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
"""Maximum size of ``tokenizer.json``."""
MAX_WIDTH = 65536
"""Maximum number of values of an embedding, and of classes."""
MAX_LABEL_CHARS = 256
"""Maximum length of the name of a class."""
ANY_DIMENSION = 0
"""Member of ``Pooling.dimensions`` that permits every number of dimensions up to the width."""

LAST, MEAN, WEIGHTED_MEAN = "last", "mean", "weighted_mean"
METHODS = {
    "lasttoken": LAST,
    "last": LAST,
    "mean": MEAN,
    "mean_tokens": MEAN,
    "weightedmean_tokens": WEIGHTED_MEAN,
    "weightedmean": WEIGHTED_MEAN,
}
"""Maps the names of pooling methods in sentence-transformers to the values of ``Pooling.method``."""
SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"
PROBLEM_TYPES = {
    "single_label_classification": SOFTMAX,
    "multi_label_classification": SIGMOID,
    "regression": IDENTITY,
}
"""Maps ``problem_type`` of ``config.json`` to the function that turns the logits of classes into probabilities."""
_SCORE_ACTIVATIONS = {"Sigmoid": SIGMOID, "Identity": IDENTITY}
"""Maps the names of PyTorch's modules in ``config.json`` to the values of ``Pooling.score_activation``."""
QWEN3_PROMPT, NO_PROMPT = "qwen3", "none"
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after the pooling. ``folder`` has its ``model.safetensors``."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """Activation of the layer: ``identity`` or ``tanh``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that is put before a text of the client. A request selects it by ``name`` in the field ``prompt_name``."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Pooling:
    """States how an agent turns the hidden states of a text into an embedding, a score or logits of classes."""

    method: str = LAST
    """``last``, ``mean`` or ``weighted_mean``: how hidden states are pooled."""
    width: int = 0
    """Number of values of the result."""
    normalises: bool = True
    """Whether the embedding is divided by its length."""
    dense: tuple[DenseLayer, ...] = ()
    dimensions: tuple[int, ...] = ()
    """Numbers of dimensions to which a client may shorten an embedding. Empty if the model declares none."""
    prompts: tuple[Prompt, ...] = ()
    default_prompt: str = ""
    """Name of the prompt for texts that name no prompt in ``prompt_name``. Empty: these texts get no prompt."""
    score_tokens: tuple[int, ...] = ()
    """Token ids whose logits give a score: the token for no, and the token for yes. Empty for embeddings."""

    labels: tuple[str, ...] = ()
    """Names of the classes of a classifier, in the order of the rows of ``score.weight``. Empty for other models."""
    class_activation: str = SOFTMAX
    """``softmax``, ``sigmoid`` or ``identity``: the function that turns the logits of classes into probabilities."""
    score_activation: str = SIGMOID
    """``sigmoid`` or ``identity``: the function that turns the logit of a pair of texts into its score."""
    pair_prompt: str = QWEN3_PROMPT
    """``qwen3``: a pair of texts is read in the prompt of Qwen3-Reranker. ``none``: one after the other."""

    @property
    def task(self) -> str:
        """The kind of results: ``embed``, ``score`` or ``classify``."""
        return "classify" if self.labels else "score" if self.score_tokens else "embed"

    @property
    def scores(self) -> bool:
        """True if the result is a score: logit(yes) - logit(no) after the last token."""
        return bool(self.score_tokens)

    @property
    def reads_prefixes(self) -> bool:
        """True if the result needs only the last hidden state, so that a prefix may come from the prefix cache."""
        return self.method == LAST

    def permits(self, dimensions: int) -> bool:
        """Returns whether a client may ask for embeddings with this number of dimensions."""
        if dimensions in self.dimensions:
            return True
        return ANY_DIMENSION in self.dimensions and 1 <= dimensions <= self.width


def has_modules(folder: Path) -> bool:
    """Returns whether a model folder has the files of sentence-transformers."""
    return folder.is_dir() and (folder / "modules.json").is_file()


def read_pooling(folder: Path | None, hidden_size: int, dimensions: tuple[int, ...] | None) -> Pooling:
    """Returns how a model folder makes embeddings. Without ``modules.json``, the last hidden state is used.

    ``dimensions`` replaces the numbers of dimensions that ``config.json`` declares, unless it is None. Raises
    CheckpointError if the files are damaged or need something that this server does not have.
    """
    pooling = Pooling(width=hidden_size)
    if folder is not None and has_modules(folder):
        pooling = _of_modules(folder, hidden_size)
    if pooling.scores:
        return pooling
    declared = _declared_dimensions(folder) if dimensions is None else dimensions
    too_large = [each for each in declared if each > pooling.width]
    if too_large:
        problem = f"{too_large[0]} are declared for shorter embeddings"
        raise CheckpointError(f"embeddings have {pooling.width} dimensions, and {problem}; declare at most as many")
    return replace(pooling, dimensions=declared, **_prompts(folder))


def read_score(folder: Path | None, hidden_size: int, tokenizer_file: Path, tokens: tuple[int, ...] | None) -> Pooling:
    """Returns the pooling of a model that answers yes or no, such as Qwen3-Reranker.

    ``tokens`` are the ids of the tokens for no and for yes. If ``tokens`` is None, the tokenizer's tokens ``no`` and
    ``yes`` are used. Raises CheckpointError if the tokenizer does not have these tokens.
    """
    if tokens is None and folder is not None and has_modules(folder):
        pooling = _of_modules(folder, hidden_size)
        if pooling.scores:
            return pooling
    if tokens is None:
        tokens = _yes_and_no(tokenizer_file)
    return Pooling(width=1, normalises=False, score_tokens=tokens)


def is_classifier(folder: Path) -> bool:
    """Returns whether ``config.json`` of a model folder names an architecture ``*ForSequenceClassification``."""
    if not (folder / "config.json").is_file():
        return False
    names = read_json_object(folder / "config.json", MAX_FILE_BYTES, CheckpointError).get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in names)


def read_classifier(folder: Path | None, pair_prompt: str = "auto") -> Pooling:
    """Returns the pooling of a classifier: the logits of its classes after the last token.

    ``pair_prompt`` is ``auto`` or a value of ``Pooling.pair_prompt``. Only models with one class read pairs. Raises
    CheckpointError if the model has no classes, or if ``config.json`` describes them wrongly.
    """
    if folder is None or not is_classifier(folder):
        raise CheckpointError(f"{folder}: is not a model *{CLASSIFIER}, which model_config.task: classify needs")
    file = folder / "config.json"
    values = read_json_object(file, MAX_FILE_BYTES, CheckpointError)
    labels = _labels(values, file)
    problem = values.get("problem_type")
    if problem is not None and problem not in PROBLEM_TYPES:
        raise CheckpointError(f"{file}: problem_type is {problem!r}; it must be one of {', '.join(PROBLEM_TYPES)}")
    activation = (SIGMOID if len(labels) == 1 else SOFTMAX) if problem is None else PROBLEM_TYPES[problem]
    if pair_prompt == "auto":
        pair_prompt = QWEN3_PROMPT if f"Qwen3{CLASSIFIER}" in _list(values.get("architectures")) else NO_PROMPT
    return Pooling(
        width=len(labels), normalises=False, labels=labels, class_activation=activation, pair_prompt=pair_prompt,
        score_activation=_score_activation(values, file) if len(labels) == 1 else SIGMOID,
    )  # fmt: skip


def _score_activation(values: Mapping[str, object], file: Path) -> str:
    """Returns the function that ``config.json`` names for the scores of a CrossEncoder of sentence-transformers.

    The default is the sigmoid, as in sentence-transformers. ``problem_type`` has no effect on scores.
    """
    settings = values.get("sentence_transformers")
    stated = settings.get("activation_fn") if isinstance(settings, dict) else None
    stated = values.get("sbert_ce_default_activation_function") if stated is None else stated
    if stated is None:
        return SIGMOID
    activation = _SCORE_ACTIVATIONS.get(str(stated).rpartition(".")[2])
    if activation is None:
        raise CheckpointError(f"{file}: the activation of scores {stated!r} is not supported; Sigmoid and Identity are")
    return activation


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _labels(values: Mapping[str, object], file: Path) -> tuple[str, ...]:
    """Returns the names of the classes in ``id2label``. Without this key, there are ``num_labels`` classes, by default
    two.
    """
    stated = values.get("id2label")
    if stated is None:
        number = values.get("num_labels", 2)
        if type(number) is not int or not 1 <= number <= MAX_WIDTH:
            raise CheckpointError(f"{file}: num_labels is {number!r}; it must be a whole number from 1 to {MAX_WIDTH}")
        return tuple(f"LABEL_{index}" for index in range(number))
    wanted = [str(index) for index in range(len(stated))] if isinstance(stated, dict) else []
    if not isinstance(stated, dict) or not 1 <= len(stated) <= MAX_WIDTH or set(stated) != set(wanted):
        raise CheckpointError(f"{file}: id2label must name the classes 0, 1, 2, ... (at most {MAX_WIDTH})")
    labels = tuple(stated[index] for index in wanted)
    if not all(isinstance(label, str) and len(label) <= MAX_LABEL_CHARS for label in labels):
        raise CheckpointError(f"{file}: each label of id2label must be a text of at most {MAX_LABEL_CHARS} characters")
    return labels


def _of_modules(folder: Path, hidden_size: int) -> Pooling:
    pooling, place = Pooling(width=hidden_size, normalises=False), folder / "modules.json"
    kinds: list[str] = []
    for module in _modules(place):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{place}: the path {path!r} is not a folder inside of the model folder")
        if kinds and kinds[-1] == "Normalize":
            raise CheckpointError(f"{place}: {kind} follows Normalize; only Normalize as the last module is supported")
        if (kind == "Transformer") != (not kinds):
            raise CheckpointError(
                f"{place}: module {len(kinds)} is {kind}; the first module must be the only Transformer"
            )
        if kind == "Transformer":
            if path not in ("", "."):
                raise CheckpointError(f"{place}: Transformer is in {path!r}; it must be in the model folder itself")
        elif kind == "Pooling":
            pooling = replace(pooling, method=_method(folder / path / "config.json"))
        elif kind == "Dense":
            layer = _dense(folder / path, pooling.width)
            pooling = replace(pooling, dense=(*pooling.dense, layer), width=layer.out_features)
        elif kind == "Normalize":
            pooling = replace(pooling, normalises=True)
        elif kind == "LogitScore":
            pooling = replace(pooling, width=1, score_tokens=_score_tokens(folder / path / "config.json"))
        else:
            raise CheckpointError(
                f"{place}: the module {kind!r} is not supported; there are Pooling, Dense, Normalize and LogitScore"
            )
        kinds.append(kind)
    if kinds.count("Pooling") + kinds.count("LogitScore") != 1 or (pooling.dense and kinds[1] != "Pooling"):
        raise CheckpointError(f"{place}: the modules are {kinds}; one Pooling or LogitScore must follow Transformer")
    return pooling


def _modules(place: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_small_text(place, MAX_FILE_BYTES, CheckpointError))
    except (ValueError, RecursionError) as reason:
        raise CheckpointError(f"{place}: not valid JSON: {reason}") from reason
    if not isinstance(modules, list) or not modules or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{place}: must hold a list of modules")
    return modules


def _method(file: Path) -> str:
    values = read_json_object(file, MAX_FILE_BYTES, CheckpointError)
    if values.get("include_prompt", True) is not True:
        raise CheckpointError(f"{file}: include_prompt is false; only true is supported")
    stated = values.get("pooling_mode")
    if stated is None:
        prefix = "pooling_mode_"
        chosen = [name.removeprefix(prefix) for name, on in values.items() if name.startswith(prefix) and on is True]
        stated = chosen[0] if len(chosen) == 1 else chosen
    method = METHODS.get(stated) if isinstance(stated, str) else None
    if method is None:
        known = ", ".join(METHODS)
        raise CheckpointError(f"{file}: the pooling mode {stated} is not supported; one of these must be: {known}")
    return method


def _dense(folder: Path, width: int) -> DenseLayer:
    file = folder / "config.json"
    values = read_json_object(file, MAX_FILE_BYTES, CheckpointError)
    inputs, outputs = (_size(values, name, file) for name in ("in_features", "out_features"))
    if inputs != width:
        raise CheckpointError(f"{file}: in_features is {inputs}; the module before has {width} outputs")
    stated = str(values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(stated.rpartition(".")[2])
    if activation is None:
        raise CheckpointError(f"{file}: activation_function {stated!r} is not supported; Identity and Tanh are")
    return DenseLayer(str(folder), inputs, outputs, values.get("bias", True) is True, activation)


def _size(values: Mapping[str, object], name: str, file: Path) -> int:
    value = values.get(name)
    if type(value) is not int or not 1 <= value <= MAX_WIDTH:
        raise CheckpointError(f"{file}: {name} is {value!r}; it must be a whole number from 1 to {MAX_WIDTH}")
    return value


def _score_tokens(file: Path) -> tuple[int, int]:
    values = read_json_object(file, MAX_FILE_BYTES, CheckpointError)
    no, yes = values.get("false_token_id"), values.get("true_token_id")
    if type(no) is not int or type(yes) is not int or min(no, yes) < 0:
        raise CheckpointError(f"{file}: true_token_id is {yes!r} and false_token_id is {no!r}; both must be token ids")
    return no, yes


def _yes_and_no(tokenizer_file: Path) -> tuple[int, int]:
    values = read_json_object(tokenizer_file, MAX_TOKENIZER_BYTES, CheckpointError)
    model = values.get("model", values)
    vocabulary = model.get("vocab", model) if isinstance(model, dict) else {}
    ids = [vocabulary.get(word) if isinstance(vocabulary, dict) else None for word in ("no", "yes")]
    if type(ids[0]) is not int or type(ids[1]) is not int:
        raise CheckpointError(
            f"{tokenizer_file}: has no tokens 'no' and 'yes', whose logits give a score; set "
            "model_config.score_token_ids: [NO, YES]"
        )
    return ids[0], ids[1]


def _declared_dimensions(folder: Path | None) -> tuple[int, ...]:
    """Returns the numbers of dimensions that ``config.json`` declares (matryoshka embeddings), or ()."""
    file = None if folder is None else folder / "config.json"
    if file is None or not file.is_file():
        return ()
    values = read_json_object(file, MAX_FILE_BYTES, CheckpointError)
    stated = values.get("matryoshka_dimensions")
    if stated is None:
        return (ANY_DIMENSION,) if values.get("is_matryoshka") is True else ()
    if not isinstance(stated, list) or not all(type(each) is int and 1 <= each <= MAX_WIDTH for each in stated):
        raise CheckpointError(f"{file}: matryoshka_dimensions must be a list of numbers from 1 to {MAX_WIDTH}")
    return tuple(stated)


def _prompts(folder: Path | None) -> dict[str, Any]:
    """Returns the fields ``prompts`` and ``default_prompt`` of a folder's ``Pooling``."""
    file = None if folder is None else folder / "config_sentence_transformers.json"
    if file is None or not file.is_file():
        return {}
    values = read_json_object(file, MAX_FILE_BYTES, CheckpointError)
    stated, default = values.get("prompts") or {}, values.get("default_prompt_name") or ""
    if not isinstance(stated, dict) or not all(isinstance(text, str) for text in stated.values()):
        raise CheckpointError(f"{file}: prompts must be an object of texts")
    if not isinstance(default, str):
        raise CheckpointError(f"{file}: default_prompt_name is {default!r}; it must be a text")
    if default and default not in stated:
        raise CheckpointError(f"{file}: default_prompt_name is {default!r}, and prompts has no such name")
    similarity = values.get("similarity_fn_name")
    if similarity not in (None, "cosine"):
        raise CheckpointError(f"{file}: similarity_fn_name is {similarity!r}; only cosine is supported")
    return {"prompts": tuple(Prompt(name, text) for name, text in stated.items()), "default_prompt": default}
