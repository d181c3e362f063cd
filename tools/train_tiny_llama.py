#!/usr/bin/env python3
"""Trains a tiny Llama on the CPU with MindSpore and writes it as a Hugging Face folder.

The tool generates the text (stories, poems, small facts, sums, conversations); nothing is downloaded. The same seed,
steps and machine give the same model. If --minutes ends the training, the learning rate follows the clock, and the
result depends on the machine's speed.
"""

import argparse
import itertools
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mindspore as ms
import sentencepiece as spm
from mindspore import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent.weights.storage import from_float32, to_float32
from tools.tiny_llama.corpus import documents
from tools.tiny_llama.data import batches
from tools.tiny_llama.export import save_curve, save_fixed_files, save_weights, weights
from tools.tiny_llama.model import ModelShape, TinyLlama
from tools.tiny_llama.tokenizer import train_tokenizer
from tools.tiny_llama.trainer import History, Trainer, TrainingPlan, evaluate

TOKENIZER_DOCUMENTS = 20000
"""Number of documents from which the vocabulary is learnt."""
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "tiny_llama"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    shape, plan = ModelShape(), TrainingPlan(steps=9000)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--steps", type=int, default=plan.steps, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=math.inf, help="maximum wall time, if the steps take longer")
    parser.add_argument("--seed", type=int, default=1, help="seed of the text and of the initial weights")
    parser.add_argument("--batch", type=int, default=plan.batch, help="rows per step")
    parser.add_argument("--length", type=int, default=plan.length, help="tokens per row")
    parser.add_argument(
        "--long-length", type=int, default=plan.long_length, help="tokens per row in the last part of the training"
    )
    parser.add_argument("--learning-rate", type=float, default=plan.learning_rate, help="peak learning rate")
    parser.add_argument(
        "--export-every",
        type=float,
        default=plan.export_every_minutes,
        metavar="MINUTES",
        help="interval of writing the folder",
    )
    parser.add_argument("--hidden-size", type=int, default=shape.hidden_size, help="width of the model")
    parser.add_argument("--layers", type=int, default=shape.num_layers, help="decoder layers")
    parser.add_argument("--heads", type=int, default=shape.num_heads, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=shape.num_kv_heads, help="key/value heads; must divide --heads")
    parser.add_argument(
        "--intermediate-size", type=int, default=shape.intermediate_size, help="width of the feed-forward"
    )
    parser.add_argument("--vocab-size", type=int, default=shape.vocab_size, help="tokens in the vocabulary")
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads {options.kv_heads} does not divide --heads {options.heads}")
    return options


def make_shape(options: argparse.Namespace) -> ModelShape:
    """Returns the sizes of the model that the options request."""
    return ModelShape(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        intermediate_size=options.intermediate_size,
    )


def make_plan(options: argparse.Namespace) -> TrainingPlan:
    """Returns the training plan that the options request."""
    return TrainingPlan(
        steps=options.steps,
        minutes=options.minutes,
        batch=options.batch,
        length=options.length,
        long_length=options.long_length,
        learning_rate=options.learning_rate,
        export_every_minutes=options.export_every,
    )


def make_tokenizer_model(seed: int, vocab_size: int) -> bytes:
    """Trains the sentencepiece model on the first documents of the corpus."""
    texts = (text for document in itertools.islice(documents(seed), TOKENIZER_DOCUMENTS) for _, text in document)
    return train_tokenizer(texts, vocab_size)


def round_weights(network: TinyLlama) -> None:
    """Rounds the network's weights to bfloat16, so that they are equal to the weights in the exported file."""
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(to_float32(from_float32(parameter.asnumpy(), "bfloat16"), "bfloat16")))


def make_trainer(network: TinyLlama, plan: TrainingPlan, tokenizer_model: bytes, seed: int, out: Path) -> Trainer:
    """Returns the trainer with its text: short rows, long rows, and a fixed list of held-out rows."""
    tokenizer = spm.SentencePieceProcessor(model_proto=tokenizer_model)
    short_rows = batches(tokenizer, seed, False, plan.batch, plan.length)
    held_out = itertools.islice(batches(tokenizer, seed + 1, True, plan.batch, plan.length), plan.eval_batches)
    long_batch = max(1, plan.batch * plan.length // plan.long_length)
    long_rows = batches(tokenizer, seed + 2, False, long_batch, plan.long_length)

    def export() -> None:
        save_weights(weights(network), out / "model.safetensors")

    return Trainer(network, plan, (short_rows, long_rows), list(held_out), export)


def make_report(options: argparse.Namespace, plan: TrainingPlan, history: History, minutes: float) -> dict[str, Any]:
    """Returns a description of the training as JSON: shape, seed, steps, time, and the final losses."""
    steps = history.train[-1][0]
    return {
        "shape": asdict(make_shape(options)),
        "seed": options.seed,
        "steps": steps,
        "tokens": steps * plan.batch * plan.length,
        "minutes": round(minutes, 1),
        "train_loss": round(history.train[-1][1], 4),
        "held_out_loss": round(history.held_out[-1][1], 4),
    }


def train(options: argparse.Namespace) -> None:
    """Trains the model and writes the complete folder."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", jit_config={"jit_level": "O0"})
    start = time.monotonic()
    shape, plan, out = make_shape(options), make_plan(options), options.out
    tokenizer_model = make_tokenizer_model(options.seed, shape.vocab_size)
    save_fixed_files(shape, tokenizer_model, out)
    network = TinyLlama(shape, max(plan.length, plan.long_length), options.seed)
    print(f"{sum(p.size for p in network.trainable_params()):,} parameters; writing to {out}")
    trainer = make_trainer(network, plan, tokenizer_model, options.seed, out)
    history = trainer.run()
    save_curve(history, out / "loss_curve.png")
    report = make_report(options, plan, history, (time.monotonic() - start) / 60)
    round_weights(network)
    report["held_out_loss_bfloat16"] = round(evaluate(network, trainer.held_out), 4)
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    train(parse_arguments())
