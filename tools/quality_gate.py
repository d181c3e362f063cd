#!/usr/bin/env python3
"""Measures how much quality each number format costs, with the served graph and its kernels.

The tool runs the model over texts, token by token. It prints the perplexity, its change from bf16, and the fraction of
positions with the same most probable token. The exit code is 1 if a format exceeds its limit.

    python tools/quality_gate.py                                                     # the default model
    python tools/quality_gate.py --formats bf16,int8 --json FILE
    python tools/quality_gate.py --config llama_tiny_cpu.yaml --source generated     # the embedded model

The weights of a GGUF file are first dequantized. The row "file" has the weights as the file stores them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from agent.model_runner import ModelRunner
from agent.scores import DeviceScores, StepLogits, whole_logits
from llm_serving.cli import DEFAULT_CONFIG
from llm_serving.config import Config, ModelConfig, load_config
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import ConfigError, LLMServingError
from llm_serving.gguf.place import own_config
from llm_serving.hub.fetching import cached_draft
from llm_serving.ipc.shm import SlotLayout, StepSlot
from llm_serving.model.number_formats import INTEGER_FORMATS
from llm_serving.sampling_params import SAMPLER_PARAMETERS
from tools.quality_texts import SOURCES, Texts, calibration_texts
from tools.quantization.calibration import BUILTIN, calibration_tokens
from tools.quantization.convert import quantise_folder
from tools.quantization.float_folder import write_float_folder
from tools.quantization.rounding import Settings

BASELINE = "bf16"
Visit = Callable[[int, NDArray[np.float32]], None]
"""Type of functions that get a position and its logits [sequences, vocabulary]. The array is valid only during the
call.
"""
_BLOCK_SIZE = 16
"""Tokens of a KV block."""
_NEUTRAL = {each.name: each.default for each in SAMPLER_PARAMETERS} | {
    "temperature": 0,
    "do_sample": 1,
    "sample_position": 0,
    "num_top_logits": 1,  # without this entry, some graphs return only the best token and no logits
    "history_lens": 0,
    "history_prompt_lens": 0,
}


@dataclass(frozen=True)
class Format:
    """A number format to measure, which is a row of the table: config overrides, and how much quality it may cost."""

    name: str
    overrides: tuple[str, ...] = ()
    limit: float | None = None
    """Maximum relative increase of the perplexity, or None without a limit."""
    calibrated: Settings | None = None
    """Settings with which the model folder is first converted by GPTQ, or None to measure the original folder."""
    as_stored: bool = False
    """True only for the format ``file``: the weights are used as the GGUF file stores them, whatever the config is."""


FORMATS = (
    Format(BASELINE, ("weight_format=bf16", "kv_format=bf16")),
    Format("float32", ("model_dtype=float32",)),
    *(Format(each.name, (f"weight_format={each.name}",), each.perplexity_limit) for each in INTEGER_FORMATS),
    Format("int4 gptq", ("weight_format=auto",), 0.05, Settings(4, 64, False, "bfloat16")),
    Format("file", limit=0.01, as_stored=True),
    Format("kv int8", ("weight_format=bf16", "kv_format=int8"), 0.01),
    Format("int8 + kv int8", ("weight_format=int8", "kv_format=int8"), 0.01),
    Format("int4 + kv int8", ("weight_format=int4", "kv_format=int8"), 0.05),
)


@dataclass(frozen=True)
class Quality:
    """The measured quality of a number format."""

    name: str
    perplexity: float
    change: float
    """Relative change of the perplexity, compared with the baseline format."""
    agreement: float
    """Fraction of positions whose most probable token is the same as with the baseline format."""
    limit: float | None
    seconds: float

    @property
    def passes(self) -> bool:
        return self.limit is None or self.change <= self.limit


def forced_config(name: str, num_seqs: int, length: int, overrides: Sequence[str]) -> Config:
    """Loads the config ``name``, with memory for ``num_seqs`` texts of ``length`` tokens in one batch."""
    sizes = {
        "model_config.max_generate_length": length,
        "model_config.seq_length": f"[{length}]",
        "model_config.prefill_batch_size": "[1]",
        "model_config.decode_batch_size": f"[{num_seqs}]",
        "pa_config.decode_seq_length": length,
        "pa_config.block_size": _BLOCK_SIZE,
        "pa_config.num_blocks": 1 + num_seqs * -(-length // _BLOCK_SIZE),
        "scheduler_config.max_num_batched_tokens": max(num_seqs, length),
    }
    settings = [*(f"{key}={value}" for key, value in sizes.items()), *overrides]
    return load_config(name, settings, fetch=cached_draft)


class ForcedDecoder:
    """A loaded model that reads given texts: the input at each position is the text's token, not a chosen token."""

    def __init__(self, config: Config) -> None:
        self._runner = ModelRunner(config, lambda stage, done, of: None)
        self._runner.load()
        self._runner.compile()
        layout = SlotLayout.of(config.slot_limits())
        self._slot = StepSlot(layout, bytearray(layout.slot_bytes))
        self._logits: NDArray[np.float32] | None = None
        self._tap_logits()

    def run(self, tokens: NDArray[np.int32], visit: Visit) -> None:
        """Runs one decode step per position of ``tokens`` [sequences, length], and passes the logits to ``visit``."""
        length = tokens.shape[1]
        for position in range(length):
            self._fill(tokens[:, position], position, -(-length // _BLOCK_SIZE))
            self._runner.run_step(self._slot, is_decode=True)
            assert self._logits is not None, "a step that samples has logits"
            visit(position, self._logits)

    def _tap_logits(self) -> None:
        """Wraps the sampler's method ``sample``, so that ``_logits`` gets the logits of each step."""
        sampler: Any = self._runner._sampler
        sample = sampler.sample

        def sample_and_keep(scores: StepLogits | DeviceScores, slot: StepSlot) -> None:
            sample(scores, slot)
            self._logits = whole_logits(scores, slot.num_seqs)

        sampler.sample = sample_and_keep

    def _fill(self, tokens: NDArray[np.int32], position: int, width: int) -> None:
        slot, seqs = self._slot, len(tokens)
        tables = 1 + np.arange(seqs * width, dtype=np.int32).reshape(seqs, width)
        slot.token_ids[:seqs], slot.positions[:seqs] = tokens, position
        slot.slot_mapping[:seqs] = tables[:, position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        slot.query_lens[:seqs], slot.context_lens[:seqs] = 1, position + 1
        slot.block_tables[: seqs * width] = tables.reshape(-1)
        slot.rows[:seqs] = np.arange(seqs)
        for name, value in _NEUTRAL.items():
            getattr(slot, name)[:seqs] = value
        slot.write_header(position + 1, num_tokens=seqs, num_seqs=seqs, table_width=width, history_len=0)


def measure(config: Config, texts: Texts) -> tuple[float, NDArray[np.int32]]:
    """Runs the model over ``texts``. Returns the mean loss in nats, and the most probable token at each position."""
    best = np.zeros(texts.tokens.shape, np.int32)
    losses = np.zeros(texts.tokens.shape)

    def visit(position: int, logits: NDArray[np.float32]) -> None:
        best[:, position] = logits.argmax(axis=1)
        if position + 1 < texts.tokens.shape[1]:
            wide = logits.astype(np.float64)
            largest = wide.max(axis=1)
            total = largest + np.log(np.exp(wide - largest[:, None]).sum(axis=1))
            losses[:, position] = total - wide[np.arange(len(wide)), texts.tokens[:, position + 1]]

    ForcedDecoder(config).run(texts.tokens, visit)
    return float(losses[texts.counted].mean()), best


def known_keys() -> set[str]:
    """Returns the names of the settings in ``model_config``."""
    return {field.name for field in fields(ModelConfig)}


class Model:
    """The measured model: its config, a folder with its weights as floats, and calibration tokens for GPTQ."""

    def __init__(self, config_name: str, source: str, scratch: Path) -> None:
        self.config_name, self._scratch, self._source = config_name, scratch, source
        self.plain = load_config(config_name, fetch=cached_draft)
        assert self.plain.model_config.model_path is not None, "main() has refused a config without a model"
        self.stored = Path(self.plain.model_config.model_path)
        self.file = own_config(self.stored)
        self.floats = self.stored
        if self.file is not None:
            self.floats = scratch / "floats"
            write_float_folder(self.file, self.floats, "float32")

    def overrides(self, each: Format) -> list[str]:
        """Returns the config overrides of a format. First converts the model if the format needs that."""
        if each.as_stored:
            return []
        dtype = [] if any(item.startswith("model_dtype=") for item in each.overrides) else ["model_dtype=bfloat16"]
        items = [*dtype, *(item for item in each.overrides if item.split("=")[0] in known_keys())]
        path = self.floats if each.calibrated is None else self._converted(each.name, each.calibrated)
        tokenizer = [] if self.file is None else [f"tokenizer.vocab_file={self.file}"]
        return [*tokenizer, *(f"model_config.{item}" for item in (*items, f"model_path={path}"))]

    def _converted(self, name: str, settings: Settings) -> Path:
        out = self._scratch / name.replace(" ", "_")
        quantise_folder(self.floats, out, settings, lambda done, total: None, calibration=self._calibration())
        return out

    def _calibration(self) -> NDArray[np.int32]:
        """Returns token ids [sequences, 256] for GPTQ. They come from texts of the same kind as the measured texts."""
        if self._source == "generated":
            return calibration_tokens(self.floats, BUILTIN, 128, 256)
        return calibration_texts(load_tokenizer(self.plain), 64, 256).tokens


def is_available(each: Format, model: Model) -> bool:
    """Returns True if a format can be measured: the config must have all settings that the format overrides.

    The format that measures the weights as a GGUF file stores them (``as_stored``) also needs a model with a GGUF file.
    """
    wanted = {item for item in each.overrides if not item.endswith(("=bf16", "=auto"))}
    return all(item.split("=")[0] in known_keys() for item in wanted) and (model.file is not None or not each.as_stored)


def run(config_name: str, source: str, formats: Sequence[Format], count: int, length: int) -> list[Quality]:
    """Measures the formats, baseline first, and prints each row of the table when it is complete."""
    results: list[Quality] = []
    reference: tuple[float, NDArray[np.int32]] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        model = Model(config_name, source, Path(scratch))
        texts = SOURCES[source](load_tokenizer(model.plain), count, length)
        print(f"{config_name}: {int(texts.counted.sum())} tokens of {count} {source} texts\n\n{TABLE_HEAD}")
        for each in formats:
            if not is_available(each, model):
                continue
            start = time.monotonic()
            config = forced_config(config_name, count, length, model.overrides(each))
            loss, best = measure(config, texts)
            reference = reference or (loss, best)
            agreement = float((best == reference[1])[texts.counted].mean())
            change, seconds = math.exp(loss - reference[0]) - 1, time.monotonic() - start
            results.append(Quality(each.name, math.exp(loss), change, agreement, each.limit, seconds))
            print(table_line(results[-1]), flush=True)
    return results


TABLE_HEAD = f"{'format':<18} {'perplexity':>10} {'change':>9} {'top-1 agreement':>16} {'limit':>7}   verdict"


def table_line(quality: Quality) -> str:
    limit = "" if quality.limit is None else f"{quality.limit:.0%}"
    verdict = "" if quality.limit is None else "ok" if quality.passes else "TOO FAR"
    return (
        f"{quality.name:<18} {quality.perplexity:>10.4f} {quality.change:>+9.3%} {quality.agreement:>16.2%} "
        f"{limit:>7}   {verdict}"
    ).rstrip()


def chosen_formats(names: str) -> list[Format]:
    """Returns the formats to measure: the baseline, then the named formats. Raises ConfigError for an unknown name."""
    wanted = {name.strip() for name in names.split(",")} if names else {each.name for each in FORMATS}
    unknown = wanted - {each.name for each in FORMATS}
    if unknown:
        raise ConfigError(f"--formats {sorted(unknown)[0]}: the formats are {', '.join(each.name for each in FORMATS)}")
    return [each for each in FORMATS if each.name in wanted or each.name == BASELINE]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="config of the measured model (default %(default)s)")
    parser.add_argument(
        "--source",
        choices=tuple(SOURCES),
        default="general",
        help="texts: `general` are documentation and code of Python and of this project (default), `generated` those "
        "of the embedded model's generator",
    )
    parser.add_argument("--formats", default="", help="comma-separated rows of the table (default: all)")
    parser.add_argument("--texts", type=int, default=60, help="number of texts (default 60)")
    parser.add_argument("--length", type=int, default=160, help="maximum tokens of a text (default 160)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the measurement and returns the exit code.

    0: success. 1: a format exceeds its limit. 2: nothing could be measured.
    """
    options = parse_arguments(arguments)
    try:
        if load_config(options.config, fetch=cached_draft).model_config.load_format == "dummy":
            raise ConfigError(f"{options.config}: random weights have no quality to measure")
        results = run(options.config, options.source, chosen_formats(options.formats), options.texts, options.length)
    except LLMServingError as error:
        print(f"quality_gate: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n", encoding="utf-8")
    return 0 if all(each.passes for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
