"""The converter's program, from the command line to the exit code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llm_serving.errors import LLMServingError
from llm_serving.model.number_formats import GROUP_SIZES, STORED_FORMATS, weight_format
from performance.terminal import progress_bar
from tools.quantization.calibration import BUILTIN, calibration_tokens
from tools.quantization.convert import quantise_folder
from tools.quantization.rounding import Settings

DESCRIPTION = """\
Converts a Hugging Face Llama folder with float weights to int8 or int4 weights in the format of compressed-tensors.

int8 has a scale per output (W8A8: activations are quantised at run time). int4 has a scale per group of inputs. The
embedding, the norms and the output layer stay as they are. Tensors are converted one at a time.

The method gptq preserves the outputs of each layer on a calibration text instead of its weights. It runs the text
through the model in NumPy, layer by layer. This takes seconds for millions of parameters, and hours for billions.
"""

EPILOG = """\
examples:
  %(prog)s models/tiny_llama /tmp/tiny_int8 --format int8
  %(prog)s models/tiny_llama /tmp/tiny_int4 --format int4 --method gptq
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the model: config.json, safetensors, tokenizer")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--format", choices=[each.name for each in STORED_FORMATS], required=True)
    parser.add_argument("--group", type=int, choices=GROUP_SIZES, help="inputs that share a scale in int4 (default 64)")
    parser.add_argument("--asymmetric", action="store_true", help="store zero points, which int4 has")
    parser.add_argument("--method", choices=("rtn", "gptq"), default="rtn", help="round to nearest (default), or GPTQ")
    parser.add_argument(
        "--calibration",
        default=BUILTIN,
        metavar="FILE.jsonl",
        help='text for gptq: a file with a JSON object with "text" per line (default: builtin, the tiny Llama\'s text)',
    )
    parser.add_argument("--sequences", type=int, default=128, help="calibration sequences (default 128)")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default 256)")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parsed options. Exits with 2 on a wrong option or combination."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    wanted = weight_format(options.format)
    if (options.group and not wanted.has_groups) or (options.asymmetric and not wanted.zero):
        parser.error(f"--group and --asymmetric are not for {wanted.name}, which has a scale for each output")
    if options.sequences < 1 or options.length < 2:
        parser.error("--sequences must be at least 1, --length at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the converter. Returns 0, or prints an error message and returns 1."""
    options, start = parse_arguments(arguments), time.monotonic()
    wanted = weight_format(options.format)
    group = (options.group or 64) if wanted.has_groups else 0
    settings = Settings(wanted.bits, group, options.asymmetric, "float32")
    try:
        tokens = None
        if options.method == "gptq":
            tokens = calibration_tokens(options.folder, options.calibration, options.sequences, options.length)
        with progress_bar() as bar:
            task = bar.add_task("tensors", note="")

            def show_progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            quantise_folder(options.folder, options.out, settings, show_progress, calibration=tokens)
    except LLMServingError as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in options.out.glob("*.safetensors"))
    print(f"{options.out}: {size / 1024**2:.1f} MiB of weights, {time.monotonic() - start:.1f} s")
    return 0
