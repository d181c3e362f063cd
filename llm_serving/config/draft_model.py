"""Reads the draft model of speculative decoding (``speculative_config.model``), and checks it against the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.lookup import refuse_pickles
from llm_serving.config.source import RawConfig
from llm_serving.errors import CheckpointError
from llm_serving.gguf.place import find_gguf
from llm_serving.model.quantization import stored_weight_format, stored_weight_group
from llm_serving.model.shape import ModelShape

_KEY = "speculative_config.model"


EAGLE, MTP = "eagle", "mtp"


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head: a small network that makes drafts from the model's hidden states (EAGLE-3 or MTP).

    ``DraftModel.shape`` has the sizes of its layer. The ``vocab_size`` of that shape is the number of tokens that the
    head can guess.
    """

    kind: str
    """Kind of the head: ``EAGLE`` or ``MTP``. It is the value of ``speculative_config.method``."""
    layers: tuple[int, ...]
    """Numbers of the model's layers whose output the draft head reads. The first layer has the number 1. The head joins
    these hidden states in this order.
    """
    hidden_size: int
    vocab_size: int
    """``hidden_size`` and ``vocab_size``: sizes of the model, not of the head."""
    shares_output: bool = False
    """Whether an MTP layer uses the model's embedding as its output layer."""
    norm_before_residual: bool = False
    """Whether the residual stream of an EAGLE-3 head begins with the normalised hidden state. Heads of ``speculators``
    may have this form.
    """


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Describes a draft model, which guesses the next tokens of the model's sequences."""

    path: str | None
    """Absolute path of the draft model's Hugging Face folder or GGUF file. None for an MTP layer of a model without
    files.
    """
    shape: ModelShape
    stored_weight_format: str | None = None
    """Format of the draft model's quantized weights, ``int8`` or ``int4``. None if all weights are floats."""
    stored_weight_group: int = 1
    head: Head | None = None
    """The draft head. None if the draft model is a complete model."""

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Numbers of the model's layers whose output the draft head reads, ascending. See ``Config.tapped_layers``."""
        return () if self.head is None else tuple(sorted(set(self.head.layers)))


def read_draft_model(raw: RawConfig, path: Path, shape: ModelShape, *, has_weights: bool) -> DraftModel:
    """Returns the draft model in ``path`` for a model with the sizes ``shape``.

    ``has_weights`` is False if all weights are random (``model_config.load_format: dummy``). Raises ConfigError if the
    draft model does not fit the model. Raises CheckpointError if its files cannot be used.
    """
    draft = ModelShape.from_path(path)
    _check_vocabulary(raw, path, draft, shape)
    if draft.latent is not None or draft.experts is not None or draft.delta is not None:
        raise raw.error(_KEY, str(path), f"is a {draft.architecture}; a draft model must be dense, without experts")
    if has_weights and find_gguf(path) is None and not any(path.glob("*.safetensors")):
        refuse_pickles(path)
        raise CheckpointError(f"{path}: there are no *.safetensors files and no GGUF file ({_KEY})")
    if not has_weights:
        return DraftModel(str(path), draft)
    return DraftModel(str(path), draft, stored_weight_format(path), stored_weight_group(path))


def _check_vocabulary(raw: RawConfig, path: Path, draft: ModelShape, shape: ModelShape) -> None:
    """Raises ConfigError unless both models have about the same number of tokens.

    Some published models add unused rows, up to a multiple of 128 or 512, so a small difference is allowed.
    ``check_same_vocabulary`` compares the tokens themselves.
    """
    padding = 1024
    if abs(draft.vocab_size - shape.vocab_size) >= padding:
        problem = (
            f"has a vocabulary of {draft.vocab_size} tokens, and the model has {shape.vocab_size}; "
            "a draft model needs the model's tokenizer"
        )
        raise raw.error(_KEY, str(path), problem)
